"""What requests do to logits before a token is chosen: bias, penalties, masks, bans, over the rows that ask for it.

Not temperature and filters (sampler.py), and not the books behind it (sampling_state.py). Order: bias; repetition,
frequency and presence penalty; mask; bans. Where a mask leaves only banned tokens, the mask counts.
Shapes: N rows, V vocabulary; logits [N, V] f32; entries are (row, token) pairs, [n] i64 each, no pair twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ..plan import TokenMask
from .masks import forbidden, masked_rows

_MOST = 3e38  # edits keep logits finite

Entries = tuple[np.ndarray, np.ndarray]


def _none() -> np.ndarray:
    return np.zeros(0, np.int64)


@dataclass(kw_only=True)
class LogitEdits:
    """Edits of N rows.

    Attributes:
        bias: entries, and `bias_values` [n] f32 to add.
        seen: entries, tokens that occurred, and `times` [n] i64 in the output.
        repetition, frequency, presence: [N] f32, used where there are `seen` entries.
        banned: entries, tokens that may not come; a pair may be there twice.
        mask_rows: [M] i64 rows with a mask, `mask_words` [M, ceil(V / 32)] u32.
    """

    bias: Entries = field(default_factory=lambda: (_none(), _none()))
    bias_values: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    seen: Entries = field(default_factory=lambda: (_none(), _none()))
    times: np.ndarray = field(default_factory=_none)
    repetition: np.ndarray = field(default_factory=lambda: np.ones(0, np.float32))
    frequency: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    presence: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    banned: Entries = field(default_factory=lambda: (_none(), _none()))
    mask_rows: np.ndarray = field(default_factory=_none)
    mask_words: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.uint32))

    def add_masks(self, masks: Sequence[TokenMask], slots: np.ndarray, vocab: int) -> None:
        """Take the masks of a plan; `slots` [N] are the rows' slots."""
        self.mask_rows, self.mask_words = masked_rows(masks, slots, vocab)


def edited(logits: torch.Tensor, edits: LogitEdits) -> torch.Tensor:
    """Return logits with `edits`; those given stay. Forbidden tokens have -inf; each row has a token left."""
    scores = logits.clone()
    vocab, device = logits.shape[1], logits.device
    if edits.bias[0].size:
        at, kept = _places(edits.bias, vocab, device)
        scores[at] = (scores[at] + _move(edits.bias_values[kept], device)).clamp_(-_MOST, _MOST)
    if edits.seen[0].size:
        at, kept = _places(edits.seen, vocab, device)
        rows, times = edits.seen[0][kept], _move(edits.times[kept], device)
        repetition, values = _move(edits.repetition[rows], device), scores[at]
        values = torch.where(values > 0, values / repetition, values * repetition)
        values -= _move(edits.frequency[rows], device) * times
        values -= _move(edits.presence[rows], device) * (times > 0)
        scores[at] = values.clamp_(-_MOST, _MOST)
    if edits.mask_rows.size:
        index = _move(edits.mask_rows, device)
        scores[index] = scores[index].masked_fill(forbidden(edits.mask_words, vocab, device), -torch.inf)
    if edits.banned[0].size:
        at, _ = _places(edits.banned, vocab, device)
        index = _move(np.unique(edits.banned[0]), device)
        before = scores[index]
        scores[at] = -torch.inf
        left = torch.isfinite(scores[index].amax(-1))
        if not bool(left.all()):
            scores[index[~left]] = before[~left]
    return scores


def _places(entries: Entries, vocab: int, device: torch.device) -> tuple[tuple[torch.Tensor, torch.Tensor], np.ndarray]:
    """Return where entries are in the logits, less those beyond the vocabulary, and which of them these are."""
    kept = np.flatnonzero(entries[1] < vocab)
    return (_move(entries[0][kept], device), _move(entries[1][kept], device)), kept


def _move(array: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)  # what is not pinned is read before this returns
