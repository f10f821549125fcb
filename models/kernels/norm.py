"""The norms around blocks on a GPU, with the residual sum in the same launch, and with that of a token's experts.

What is computed, and rounded where, is what models/layers.py does in torch. Letters: T rows, D width.
"""

from __future__ import annotations

import torch

from ...moe.kernels.combine import ExpertRows
from ...native.gpu import Launch

_ELEMENTS_A_WARP = 256  # eight a thread: 16 bytes of bf16
_MOST_WARPS = 16


def triton_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    eps: float,
    added: torch.Tensor | ExpertRows | None = None,
    multiplier: float = 1.0,
) -> torch.Tensor:
    """Return `x` [T, D], normed; `added` [T, D] times `multiplier` is added to `x`, in place, before.

    Args:
        x: contiguous.
        weight: [D].
        bias: [D] of a LayerNorm; None means RMSNorm.
        eps: added to the mean of squares, or to the variance.
        added: what a block adds to the residual stream; outputs of experts are added up first, to the same bits.
        multiplier: on `added`, rounded if it is not 1.
    """
    out = torch.empty_like(x)
    norm_launch(x, weight, bias, eps=eps, added=added, multiplier=multiplier, out=out).run()
    return out


def triton_add_normed(
    x: torch.Tensor,
    added: torch.Tensor | ExpertRows,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    eps: float,
    multiplier: float = 1.0,
) -> None:
    """Add `added` [T, D], normed, times `multiplier` to `x` [T, D] in place."""
    norm_launch(x, weight, bias, eps=eps, added=added, multiplier=multiplier, out=None).run()


def norm_launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    eps: float,
    added: torch.Tensor | ExpertRows | None,
    multiplier: float,
    out: torch.Tensor | None,
) -> Launch:
    """Return the launch behind `triton_norm`; without `out`, behind `triton_add_normed`."""
    from .norm_triton import norm_kernel

    num_rows, width = x.shape
    assert added is not None or out is not None, "nothing to do"
    row, experts = (None, added.checked()) if isinstance(added, ExpertRows) else (added, None)
    assert experts is None or (experts.rows.dtype == x.dtype and experts.shape == x.shape), experts.shape
    for other in (row, out):
        assert other is None or (other.dtype == x.dtype and other.shape == x.shape and other.is_contiguous())
    for part in (weight, bias):
        assert part is None or (part.shape == (width,) and part.is_contiguous()), part.shape
    assert x.is_contiguous(), x.stride()
    block = 1 << (width - 1).bit_length()
    return Launch(
        kernel=norm_kernel,
        grid=(num_rows,),
        arguments={
            "x": x, "added": row, "rows": experts and experts.rows, "row_of": experts and experts.row_of,
            "topk_weights": experts and experts.topk_weights, "shared": experts and experts.shared,
            "weight": weight, "bias": bias, "out": out, "width": width, "eps": eps,
            "multiplier": None if multiplier == 1.0 else multiplier,
        },
        constants={
            "WIDTH_BLOCK": block, "NORMS_ADDED": out is None, "TOP_K": experts.row_of.shape[1] if experts else 0,
        },
        num_warps=max(1, min(_MOST_WARPS, block // _ELEMENTS_A_WARP)),
        fuses_products=False,  # so that experts summed on the way or before give the same bits
    )  # fmt: skip
