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
from .host_memory import Send, Sender
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


def edited(logits: torch.Tensor, edits: LogitEdits, send: Send | None = None) -> torch.Tensor:
    """Return logits with `edits`; those given stay. Forbidden tokens have -inf; each row has a token left.

    Args:
        logits: [N, V].
        edits: of these rows.
        send: takes them to where the logits are; None: through memory of its own.
    """
    scores, vocab = logits.clone(), logits.shape[1]
    send = send or Sender(logits.device)
    if edits.bias[0].size:
        at, kept = _places(edits.bias, vocab, send)
        scores[at] = (scores[at] + send(edits.bias_values[kept])).clamp_(-_MOST, _MOST)
    if edits.seen[0].size:
        at, kept = _places(edits.seen, vocab, send)
        rows, times = edits.seen[0][kept], send(edits.times[kept])
        repetition, values = send(edits.repetition[rows]), scores[at]
        values = torch.where(values > 0, values / repetition, values * repetition)
        values -= send(edits.frequency[rows]) * times
        values -= send(edits.presence[rows]) * (times > 0)
        scores[at] = values.clamp_(-_MOST, _MOST)
    if edits.mask_rows.size:
        index = send(edits.mask_rows)
        scores[index] = scores[index].masked_fill(forbidden(edits.mask_words, vocab, send), -torch.inf)
    if edits.banned[0].size:
        at, _ = _places(edits.banned, vocab, send)
        index = send(np.unique(edits.banned[0]))
        before = scores[index]
        scores[at] = -torch.inf
        after = scores[index]
        is_left = torch.isfinite(after.amax(-1, keepdim=True))
        scores[index] = torch.where(is_left, after, before)  # without asking the device whether there is such a row
    return scores


def _places(entries: Entries, vocab: int, send: Send) -> tuple[tuple[torch.Tensor, torch.Tensor], np.ndarray]:
    """Return where entries are in the logits, less those beyond the vocabulary, and which of them these are."""
    kept = np.flatnonzero(entries[1] < vocab)
    return (send(entries[0][kept]), send(entries[1][kept])), kept
