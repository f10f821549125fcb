"""The sum of each token's expert outputs, in Triton; combine.py launches it.

Not an exchange: rows are read where they lie. Letters: T tokens, K top-k, M rows, D width.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...native.gpu.numbers_triton import rounded


@triton.jit
def combine_kernel(rows, row_of, weights, shared, residual, out, width, WIDTH_BLOCK: tl.constexpr, TOP_K: tl.constexpr):
    """One token and WIDTH_BLOCK of its elements: ascending k, in fp32 from zero, rounded once.

    Compiled without fused products: a product is rounded before it is added, as everywhere else.
    """
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * WIDTH_BLOCK + tl.arange(0, WIDTH_BLOCK)
    inside = columns < width
    total = tl.zeros([WIDTH_BLOCK], tl.float32)
    for k in tl.static_range(TOP_K):
        row = tl.load(row_of + token * TOP_K + k).to(tl.int64)
        weight = tl.load(weights + token * TOP_K + k, mask=row >= 0, other=0.0)
        present = columns < tl.where(row >= 0, width, 0)  # nothing of a dropped choice is read
        values = tl.load(rows + row * width + columns, mask=present, other=0.0)
        total = total + values.to(tl.float32) * weight
    kind: tl.constexpr = out.dtype.element_ty
    here = token * width + columns
    if shared is not None:
        total = rounded(total, kind).to(tl.float32) + tl.load(shared + here, mask=inside).to(tl.float32)
    if residual is not None:
        total = tl.load(residual + here, mask=inside).to(tl.float32) + rounded(total, kind).to(tl.float32)
    tl.store(out + here, rounded(total, kind), mask=inside)
