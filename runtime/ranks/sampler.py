"""Logits to tokens, vectorised over rows: greedy, temperature, min_p, top_k, top_p.

What requests do to logits before is logit_edits.py's: forbidden tokens come as -inf. Not a grammar, not a stop
rule, not log-probabilities (logprobs.py); rows never look at each other, so a row's token is the same in every batch.
Shapes: N rows, V vocabulary; logits [N, V] f32; per-row settings are numpy [N]. Ties go to the lower id everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from .host_memory import Send, Sender
from .native_draw import can_draw_natively, draw_natively
from .randomness import uniform
from .row_scan import best_tokens, on_gpu

# A nucleus rarely holds more tokens than this; where it does, the row's whole vocabulary is sorted.
_NUM_CANDIDATES = 1024
_RUN = 256  # ids summed at once when the distribution function is inverted


@dataclass(frozen=True, kw_only=True)
class SamplingRows:
    """How each row's token is chosen.

    Attributes:
        greedy: [N] bool, take the most likely token.
        temperature, top_p: [N] f64.
        top_k: [N] i64; 0 and below keep all.
        min_p: [N] f64; 0 keeps all.
        seed: [N] u64.
        position: [N] i64, index in its sequence of the token to choose.
    """

    greedy: np.ndarray
    temperature: np.ndarray
    top_p: np.ndarray
    top_k: np.ndarray
    min_p: np.ndarray
    seed: np.ndarray
    position: np.ndarray

    def take(self, rows: np.ndarray) -> SamplingRows:
        """Return the settings of `rows` only."""
        return SamplingRows(
            greedy=self.greedy[rows],
            temperature=self.temperature[rows],
            top_p=self.top_p[rows],
            top_k=self.top_k[rows],
            min_p=self.min_p[rows],
            seed=self.seed[rows],
            position=self.position[rows],
        )


def sample(
    logits: torch.Tensor, rows: SamplingRows, best: torch.Tensor | None = None, send: Send | None = None
) -> torch.Tensor:
    """Choose a token a row, [N] i64. The best of each row must be finite; tokens of -inf are never chosen.

    Args:
        logits: [N, V].
        rows: how each is chosen.
        best: [N] i64, `best_tokens` where somebody knows them; what is returned is written there.
        send: takes `rows` to where the logits are; None: through memory of its own.
    """
    tokens = best_tokens(logits) if best is None else best
    chance = np.flatnonzero(~rows.greedy)
    if chance.size:
        send = send or Sender(logits.device)
        index = send(chance)
        tokens[index] = _drawn(logits if chance.size == len(tokens) else logits[index], rows.take(chance), send)
    return tokens


def _drawn(logits: torch.Tensor, rows: SamplingRows, send: Send) -> torch.Tensor:
    """Draw by chance where these logits lie."""
    if on_gpu(logits):
        from .kernels.rows import triton_draw

        return triton_draw(logits, rows, send)
    return draw_natively(logits, rows) if can_draw_natively(logits) else _draw(logits, rows, send)


def _draw(logits: torch.Tensor, rows: SamplingRows, send: Send) -> torch.Tensor:
    vocab = logits.shape[1]
    temperature = send(rows.temperature.astype(np.float32))
    weights = ((logits - logits.amax(-1, keepdim=True)) / temperature[:, None]).exp()  # [N, V], 1 at the most likely
    if rows.min_p.any():
        least = send(rows.min_p.astype(np.float32))
        weights.masked_fill_(weights < least[:, None], 0.0)
    limited = (rows.top_k > 0) & (rows.top_k < vocab)
    filtered = np.flatnonzero(limited | (rows.top_p < 1))
    if filtered.size:
        index = send(filtered)
        top_k = np.where(limited, rows.top_k, vocab)[filtered]
        weights[index] = _filter(weights[index], top_k, rows.top_p[filtered], send)
    return _invert(weights, send(uniform(rows.seed, rows.position)))


def _invert(weights: torch.Tensor, chance: torch.Tensor) -> torch.Tensor:
    """Return where the distribution function of `weights` [N, V] passes `chance` [N] f64, [N] i64.

    In id order, so that the last bits of the logits move no boundary far; by runs of ids first, then within one run.
    """
    num, vocab = weights.shape
    runs = torch.nn.functional.pad(weights, (0, -vocab % _RUN)).view(num, -1, _RUN)
    cumulative = runs.sum(-1, dtype=torch.float64).cumsum(-1)  # [N, ceil(V / _RUN)]
    target = chance[:, None] * cumulative[:, -1:]
    run = torch.searchsorted(cumulative, target, right=True).clamp_(max=cumulative.shape[1] - 1)
    before = torch.nn.functional.pad(cumulative, (1, 0)).gather(1, run)
    inner = runs[torch.arange(num, device=run.device), run[:, 0]].cumsum(-1, dtype=torch.float64)  # [N, _RUN]
    last = inner[:, -1:]
    within = torch.minimum(target - before, torch.nextafter(last, torch.zeros_like(last)))  # sums differ by rounding
    return run[:, 0] * _RUN + torch.searchsorted(inner, within, right=True)[:, 0]


def _filter(weights: torch.Tensor, top_k: np.ndarray, top_p: np.ndarray, send: Send) -> torch.Tensor:
    vocab = weights.shape[1]
    limit = send(top_k)[:, None]  # [N, 1], V where unlimited
    share = send(top_p)[:, None]
    widest = int(top_k[top_k < vocab].max(initial=0))
    num = widest if (top_k < vocab).all() else min(vocab, max(_NUM_CANDIDATES, widest))
    keep, enough = _count_kept(weights, limit, share, num)
    if not enough:
        keep, _ = _count_kept(weights, limit, share, vocab)
    num_kept, least = keep
    above = weights > least
    tied = weights == least
    room = num_kept - above.sum(-1, keepdim=True)  # how many of the tied ones stay: those of lowest id
    if bool((tied.sum(-1, keepdim=True) > room).any()):
        tied &= tied.cumsum(-1) <= room
    return weights * (above | tied)


def _count_kept(
    weights: torch.Tensor, limit: torch.Tensor, share: torch.Tensor, num: int
) -> tuple[tuple[torch.Tensor, torch.Tensor], bool]:
    """Return, from the `num` largest weights, how many stay and the least of them, both [N, 1]; and if `num` do."""
    vocab = weights.shape[1]
    top = weights.topk(num).values
    within = torch.arange(num, device=weights.device) < limit
    cumulative = (top * within).cumsum(-1, dtype=torch.float64)
    total = torch.where(limit < vocab, cumulative[:, -1:], weights.sum(-1, keepdim=True, dtype=torch.float64))
    wanted = torch.where(share < 1, share * total, torch.inf)
    before = torch.nn.functional.pad(cumulative[:, :-1], (1, 0))
    num_kept = (within & (before < wanted)).sum(-1, keepdim=True).clamp_(min=1)
    enough = num == vocab or bool(((limit <= num) | (cumulative[:, -1:] >= wanted)).all())
    return (num_kept, top.gather(1, num_kept - 1)), enough
