"""The norms around blocks with the residual sum, and with that of experts, in Triton; norm.py launches it.

Not the norm of heads (attention/kernels/heads_triton.py). Letters: T rows, D width.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...moe.kernels.combine_triton import combined
from ...native.gpu.numbers_triton import rounded


@triton.jit
def _normed(values, weight, bias, columns, inside, width, eps, kind: tl.constexpr):
    """Return one row of fp32 values, normed and rounded to `kind`: RMSNorm, or LayerNorm where there is a bias."""
    scales = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if bias is None:
        factor = tl.rsqrt(tl.sum(values * values, axis=0) / width + eps)
        result = rounded(rounded(values * factor, kind).to(tl.float32) * scales, kind)
    else:
        mean = tl.sum(values, axis=0) / width
        centred = tl.where(inside, values - mean, 0.0)
        factor = tl.rsqrt(tl.sum(centred * centred, axis=0) / width + eps)
        shift = tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
        result = rounded(centred * factor * scales + shift, kind)
    return result


@triton.jit(do_not_specialize=["eps", "multiplier"])
def norm_kernel(
    x, added, rows, row_of, topk_weights, shared, weight, bias, out, width, eps, multiplier,
    WIDTH_BLOCK: tl.constexpr, NORMS_ADDED: tl.constexpr, TOP_K: tl.constexpr,
):  # fmt: skip
    """One row: add something to `x` in place, where there is any, and norm the sum; or norm what is added.

    What is added is a row of `added`, or with TOP_K > 0 the sum of the rows of a token's experts.
    """
    columns = tl.arange(0, WIDTH_BLOCK)
    inside = columns < width
    token = tl.program_id(0).to(tl.int64)
    here = token * width + columns
    kind: tl.constexpr = x.dtype.element_ty
    values = tl.load(x + here, mask=inside, other=0.0).to(tl.float32)
    if added is not None or TOP_K > 0:
        if TOP_K > 0:
            more = combined(rows, row_of, topk_weights, shared, token, columns, width, kind, TOP_K)
        else:
            more = tl.load(added + here, mask=inside, other=0.0).to(tl.float32)
        if NORMS_ADDED:
            more = _normed(more, weight, bias, columns, inside, width, eps, kind).to(tl.float32)
        if multiplier is not None:
            more = rounded(more * multiplier, kind).to(tl.float32)
        total = rounded(values + more, kind)
        tl.store(x + here, total, mask=inside)
        values = total.to(tl.float32)
    if not NORMS_ADDED:
        tl.store(out + here, _normed(values, weight, bias, columns, inside, width, eps, kind), mask=inside)
