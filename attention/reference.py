"""Attention over paged KV, slow and obviously right: one row, one head at a time, in fp32.

Not used by the product: tests compare `paged_attention` (and later native and Triton kernels) with it.
Shapes: q [T, H, Dh]; K and V of a layer [num_blocks, block_size, Hkv, Dh].
"""

from __future__ import annotations

import torch

from ..kvcache import KVStorage
from .batch import AttentionBatch, AttentionOptions


def paged_attention(
    q: torch.Tensor, storage: KVStorage, layer: int, batch: AttentionBatch, options: AttentionOptions
) -> torch.Tensor:
    """Return softmax(q k^T * scale) v of every row over the tokens up to its own: [T, H, Dh] f32."""
    scale = options.scale
    out = torch.full(q.shape, float("nan"))  # a row that nobody computes must show
    for segment in batch.prefills:
        for i in range(segment.num_rows):
            length = segment.num_computed_tokens + i + 1
            out[segment.row_start + i] = _row(
                q[segment.row_start + i], storage, layer, segment.block_table, length, scale
            )
    for bucket in batch.decodes:
        for i, row in enumerate(bucket.rows.tolist()):
            out[row] = _row(q[row], storage, layer, bucket.block_table[i], int(bucket.lengths[i]), scale)
    return out


def _row(
    q: torch.Tensor, storage: KVStorage, layer: int, block_table: torch.Tensor, length: int, scale: float
) -> torch.Tensor:
    keys, values = storage.layer(layer)
    size = storage.block_size
    places = [(int(block_table[t // size]), t % size) for t in range(length)]
    num_heads, num_kv_heads = q.shape[0], keys.shape[2]
    out = torch.empty(q.shape, dtype=torch.float32)
    for head in range(num_heads):
        kv_head = head // (num_heads // num_kv_heads)
        k = torch.stack([keys[block, offset, kv_head] for block, offset in places]).float()
        v = torch.stack([values[block, offset, kv_head] for block, offset in places]).float()
        out[head] = torch.softmax(k @ q[head].float() * scale, dim=0) @ v
    return out
