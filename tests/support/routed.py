"""Routing as the native router hands it on, made from ids that a test names.

Not a router. Letters: T tokens, K top-k.
"""

from __future__ import annotations

import torch

from moewe.moe.native_route import Routed
from moewe.moe.wide_ep.exchanges.pairs import sort_pairs


def routed(ids: torch.Tensor, num_slots: int) -> Routed:
    """Routing of [T, K] i32 with -1 for dropped choices, whose weights are NaN: nobody may read them."""
    pairs = sort_pairs(ids, torch.arange(num_slots + 1, dtype=torch.int32))
    rows = pairs.positions.t().to(torch.int32).masked_fill(ids < 0, -1).contiguous()
    weights = torch.rand(ids.shape, generator=torch.Generator().manual_seed(1)).masked_fill(ids < 0, torch.nan)
    return Routed(
        expert_ids=ids, weights=weights, slot_ids=ids, row_tokens=pairs.tokens.to(torch.int32),
        offsets=torch.tensor(pairs.offsets, dtype=torch.int32), rows=rows, tokens_per_slot=pairs.counts,
    )  # fmt: skip


def tiles_reference(counts: list[int], block_m: int) -> list[list[int]]:
    """Return slot, first row and end of the slot's rows of every tile of `block_m` sorted rows."""
    tiles, first = [], 0
    for slot, count in enumerate(counts):
        end = first + count
        tiles += [[slot, start, end] for start in range(first, end, block_m)]
        first = end
    return tiles
