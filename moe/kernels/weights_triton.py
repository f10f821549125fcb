"""A tile of an expert's matrix as numbers, from every format that weights are held in, in Triton.

Not a product (experts_triton.py). Tiles are outputs by inputs. Formats by name: `plain`, `e4m3` and `int8` (scales are
applied to sums, so numbers are exact), `int4` and `mxfp4` (scaled here, rounded once to the type of the rows, as
`QuantTensor.dequantize` does).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...native.gpu.numbers_triton import rounded


@triton.jit
def e4m3_number(codes):
    """Return e4m3 bytes as fp16, by moving bits: exponent and mantissa have room in fp16, 2^8 below their value."""
    bits = ((codes & 0x80).to(tl.uint16) << 8) | ((codes & 0x7F).to(tl.uint16) << 7)
    numbers = bits.to(tl.float16, bitcast=True) * 256.0
    return tl.where((codes & 0x7F) == 0x7F, float("nan"), numbers).to(tl.float16)


@triton.jit
def e2m1_number(codes):
    """Return e2m1 codes (0 to 15) as fp32, by moving bits into fp16, 2^14 below their value."""
    bits = ((codes & 8).to(tl.uint16) << 12) | ((codes & 7).to(tl.uint16) << 9)
    return bits.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@triton.jit
def e8m0_number(codes):
    """Return powers of two from bytes with bias 127 as fp32: 0 is 2^-127, 255 is no number."""
    bits = tl.where(codes == 0, 0x400000, codes.to(tl.uint32) << 23)
    return tl.where(codes == 255, float("nan"), bits.to(tl.uint32).to(tl.float32, bitcast=True))


@triton.jit
def weight_tile(data, start, inputs, kind: tl.constexpr, FORMAT: tl.constexpr, FP8_BYTES: tl.constexpr,
                BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr):  # fmt: skip
    """Return inputs [start, start + BLOCK_K) of some outputs as `kind`, exact but for scales; 0 from `inputs` on.

    `data` [BLOCK_N] points to the rows of the outputs. FORMAT is `plain`, `e4m3` or `int8`.
    """
    columns = start + tl.arange(0, BLOCK_K)
    if EVEN_K:
        codes = tl.load(data[:, None] + columns[None, :])
    else:
        codes = tl.load(data[:, None] + columns[None, :], mask=columns[None, :] < inputs, other=0)
    if FORMAT == "plain":
        tile = codes
    elif FORMAT == "int8":
        tile = codes.to(tl.float32).to(kind)
    elif FP8_BYTES:
        tile = e4m3_number(codes).to(kind)
    else:
        tile = codes.to(tl.float8e4nv, bitcast=True).to(kind)
    return tile


@triton.jit
def paired_tiles(data, scales, zeros, start, inputs, scale_columns, kind: tl.constexpr, FORMAT: tl.constexpr,
                 GROUP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr):  # fmt: skip
    """Return even and odd inputs of [start, start + BLOCK_K), scaled, as `kind`: each [BLOCK_N, BLOCK_K / 2].

    FORMAT is `int4` or `mxfp4`. Even inputs are the lower four bits of bytes; apart from odd ones, bytes are loaded as
    they lie, 16 at once. `data`, `scales`, `zeros` [BLOCK_N] point to the rows of the outputs.
    """
    columns = start // 2 + tl.arange(0, BLOCK_K // 2)
    if EVEN_K:
        codes = tl.load(data[:, None] + columns[None, :])
    else:
        codes = tl.load(data[:, None] + columns[None, :], mask=columns[None, :] * 2 < inputs, other=0)
    STEP_GROUPS: tl.constexpr = BLOCK_K // GROUP if BLOCK_K > GROUP else 1
    groups = start // GROUP + tl.arange(0, STEP_GROUPS)
    if EVEN_K:
        factors = tl.load(scales[:, None] + groups[None, :])
    else:
        factors = tl.load(scales[:, None] + groups[None, :], mask=groups[None, :] < scale_columns, other=0)
    if FORMAT == "int4":
        factors = factors.to(tl.float32)
        if zeros is None:
            middle = tl.full([BLOCK_N, STEP_GROUPS], 8.0, tl.float32)
        elif EVEN_K:
            middle = tl.load(zeros[:, None] + groups[None, :]).to(tl.float32)
        else:
            middle = tl.load(zeros[:, None] + groups[None, :], mask=groups[None, :] < scale_columns, other=0).to(
                tl.float32
            )
        even = (codes & 15).to(tl.float32)
        odd = (codes >> 4).to(tl.float32)
    else:
        factors = e8m0_number(factors)
        middle = tl.zeros([BLOCK_N, STEP_GROUPS], tl.float32)
        even = e2m1_number(codes & 15)
        odd = e2m1_number(codes >> 4)
    return (
        _grouped(even, middle, factors, kind, STEP_GROUPS, BLOCK_N, BLOCK_K // 2),
        _grouped(odd, middle, factors, kind, STEP_GROUPS, BLOCK_N, BLOCK_K // 2),
    )


@triton.jit
def _grouped(numbers, middle, factors, kind: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr,
             COLUMNS: tl.constexpr):  # fmt: skip
    """Return (numbers - middle) * factors, rounded once: [ROWS, COLUMNS] with one of the others for each of GROUPS."""
    parts = tl.reshape(numbers, [ROWS, GROUPS, COLUMNS // GROUPS])
    scaled = (parts - middle[:, :, None]) * factors[:, :, None]
    return rounded(tl.reshape(scaled, [ROWS, COLUMNS]), kind)
