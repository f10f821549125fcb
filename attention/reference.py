"""Attention over paged KV, slow and obviously right: one row, one head at a time, in fp64.

Not used by the product: tests compare `paged_attention` (and later native and Triton kernels) with it. It looks at no
mask and at no number of keys: what a row sees follows from its position and the kind of the cache group.
Elements of formats with scales are turned into values first.
Shapes: q [T, H, Dh]; K of a layer [num_blocks, block_size, Hkv, Dh], V [num_blocks, block_size, Hkv, Dv].
"""

from __future__ import annotations

import math

import torch

from ..kvcache.storage import KVStorage
from .batch import AttentionBatch, AttentionOptions


def paged_attention(
    q: torch.Tensor, storage: KVStorage, layer: int, batch: AttentionBatch, options: AttentionOptions
) -> torch.Tensor:
    """Return `attend` of every row over the tokens that it sees: [T, H, Dv] f64; NaN for a row in no piece."""
    every = torch.arange(storage.num_blocks[storage.group_of(layer)])
    keys, values = (pages.read(every, torch.float64) for pages in storage.pages(layer))
    size = storage.block_size
    out = torch.full((*q.shape[:2], values.shape[-1]), math.nan, dtype=torch.float64)

    def row(number: int, position: int, block_table: torch.Tensor, first_block: int) -> None:
        seen = range(first_seen(batch.kind, batch.window, position), position + 1)
        places = [(int(block_table[t // size - first_block]), t % size) for t in seen]
        k = torch.stack([keys[place] for place in places])
        v = torch.stack([values[place] for place in places])
        out[number] = attend(q[number], k, v, options)

    for segment in batch.prefills:
        first_block = first_seen(batch.kind, batch.window, segment.num_computed_tokens) // size
        for i in range(segment.num_rows):
            row(segment.row_start + i, segment.num_computed_tokens + i, segment.block_table, first_block)
    for bucket in batch.decodes:
        for i, number in enumerate(bucket.rows.tolist()):
            position = int(bucket.lengths[i]) - 1
            row(number, position, bucket.block_table[i], first_seen(batch.kind, batch.window, position) // size)
    return out


def first_seen(kind: str, window: int, position: int) -> int:
    """Return the first position that a row sees, found by trying all of them."""
    for other in range(position + 1):
        if kind == "window" and position - other >= window:
            continue
        if kind == "chunk" and other // window != position // window:
            continue
        return other
    raise AssertionError("a row sees at least itself")


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
    """Return what one row gets: q [H, Dh] over all of k [n, Hkv, Dh] and v [n, Hkv, Dv] -> [H, Dv] f64."""
    num_heads, num_kv_heads = q.shape[0], k.shape[1]
    out = torch.empty(num_heads, v.shape[2], dtype=torch.float64)
    for head in range(num_heads):
        kv_head = head // (num_heads // num_kv_heads)
        scores = k[:, kv_head].double() @ q[head].double() * options.scale
        if options.score_cap:
            scores = options.score_cap * torch.tanh(scores / options.score_cap)
        if options.sinks is not None:
            scores = torch.cat([scores, options.sinks[head].double()[None]])
        out[head] = torch.softmax(scores, dim=0)[: k.shape[0]] @ v[:, kv_head].double()
    return out
