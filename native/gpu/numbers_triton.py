"""Conversions that every kernel uses, right in the compiled form and in the interpreter.

Triton 3.9's interpreter cuts fp32 off where it makes bf16 of it, and multiplies bf16 tiles as raw integers (fp16, fp32
and fp8 are right), so in it bits are rounded by hand and tiles are widened. The compiled form has plain conversions.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .launch import interpreting

INTERPRETED = tl.constexpr(interpreting())


@triton.jit
def rounded(values, kind: tl.constexpr):
    """Return fp32 `values` as `kind` (fp32, fp16 or bf16), to the nearest, ties to even."""
    if INTERPRETED and kind == tl.bfloat16:
        bits = values.to(tl.uint32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        upper = tl.where(values == values, nearest, 0x7FC0)  # what is added to a NaN could make a number of it
        result = upper.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        result = values.to(kind)
    return result


@triton.jit
def product(left, right, total):
    """Return total + left @ right: tiles of one type, fp32 sums; fp32 tiles are not cut to tf32."""
    if INTERPRETED:
        result = tl.dot(left.to(tl.float32), right.to(tl.float32), total, input_precision="ieee")
    else:
        result = tl.dot(left, right, total, input_precision="ieee")
    return result
