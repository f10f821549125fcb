"""A matrix product whose weight may be quantised or packed, and the rows of an embedding that may be.

Not a kernel: a packed weight goes to native_linear.py; a quantised one is dequantised to the dtype of the rows first,
which is right on every device. Letters: T rows, H heads, D inputs, N outputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .native_linear import native_head_linear, native_linear
from .packed import PackedTensor
from .tensor import QuantTensor

Matrix = torch.Tensor | QuantTensor | PackedTensor


def dense(weight: Matrix, dtype: torch.dtype) -> torch.Tensor:
    """Return `weight` as a plain tensor: itself, or dequantised to `dtype`."""
    return weight if isinstance(weight, torch.Tensor) else weight.dequantize(dtype)


def num_bytes(*weights: Matrix | None) -> int:
    """Return what `weights` take in memory, None for those that do not exist."""
    return sum(w.nbytes if isinstance(w, torch.Tensor) else w.num_bytes for w in weights if w is not None)


def linear(x: torch.Tensor, weight: Matrix, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return x weight^T + bias: x [T, D], weight [N, D], bias [N] -> [T, N] in the dtype of `x`."""
    if isinstance(weight, PackedTensor):
        return native_linear(x, weight, bias)
    return F.linear(x, dense(weight, x.dtype), bias)


def head_linear(x: torch.Tensor, weight: torch.Tensor | PackedTensor) -> torch.Tensor:
    """Return x[:, h] weight[h]^T of every head: x [T, H, D], weight [H, N, D] -> [T, H, N] in the dtype of `x`."""
    if isinstance(weight, PackedTensor):
        return native_head_linear(x, weight)
    return torch.bmm(x.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1)


def logits(
    x: torch.Tensor,
    head: torch.Tensor | PackedTensor,
    bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return x head^T + bias in fp32: [S, D] -> [S, N]. Only a packed head keeps what rounding to bf16 would lose.

    `out` [S, N] f32 is where a packed head writes it; None makes it.
    """
    if isinstance(head, PackedTensor):
        return native_linear(x, head, bias, dtype=torch.float32, out=out)
    return F.linear(x, head, bias).float()


def embedding_rows(ids: torch.Tensor, table: torch.Tensor | PackedTensor) -> torch.Tensor:
    """Return rows `ids` [T] of `table` [N, D]: [T, D]."""
    return table.gather_rows(ids) if isinstance(table, PackedTensor) else F.embedding(ids, table)
