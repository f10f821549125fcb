"""The sum of each token's expert outputs on a GPU: what wide_ep/exchanges/pairs.py `add_pairs` is in torch, to the bit.

Not an exchange. The reference is wide_ep/exchanges/reference.py `combine_reference`.
Letters: T tokens, K top-k, M rows, D width.
"""

from __future__ import annotations

import torch

from ...native.gpu import Launch

_WIDEST_BLOCK = 1024  # eight elements a thread: 16 bytes of bf16


def triton_combine(
    rows: torch.Tensor,
    topk_weights: torch.Tensor,
    row_of: torch.Tensor,
    *,
    shared: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Add the rows of each token with their weights: ascending k, in fp32, rounded once.

    Args:
        rows: [M, D], outputs of experts.
        topk_weights: [T, K] f32; those of dropped choices are not read.
        row_of: [T, K] i32, the row of each choice, -1 for a dropped one.
        shared: [T, D], added to the rounded sum, and rounded.
        residual: [T, D], added to that, and rounded.

    Returns:
        [T, D] in the dtype of `rows`.
    """
    launch, out = combine_launch(rows, topk_weights, row_of, shared=shared, residual=residual)
    launch.run()
    return out


def combine_launch(
    rows: torch.Tensor,
    topk_weights: torch.Tensor,
    row_of: torch.Tensor,
    *,
    shared: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> tuple[Launch, torch.Tensor]:
    """Return the launch behind `triton_combine` and where its result will stand."""
    from .combine_triton import combine_kernel

    (num_tokens, top_k), width = row_of.shape, rows.shape[1]
    assert topk_weights.shape == row_of.shape and topk_weights.dtype == torch.float32, topk_weights.shape
    assert row_of.dtype == torch.int32, row_of.dtype
    out = rows.new_empty(num_tokens, width)
    for tensor in (rows, topk_weights, row_of, shared, residual):
        assert tensor is None or tensor.is_contiguous(), tensor.stride()
    for other in (shared, residual):
        assert other is None or (other.dtype == rows.dtype and other.shape == out.shape), other.shape
    block = min(1 << (width - 1).bit_length(), _WIDEST_BLOCK)
    launch = Launch(
        kernel=combine_kernel,
        grid=(num_tokens, -(-width // block)),
        arguments={
            "rows": rows, "row_of": row_of, "weights": topk_weights, "shared": shared, "residual": residual,
            "out": out, "width": width,
        },
        constants={"WIDTH_BLOCK": block, "TOP_K": top_k},
        fuses_products=False,
    )  # fmt: skip
    return launch, out
