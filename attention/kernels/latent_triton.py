"""The rows between the products of latent attention, in Triton: norm, rotation and the write of the latent.

latent.py launches it; not attention. What is rounded where is as in models/latent.py.
Letters: T rows, H heads, C = kv_rank, R = rope_dim, N = nope_dim.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...native.gpu.numbers_triton import rounded
from .heads_triton import partner_of
from .kv_triton import store_heads


@triton.jit
def _turned(values, partner, cos, sin, at, turning, kind: tl.constexpr):
    """Return fp32 values turned, rounded to `kind`; `at` says which element of a head each of them is."""
    c = tl.load(cos + at, mask=turning, other=0.0)
    s = tl.load(sin + at, mask=turning, other=0.0)
    return rounded(values * c + partner.to(tl.float32) * s, kind)


@triton.jit
def _write_latent(
    source, slot, pages, scales, cos, sin, norm, eps,
    KV_RANK: tl.constexpr, ROPE_DIM: tl.constexpr, INTERLEAVED: tl.constexpr, WIDTH_BLOCK: tl.constexpr,
    FORMAT: tl.constexpr, FP8_BYTES: tl.constexpr,
):  # fmt: skip
    """Norm the first KV_RANK elements at `source`, turn the others, and store all as one head."""
    WIDTH: tl.constexpr = KV_RANK + ROPE_DIM
    kind: tl.constexpr = source.dtype.element_ty
    columns = tl.arange(0, WIDTH_BLOCK)[None, :]
    inside, is_latent = columns < WIDTH, columns < KV_RANK
    turning = inside & (columns >= KV_RANK)
    values = tl.load(source + columns, mask=inside, other=0.0).to(tl.float32)
    latent = tl.where(is_latent, values, 0.0)
    factor = tl.rsqrt(tl.sum(latent * latent, axis=1) / KV_RANK + eps)[:, None]
    weights = tl.load(norm + columns, mask=is_latent, other=0.0).to(tl.float32)
    normed = rounded(rounded(latent * factor, kind).to(tl.float32) * weights, kind)
    at = tl.where(turning, columns - KV_RANK, 0)
    partner = tl.load(source + KV_RANK + partner_of(at, ROPE_DIM, INTERLEAVED), mask=turning, other=0.0)
    turned = _turned(values, partner, cos, sin, at, turning, kind)
    stored = tl.where(is_latent, normed.to(tl.float32), turned.to(tl.float32))
    store_heads(stored, pages, scales, slot + tl.arange(0, 1), slot * WIDTH + columns, inside, FORMAT, FP8_BYTES)


@triton.jit(do_not_specialize=["eps"])
def latent_rows_kernel(
    kv, queries, q, pages, scales, slots, cos, sin, norm, eps,
    HEADS: tl.constexpr, KV_RANK: tl.constexpr, ROPE_DIM: tl.constexpr, NOPE_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr, HEADS_BLOCK: tl.constexpr, ROPE_BLOCK: tl.constexpr, WIDTH_BLOCK: tl.constexpr,
    FORMAT: tl.constexpr, FP8_BYTES: tl.constexpr,
):  # fmt: skip
    """One row: its latent (the first program), or the rotated part of HEADS_BLOCK queries."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    WIDTH: tl.constexpr = KV_RANK + ROPE_DIM
    cos += row * ROPE_DIM
    sin += row * ROPE_DIM
    if block == 0:
        slot = tl.load(slots + row).to(tl.int64)
        if slot >= 0:
            _write_latent(
                kv + row * WIDTH, slot, pages, scales, cos, sin, norm, eps, KV_RANK, ROPE_DIM, INTERLEAVED,
                WIDTH_BLOCK, FORMAT, FP8_BYTES,
            )  # fmt: skip
    else:
        heads = (block - 1) * HEADS_BLOCK + tl.arange(0, HEADS_BLOCK)[:, None]
        columns = tl.arange(0, ROPE_BLOCK)[None, :]
        turning = columns < ROPE_DIM
        inside = (heads < HEADS) & turning
        source = queries + (row * HEADS + heads) * (NOPE_DIM + ROPE_DIM) + NOPE_DIM
        values = tl.load(source + columns, mask=inside, other=0.0).to(tl.float32)
        partner = tl.load(source + partner_of(columns, ROPE_DIM, INTERLEAVED), mask=inside, other=0.0)
        turned = _turned(values, partner, cos, sin, columns, turning, kv.dtype.element_ty)
        tl.store(q + (row * HEADS + heads) * WIDTH + KV_RANK + columns, turned, mask=inside)
