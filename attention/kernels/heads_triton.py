"""Norm of heads, rotation, query temperature and the write of K and V, in Triton; heads.py launches it.

Not the product that makes q, k and v and not attention. Every step rounds where models/layers.py does.
Letters: T rows, H query heads, Hkv KV heads, Dh head width, R rotated elements.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...native.gpu.numbers_triton import rounded
from .kv_triton import store_heads


@triton.jit
def partner_of(columns, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Return the element that each one turns with; of elements that do not turn, anything."""
    if INTERLEAVED:
        result = columns ^ 1
    else:
        result = (columns + ROTARY_DIM // 2) % ROTARY_DIM
    return result


@triton.jit
def _mean_factor(values, eps, num, ALL_HEADS: tl.constexpr):
    """Return [N, 1] or [1, 1], what an RMSNorm of `num` elements multiplies `values` with."""
    squares = tl.sum(values * values, axis=1)
    if ALL_HEADS:
        squares = tl.sum(squares, axis=0)[None]
    return tl.rsqrt(squares / num + eps)[:, None]


@triton.jit
def _scaled(values, factor, weights, at, inside, kind: tl.constexpr):
    """Return fp32 `values` times a norm's factor and weights, rounded to `kind` after each."""
    result = rounded(values * factor, kind).to(tl.float32)
    if weights is not None:
        result = rounded(result * tl.load(weights + at, mask=inside, other=0.0).to(tl.float32), kind).to(tl.float32)
    return result


@triton.jit
def _turned(values, partner, cos, sin, columns, ROTARY_DIM: tl.constexpr, kind: tl.constexpr):
    """Return the first ROTARY_DIM elements turned and rounded, and the others as they are."""
    turns = columns < ROTARY_DIM
    c = tl.load(cos + columns, mask=turns, other=0.0)
    s = tl.load(sin + columns, mask=turns, other=0.0)
    return tl.where(turns, rounded(values * c + partner * s, kind).to(tl.float32), values)


@triton.jit(do_not_specialize=["eps"])
def heads_kernel(
    qkv, q, k_pages, v_pages, k_scales, v_scales, slots, cos, sin, temperature, weights, stride, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr, NORM: tl.constexpr, NORM_AFTER: tl.constexpr, HEADS_BLOCK: tl.constexpr,
    DIM_BLOCK: tl.constexpr, FORMAT: tl.constexpr, FP8_BYTES: tl.constexpr,
):  # fmt: skip
    """HEADS_BLOCK heads of one row: of q, of k or of v. NORM: `none`, `head`, `full` (all heads together) or `unit`."""
    Q_BLOCKS: tl.constexpr = (HEADS + HEADS_BLOCK - 1) // HEADS_BLOCK
    KV_BLOCKS: tl.constexpr = (KV_HEADS + HEADS_BLOCK - 1) // HEADS_BLOCK
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    is_q, is_v = block < Q_BLOCKS, block >= Q_BLOCKS + KV_BLOCKS
    kv_block = block - tl.where(is_v, Q_BLOCKS + KV_BLOCKS, Q_BLOCKS)
    heads = tl.where(is_q, block, kv_block) * HEADS_BLOCK + tl.arange(0, HEADS_BLOCK)
    number = tl.where(is_q, HEADS, KV_HEADS)
    before = tl.where(is_q, 0, tl.where(is_v, HEADS + KV_HEADS, HEADS))  # heads of the row in front of this part
    columns = tl.arange(0, DIM_BLOCK)[None, :]
    inside = (heads < number)[:, None] & (columns < HEAD_DIM)
    own = heads[:, None] * HEAD_DIM + columns  # within the part
    at = before * HEAD_DIM + own  # within the row
    kind: tl.constexpr = qkv.dtype.element_ty
    source = qkv + row * stride
    values = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
    if not is_v:
        count = HEAD_DIM * (number if NORM == "full" else 1)
        if ROTARY_DIM > 0:
            turning = inside & (columns < ROTARY_DIM)
            other_at = at - columns + tl.where(turning, partner_of(columns, ROTARY_DIM, INTERLEAVED), columns)
            partner = tl.load(source + other_at, mask=turning, other=0.0).to(tl.float32)
        if NORM != "none" and not NORM_AFTER:
            factor = _mean_factor(values, eps, count, NORM == "full")
            values = _scaled(values, factor, weights, at, inside, kind)
            if ROTARY_DIM > 0:
                partner = _scaled(partner, factor, weights, other_at, turning, kind)
        if ROTARY_DIM > 0:
            values = _turned(values, partner, cos + row * ROTARY_DIM, sin + row * ROTARY_DIM, columns, ROTARY_DIM, kind)
        if NORM != "none" and NORM_AFTER:
            values = _scaled(values, _mean_factor(values, eps, count, NORM == "full"), weights, at, inside, kind)
    if is_q:
        if temperature is not None:
            values = values * tl.load(temperature + row)
        tl.store(q + row * (HEADS * HEAD_DIM) + own, rounded(values, kind), mask=inside)
    else:
        slot = tl.load(slots + row).to(tl.int64)
        if slot >= 0:
            pages, scales = k_pages, k_scales
            if is_v:
                pages, scales = v_pages, v_scales
            token = slot * KV_HEADS
            store_heads(values, pages, scales, token + heads, token * HEAD_DIM + own, inside, FORMAT, FP8_BYTES)
