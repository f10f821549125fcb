"""e4m3 to and from bytes for GPUs whose instructions do not convert it (before Ada and Hopper), in Triton.

Not scales (kvcache/scaled.py says how KV has them). Format: OCP 8-bit floating point, E4M3: no infinities, 0x7F is NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def e4m3_from_bytes(codes):
    """Return e4m3 bytes as fp16: exponent and mantissa have room in it, 2^8 below their value."""
    bits = ((codes & 0x80).to(tl.uint16) << 8) | ((codes & 0x7F).to(tl.uint16) << 7)
    numbers = (bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0).to(tl.float16)  # no number overflows
    return tl.where((codes & 0x7F) == 0x7F, float("nan"), numbers).to(tl.float16)


@triton.jit
def e4m3_to_bytes(values):
    """Return fp32 `values` of magnitude 448 at most as e4m3 bytes: to nearest, ties to even."""
    bits = values.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # 20 mantissa bits fall away; 120 is what the biases of the exponents differ by.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 elements are 2^-9 apart, as fp32 numbers at 2^14 are.
    small = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    return (tl.where(magnitude < 0x3C800000, small, normal) | ((bits >> 24) & 0x80)).to(tl.uint8)
