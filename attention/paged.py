"""Attention over paged KV with torch: gathers blocks, then scaled_dot_product_attention or the products themselves.

Not the fast path of a CPU (attention/native.py reads blocks in place; batches that were built for it go there) and no
KV write.
Where scores are capped, sinks take part or values are narrower than keys, the steps are spelled out, in fp32.
Shapes: T rows, H query heads, Hkv KV heads, G = H / Hkv, Dh and Dv widths of a head of K and V, B rows of a bucket,
R rows of a segment, n blocks, S keys.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..kvcache.storage import KVStorage, Pages
from .batch import AttentionBatch, AttentionOptions, DecodeBucket, PrefillSegment
from .native import native_attention

MOST_SCORES = 1 << 24  # held at once by the spelled-out path: 64 MiB


def paged_attention(
    q: torch.Tensor, storage: KVStorage, layer: int, batch: AttentionBatch, options: AttentionOptions
) -> torch.Tensor:
    """Let every row attend to the visible tokens of its sequence up to its own, which must be in storage already.

    Args:
        q: [T, H, Dh], H a multiple of the KV heads.
        storage: holds K and V of `layer`.
        layer: decoder layer number.
        batch: which rows read which blocks; of the cache group that `layer` is in.
        options: what the layer does with its scores.

    Returns:
        [T, H, Dv] in the dtype of `q`.
    """
    if batch.native is not None:
        return native_attention(q, storage, layer, batch, options)
    k, v = storage.pages(layer)
    if options.sinks is not None or options.score_cap or k.elements.shape[3] != v.elements.shape[3]:
        return _spelled_out(q, k, v, batch, options)
    scale = options.scale
    pieces = len(batch.prefills) + len(batch.decodes)
    if pieces == 1 and batch.decodes:
        return _decode(q, k, v, batch.decodes[0], scale)  # rows of the only bucket are all rows, in order
    out = torch.empty_like(q)
    for bucket in batch.decodes:
        out.index_copy_(0, bucket.rows, _decode(q.index_select(0, bucket.rows), k, v, bucket, scale))
    for segment in batch.prefills:
        rows = slice(segment.row_start, segment.row_start + segment.num_rows)
        out[rows] = _prefill(q[rows], k, v, segment, scale)
    return out


def _gather(pages: Pages, block_table: torch.Tensor, num_keys: int, dtype: torch.dtype) -> torch.Tensor:
    """Copy the blocks of each sequence side by side, as values in `dtype`: [B, n] -> [B, Hkv, num_keys, Dh]."""
    num_rows, num_blocks = block_table.shape
    blocks = pages.read(block_table.view(-1), dtype)
    tokens = blocks.view(num_rows, num_blocks * blocks.shape[1], *blocks.shape[2:])
    return tokens[:, :num_keys].transpose(1, 2)


def _decode(q: torch.Tensor, k: Pages, v: Pages, bucket: DecodeBucket, scale: float) -> torch.Tensor:
    """[B, H, Dh] over [B, n] blocks; the query heads of a KV head are rows of one product, so KV is not expanded."""
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = k.elements.shape[2]
    grouped = q.view(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)  # [B, Hkv, G, Dh]
    keys = _gather(k, bucket.block_table, bucket.num_keys, q.dtype)
    values = _gather(v, bucket.block_table, bucket.num_keys, q.dtype)
    out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=bucket.mask, scale=scale)
    return out.reshape(num_rows, num_heads, head_dim)


def _prefill(q: torch.Tensor, k: Pages, v: Pages, segment: PrefillSegment, scale: float) -> torch.Tensor:
    """[R, H, Dh] over the blocks of one sequence, causal with an offset."""
    keys = _gather(k, segment.block_table[None], segment.num_keys, q.dtype)  # [1, Hkv, S, Dh]
    values = _gather(v, segment.block_table[None], segment.num_keys, q.dtype)
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        keys,
        values,
        attn_mask=segment.mask,
        is_causal=segment.mask is None and segment.num_rows > 1,
        scale=scale,
        enable_gqa=True,
    )  # [1, H, R, Dh]
    return out[0].transpose(0, 1)


def _spelled_out(q: torch.Tensor, k: Pages, v: Pages, batch: AttentionBatch, options: AttentionOptions) -> torch.Tensor:
    """Do what `paged_attention` does, with any options, widths and kinds."""

    def gather(block_table: torch.Tensor, num_keys: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys = _gather(k, block_table, num_keys, torch.float32)
        if batch.kind == "latent":  # the values lie in the keys: read them once
            return keys, keys[..., :value_dim]
        return keys, _gather(v, block_table, num_keys, torch.float32)

    num_heads, value_dim = q.shape[1], v.elements.shape[3]
    out = q.new_empty(q.shape[0], num_heads, value_dim)
    for bucket in batch.decodes:
        step = max(1, MOST_SCORES // (num_heads * bucket.num_keys))
        for i in range(0, len(bucket.rows), step):
            rows = bucket.rows[i : i + step]
            keys, values = gather(bucket.block_table[i : i + step], bucket.num_keys)
            part = None if bucket.mask is None else bucket.mask[i : i + step, None]  # [B, 1, 1, 1, S]
            found = _attend(q.index_select(0, rows)[:, None], keys, values, part, options)
            out.index_copy_(0, rows, found[:, 0])
    for segment in batch.prefills:
        keys, values = gather(segment.block_table[None], segment.num_keys)
        mask, start = segment.mask, segment.row_start
        if mask is None and segment.num_rows > 1:
            mask = torch.ones(segment.num_rows, segment.num_keys, dtype=torch.bool, device=q.device).tril_()
        step = max(1, MOST_SCORES // (num_heads * segment.num_keys))
        for i in range(0, segment.num_rows, step):
            stop = min(i + step, segment.num_rows)
            part = None if mask is None else mask[i:stop]
            out[start + i : start + stop] = _attend(q[None, start + i : start + stop], keys, values, part, options)[0]
    return out


def _attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    options: AttentionOptions,
) -> torch.Tensor:
    """Score, cap, mask, softmax with sinks, and sum the values, all in fp32.

    The query heads of a KV head, and the rows of a segment, are rows of one product, so KV is not expanded.

    Args:
        q: [B, R, H, Dh].
        keys: [B, Hkv, S, Dh] f32.
        values: [B, Hkv, S, Dv] f32.
        mask: broadcasts to [B, Hkv, G, R, S]; f32 to add, or bool (true attends).
        options: of the layer.

    Returns:
        [B, R, H, Dv] in the dtype of `q`.
    """
    batch, rows, num_heads, head_dim = q.shape
    num_kv_heads, num_keys, value_dim = values.shape[1:]
    group = num_heads // num_kv_heads
    grouped = q.view(batch, rows, num_kv_heads, group, head_dim).permute(0, 2, 3, 1, 4).float() * options.scale
    scores = grouped.reshape(batch, num_kv_heads, group * rows, head_dim) @ keys.transpose(2, 3)
    scores = scores.view(batch, num_kv_heads, group, rows, num_keys)
    if options.score_cap:
        scores = scores.div_(options.score_cap).tanh_().mul_(options.score_cap)
    if mask is not None:
        scores = scores.masked_fill_(~mask, -torch.inf) if mask.dtype == torch.bool else scores.add_(mask)
    largest = scores.amax(-1, keepdim=True)
    weights = scores.sub_(largest).exp_()
    total = weights.sum(-1, keepdim=True)
    if options.sinks is not None:  # one so far above the scores that this is inf leaves nothing, as it should
        total += (options.sinks.view(num_kv_heads, group, 1, 1) - largest).exp_()
    out = weights.view(batch, num_kv_heads, group * rows, num_keys) @ values
    out = out.view(batch, num_kv_heads, group, rows, value_dim).div_(total)
    return out.permute(0, 3, 1, 2, 4).reshape(batch, rows, num_heads, value_dim).to(q.dtype)
