"""Log-probabilities of tokens from rows of logits, with ranks and the most likely ones: natively on a CPU, by a kernel
on a GPU (the most likely ones by torch), else by torch.

Not sampling (sampler.py) and not what is reported to whom (reports.py). Rows never look at each other, so what a row
gives is the same in every batch; natively to the last bit. Ties go to the lower id.
Shapes: M rows of logits, V vocabulary, N answers, n most likely tokens.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import torch

from ...native.library import load
from .host_memory import Send, Sender
from .row_scan import on_gpu

LEAST_LOGPROB = -9999.0


@dataclass(frozen=True, kw_only=True)
class RowLogprobs:
    """Log-softmax of the raw logits; nothing is below LEAST_LOGPROB, so that JSON can say it.

    Attributes:
        chosen: [N] f32, of the chosen token.
        rank: [N] i64, how many logits are at least as large as that of the chosen token (1: it is the most likely).
        top_ids: [N, n] i64, most likely first.
        top: [N, n] f32.
    """

    chosen: np.ndarray
    rank: np.ndarray
    top_ids: np.ndarray
    top: np.ndarray


class _Args(ctypes.Structure):
    """`struct RowLogprobs` of native/csrc/logprobs.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("logits", "row_ids", "tokens")),
        *((name, ctypes.c_int64) for name in ("answers", "width", "num_top")),
        *((name, ctypes.c_void_p) for name in ("chosen", "ranks", "top_ids", "top")),
        ("least", ctypes.c_float),
    )


def token_logprobs(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    num_top: int,
    rows: np.ndarray | None = None,
    send: Send | None = None,
) -> RowLogprobs:
    """Return the log-probabilities of one token a row, and of the most likely ones of that row.

    Args:
        logits: [M, V], without NaN.
        tokens: [N] i64.
        num_top: n, or V where that is less.
        rows: [N] i64, the row of each token; None: N = M, and token i goes with row i.
        send: takes `rows` to where the logits are; None: through memory of its own.
    """
    num_top = min(num_top, logits.shape[1])
    if logits.device.type == "cpu" and logits.dtype == torch.float32 and logits.is_contiguous() and load() is not None:
        return _natively(logits, tokens, num_top, np.arange(len(tokens)) if rows is None else rows)
    row_ids = None if rows is None else (send or Sender(logits.device))(rows)
    if on_gpu(logits):
        return _on_gpu(logits, tokens, num_top, row_ids)
    if row_ids is not None:
        logits = logits[row_ids]
    logits = logits.float()
    logprobs = logits.log_softmax(-1).clamp_(min=LEAST_LOGPROB)
    own = logits.gather(1, tokens[:, None])
    ids = _most_likely(logits, num_top)
    return RowLogprobs(
        chosen=logprobs.gather(1, tokens[:, None])[:, 0].cpu().numpy(),
        rank=(logits >= own).sum(-1).cpu().numpy(),
        top_ids=ids.cpu().numpy(),
        top=logprobs.gather(1, ids).cpu().numpy(),
    )


def _on_gpu(logits: torch.Tensor, tokens: torch.Tensor, num_top: int, row_ids: torch.Tensor | None) -> RowLogprobs:
    from .kernels.rows import triton_logprobs

    if row_ids is None:
        row_ids = torch.arange(len(tokens), device=logits.device)
    chosen, ranks = triton_logprobs(logits.contiguous(), row_ids, tokens, LEAST_LOGPROB)
    own = logits[row_ids, : logits.shape[1] if num_top else 0].float()
    ids = _most_likely(own, num_top)
    top = own.gather(1, ids)
    if num_top:
        top = (top - own.logsumexp(-1, keepdim=True)).clamp_(min=LEAST_LOGPROB)
    return RowLogprobs(
        chosen=chosen.cpu().numpy(), rank=ranks.cpu().numpy(), top_ids=ids.cpu().numpy(), top=top.cpu().numpy()
    )


def _natively(logits: torch.Tensor, tokens: torch.Tensor, num_top: int, rows: np.ndarray) -> RowLogprobs:
    library, num = load(), len(rows)
    assert library is not None
    row_ids, chosen_ids = np.ascontiguousarray(rows, np.int64), np.ascontiguousarray(tokens.numpy(), np.int64)
    assert chosen_ids.shape == row_ids.shape, (chosen_ids.shape, row_ids.shape)
    found = RowLogprobs(
        chosen=np.empty(num, np.float32),
        rank=np.empty(num, np.int64),
        top_ids=np.empty((num, num_top), np.int64),
        top=np.empty((num, num_top), np.float32),
    )
    args = _Args(
        logits=logits.data_ptr(),
        row_ids=row_ids.ctypes.data,
        tokens=chosen_ids.ctypes.data,
        answers=num,
        width=logits.shape[1],
        num_top=num_top,
        chosen=found.chosen.ctypes.data,
        ranks=found.rank.ctypes.data,
        top_ids=found.top_ids.ctypes.data,
        top=found.top.ctypes.data,
        least=LEAST_LOGPROB,
    )
    library.moewe_row_logprobs(ctypes.byref(args))
    return found


def _most_likely(logits: torch.Tensor, num: int) -> torch.Tensor:
    """Return the ids of the `num` largest of each row, largest first: [N, num] i64."""
    if num == 0:
        return logits[:, :0].long()
    top, ids = logits.topk(num)
    least = top[:, -1:]
    crowded = ((logits >= least).sum(-1) > num).nonzero()[:, 0]  # which of the tied ones topk takes is not defined
    if crowded.numel():
        rows = logits[crowded]
        above, tied = rows > least[crowded], rows == least[crowded]
        tied &= tied.cumsum(-1, dtype=torch.int32) <= num - above.sum(-1, keepdim=True)
        ids[crowded] = (above | tied).nonzero()[:, 1].view(-1, num)
    # Logits of 16 bits tie in most rows: sorting `num` of them by id, then by value, is cheap; all of them is not.
    ids = ids.sort(dim=-1).values
    order = logits.gather(1, ids).sort(dim=-1, descending=True, stable=True).indices
    return ids.gather(1, order)
