"""Attention over paged KV with torch: gathers blocks, then scaled_dot_product_attention.

Not the fast path (native and Triton kernels will read blocks in place, behind this signature) and no KV write.
Shapes: T rows, H query heads, Hkv KV heads, Dh head width, B rows of a bucket, n blocks, S = n * block_size tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..kvcache import KVStorage
from .batch import AttentionBatch, AttentionOptions, DecodeBucket, PrefillSegment


def paged_attention(
    q: torch.Tensor, storage: KVStorage, layer: int, batch: AttentionBatch, options: AttentionOptions
) -> torch.Tensor:
    """Let every row attend to the tokens of its sequence up to its own, which must be in storage already.

    Args:
        q: [T, H, Dh], H a multiple of the KV heads.
        storage: holds K and V of `layer`.
        layer: decoder layer number.
        batch: which rows read which blocks.
        options: what the layer does with its scores.

    Returns:
        [T, H, Dh] in the dtype of `q`.
    """
    k, v = storage.layer(layer)
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


def _gather(cache: torch.Tensor, block_table: torch.Tensor, num_keys: int) -> torch.Tensor:
    """Copy the blocks of each sequence side by side: [num_blocks, block_size, Hkv, Dh] -> [B, Hkv, num_keys, Dh]."""
    num_rows, num_blocks = block_table.shape
    blocks = cache.index_select(0, block_table.view(-1))
    tokens = blocks.view(num_rows, num_blocks * cache.shape[1], cache.shape[2], cache.shape[3])
    return tokens[:, :num_keys].transpose(1, 2)


def _decode(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bucket: DecodeBucket, scale: float) -> torch.Tensor:
    """[B, H, Dh] over [B, n] blocks; the query heads of a KV head are rows of one product, so KV is not expanded."""
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[2]
    grouped = q.view(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)  # [B, Hkv, G, Dh]
    keys = _gather(k, bucket.block_table, bucket.num_keys)
    values = _gather(v, bucket.block_table, bucket.num_keys)
    out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=bucket.mask, scale=scale)
    return out.reshape(num_rows, num_heads, head_dim)


def _prefill(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segment: PrefillSegment, scale: float) -> torch.Tensor:
    """[R, H, Dh] over the blocks of one sequence, causal with an offset."""
    length = segment.num_computed_tokens + segment.num_rows
    keys = _gather(k, segment.block_table[None], length)  # [1, Hkv, length, Dh]
    values = _gather(v, segment.block_table[None], length)
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
