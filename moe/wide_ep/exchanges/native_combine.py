"""The sum of each token's expert outputs in one native call.

Not an exchange: rows are read where they lie. pairs.py `add_pairs` is the same in torch, to the bit.
Letters: T tokens, K top-k, M rows, D width.
"""

from __future__ import annotations

import ctypes

import torch

from ....native.library import load


class CombineArgs(ctypes.Structure):
    """`struct Combine` of native/csrc/experts.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("rows", "row_of", "weights", "shared", "residual", "out")),
        *((name, ctypes.c_int64) for name in ("tokens", "width")),
        ("top_k", ctypes.c_int32),
    )


def native_combine(
    rows: torch.Tensor,
    topk_weights: torch.Tensor,
    row_of: torch.Tensor,
    *,
    shared: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Add the rows of each token with their weights: ascending k, in fp32, rounded once.

    Args:
        rows: [M, D] bf16, outputs of experts.
        topk_weights: [T, K] f32; those of dropped choices are not read.
        row_of: [T, K] i32, the row of each choice, -1 for a dropped one.
        shared: [T, D] bf16, added to the rounded sum, and rounded.
        residual: [T, D] bf16, added to that, and rounded.

    Returns:
        [T, D] bf16.
    """
    args, out = combine_args(rows, topk_weights, row_of, shared, residual)
    library = load()
    assert library is not None, "no native kernels here"
    library.moewe_combine(ctypes.byref(args))
    return out


def combine_args(
    rows: torch.Tensor,
    topk_weights: torch.Tensor,
    row_of: torch.Tensor,
    shared: torch.Tensor | None,
    residual: torch.Tensor | None,
) -> tuple[CombineArgs, torch.Tensor]:
    """Return what `native_combine` hands to its call, and where the result will stand; see there."""
    (num_tokens, top_k), width = row_of.shape, rows.shape[1]
    assert rows.dtype == torch.bfloat16 and rows.is_contiguous(), rows.dtype
    assert topk_weights.dtype == torch.float32 and topk_weights.shape == row_of.shape and topk_weights.is_contiguous()
    assert row_of.dtype == torch.int32 and row_of.is_contiguous(), row_of.dtype
    out = torch.empty(num_tokens, width, dtype=torch.bfloat16)
    for other in (shared, residual):
        assert other is None or (other.dtype == out.dtype and other.shape == out.shape and other.is_contiguous())
    args = CombineArgs(
        rows=rows.data_ptr(),
        row_of=row_of.data_ptr(),
        weights=topk_weights.data_ptr(),
        shared=None if shared is None else shared.data_ptr(),
        residual=None if residual is None else residual.data_ptr(),
        out=out.data_ptr(),
        tokens=num_tokens,
        width=width,
        top_k=top_k,
    )
    return args, out
