"""The sum of each token's expert outputs, in Triton; combine.py launches it, and norms add it to the residual stream.

Not an exchange: rows are read where they lie. Letters: T tokens, K top-k, M rows, D width.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...native.gpu.numbers_triton import rounded


@triton.jit
def combined(rows, row_of, weights, shared, token, columns, width, kind: tl.constexpr, TOP_K: tl.constexpr):
    """Return some columns of one token's sum in fp32: ascending k, from zero, rounded to `kind` once and with `shared`.

    Compiled without fused products: a product is rounded before it is added, as everywhere else.
    """
    total = columns.to(tl.float32) * 0.0
    for k in tl.static_range(TOP_K):
        row = tl.load(row_of + token * TOP_K + k).to(tl.int64)
        weight = tl.load(weights + token * TOP_K + k, mask=row >= 0, other=0.0)
        present = columns < tl.where(row >= 0, width, 0)  # nothing of a dropped choice is read
        values = tl.load(rows + row * width + columns, mask=present, other=0.0)
        total = total + values.to(tl.float32) * weight
    total = rounded(total, kind).to(tl.float32)
    if shared is not None:
        more = tl.load(shared + token * width + columns, mask=columns < width, other=0.0).to(tl.float32)
        total = rounded(total + more, kind).to(tl.float32)
    return total


@triton.jit
def combine_kernel(rows, row_of, weights, shared, out, width, WIDTH_BLOCK: tl.constexpr, TOP_K: tl.constexpr):
    """One token and WIDTH_BLOCK of its elements."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * WIDTH_BLOCK + tl.arange(0, WIDTH_BLOCK)
    kind: tl.constexpr = out.dtype.element_ty
    total = combined(rows, row_of, weights, shared, token, columns, width, kind, TOP_K)
    tl.store(out + token * width + columns, total.to(kind), mask=columns < width)
