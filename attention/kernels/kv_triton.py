"""Tiles of K and V in the formats of storage, in Triton: written with their scales, and read as numbers.

The bits are those of kvcache/scaled.py. Formats by name: `plain` (elements are values), `int8` and `e4m3` (with one
bf16 scale a token and head; e4m3 lies in memory as bytes). FP8_BYTES says that the GPU does not convert e4m3.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...native.gpu.e4m3_triton import e4m3_from_bytes, e4m3_to_bytes
from ...native.gpu.numbers_triton import INTERPRETED, rounded


@triton.jit
def kv_numbers(codes, kind: tl.constexpr, FORMAT: tl.constexpr, FP8_BYTES: tl.constexpr):
    """Return stored elements as numbers of `kind`, exactly; scales are not applied."""
    if FORMAT == "plain":
        numbers = codes.to(kind)
    elif FORMAT == "int8":
        numbers = codes.to(tl.float32).to(kind)
    elif FP8_BYTES:
        numbers = e4m3_from_bytes(codes).to(tl.float32).to(kind)
    else:
        numbers = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32).to(kind)
    return numbers


@triton.jit
def store_heads(values, pages, scales, heads_at, elements_at, inside, FORMAT: tl.constexpr, FP8_BYTES: tl.constexpr):
    """Store one token's heads in the format of the cache.

    Args: values [N, W] fp32, 0 outside; where in `pages` they go, [N, W], and in `scales`, [N]; inside [N, W].
    A head's scale is its largest magnitude over the largest element, rounded up to bf16.
    """
    if FORMAT == "plain":
        tl.store(pages + elements_at, rounded(values, pages.dtype.element_ty), mask=inside)
    else:
        LARGEST: tl.constexpr = 127.0 if FORMAT == "int8" else 448.0
        # A magnitude that is no number, or none at all, must not get lost in the largest.
        bad = tl.sum((~(tl.abs(values) < float("inf"))).to(tl.int32), axis=1) > 0
        largest = tl.max(tl.where(values == values, tl.abs(values), 0.0), axis=1)
        bits = tl.div_rn(largest, tl.full(largest.shape, LARGEST, tl.float32)).to(tl.uint32, bitcast=True) + 0xFFFF
        scale = (bits & 0xFFFF0000).to(tl.float32, bitcast=True)
        scale = tl.where(largest < 2.0**-100, 0.0, scale)
        empty = bad | (scale == 0.0)
        divisor = tl.where(empty, 1.0, scale)[:, None] + tl.zeros(values.shape, tl.float32)
        elements = tl.where(empty[:, None], 0.0, tl.div_rn(values, divisor))
        if FORMAT == "int8":
            whole = (elements + 12582912.0) - 12582912.0  # 1.5 * 2^23: to the nearest whole number, ties to even
            codes = whole.to(tl.int8)
        elif FP8_BYTES or INTERPRETED:  # the interpreter of Triton 3.9 loses a carry into the exponent
            codes = e4m3_to_bytes(elements)
        else:
            codes = elements.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        tl.store(pages + elements_at, codes, mask=inside)
        kept = tl.where(bad, float("nan"), scale)
        upper = tl.where(bad, 0x7FC0, kept.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16)
        own = tl.sum(inside.to(tl.int32), axis=1) > 0
        tl.store(scales + heads_at, upper.to(tl.bfloat16, bitcast=True), mask=own)
