"""Routed (token, expert) pairs of one rank: sorting them by slot, and adding their outputs back to tokens.

Not an exchange: nothing here leaves the rank. Every exchange uses both halves, so that all give the same bits.
Letters: T tokens, K top-k, N = T * K pairs, P slots that ids may name, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

_CACHED_PRODUCTS = 1 << 19  # fp32 elements, 2 MiB


@dataclass(frozen=True, kw_only=True)
class SortedPairs:
    """The pairs of one rank in slot order (within a slot: by token, then k); dropped pairs are left out.

    Attributes:
        tokens: [M] i64, token of each pair.
        offsets: P + 1 Python ints; pairs of slot p are [offsets[p], offsets[p + 1]).
        counts: [P] i64 on the CPU, pairs of each slot.
        positions: [K, T] i64, where each pair stands in `tokens`; 0 for a dropped one.
        dropped: [K, T] bool, or None when nothing was dropped.
    """

    tokens: torch.Tensor
    offsets: list[int]
    counts: torch.Tensor
    positions: torch.Tensor
    dropped: torch.Tensor | None


class PairKernels(Protocol):
    """Kernels of a GPU that do what this file does, without a look from the host."""

    def sort(self, slot_ids: torch.Tensor, num_slots: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Sort the pairs of `slot_ids` [T, K] i32 by slot, -1 for a dropped one.

        Returns:
            The token of each of M pairs [T * K] i32 (behind them is anything), the row of each choice [T, K] i32 (-1
            for a dropped one), and pairs of each slot [num_slots] i64.
        """
        ...

    def add(self, rows: torch.Tensor, topk_weights: torch.Tensor, row_of: torch.Tensor) -> torch.Tensor:
        """Do what `add_pairs` does where choice [T, K] has the row `row_of` [T, K] i32, -1 for a dropped one."""
        ...


def sort_pairs(physical_ids: torch.Tensor, boundaries: torch.Tensor) -> SortedPairs:
    """Sort the pairs of `physical_ids` by slot.

    Args:
        physical_ids: [T, K] i32, -1 for a dropped pair.
        boundaries: [P + 1] i32, the numbers 0..P, on the same device.

    Raises:
        RuntimeError: an id names no slot.

    Example:
        ids [[1, 0], [1, -1]] and P = 2: tokens [0, 0, 1], offsets [0, 1, 3], positions [[1, 2], [0, 0]].
    """
    num_tokens, top_k = physical_ids.shape
    flat = physical_ids.reshape(-1)  # [N]
    slots, order = flat.sort(stable=True)
    bounds = torch.searchsorted(slots, boundaries).cpu()  # [P + 1] i64
    offsets: list[int] = bounds.tolist()
    num_dropped = offsets[0]
    if offsets[-1] != flat.shape[0]:
        raise RuntimeError(f"physical id {int(slots[-1])} names no expert slot; there are {len(offsets) - 1}")
    ranks = torch.arange(-num_dropped, flat.shape[0] - num_dropped, device=flat.device)
    positions = torch.empty_like(order).scatter_(0, order, ranks).view(num_tokens, top_k).t()  # [K, T]
    dropped = None
    if num_dropped:
        dropped = positions < 0
        positions = positions.clamp(min=0)
        order = order[num_dropped:]
        offsets = [offset - num_dropped for offset in offsets]
    return SortedPairs(
        tokens=order // top_k, offsets=offsets, counts=bounds.diff(), positions=positions, dropped=dropped
    )


def add_pairs(rows: torch.Tensor, topk_weights: torch.Tensor, pairs: SortedPairs) -> torch.Tensor:
    """Add the outputs of each token's pairs with their weights: ascending k, in fp32, from zero, rounded once.

    Args:
        rows: [M, D] outputs in the order of `pairs.tokens`.
        topk_weights: [T, K] f32; weights of dropped pairs are ignored, whatever they hold.
        pairs: what `sort_pairs` returned.

    Returns:
        [T, D] in the dtype of `rows`.
    """
    top_k, num_tokens = pairs.positions.shape
    if not rows.shape[0] or not num_tokens:
        return rows.new_zeros(num_tokens, rows.shape[1])
    weights = topk_weights.t().unsqueeze(-1)  # [K, T, 1]
    dropped = None if pairs.dropped is None else pairs.dropped.unsqueeze(-1)  # [K, T, 1]
    # On a CPU a few tokens at a time: their fp32 products stay in its cache.
    step = num_tokens if rows.is_cuda else max(1, _CACHED_PRODUCTS // (top_k * rows.shape[1]))
    if step >= num_tokens:
        return _add(rows, weights, pairs.positions, dropped)
    total = rows.new_empty(num_tokens, rows.shape[1])
    for start in range(0, num_tokens, step):
        part = slice(start, start + step)
        part_dropped = None if dropped is None else dropped[:, part]
        total[part] = _add(rows, weights[:, part], pairs.positions[:, part], part_dropped)
    return total


def _add(
    rows: torch.Tensor, weights: torch.Tensor, positions: torch.Tensor, dropped: torch.Tensor | None
) -> torch.Tensor:
    """`add_pairs` of some tokens, with weights and dropped as [K, T, 1] and positions as [K, T]."""
    picked = rows.index_select(0, positions.reshape(-1)).view(*positions.shape, -1)  # [K, T, D]
    products = picked * weights  # [K, T, D] f32
    if dropped is not None:
        products.masked_fill_(dropped, 0.0)
    total, *others = products.unbind(0)
    total += 0.0  # starting from +0 turns -0 into +0
    for product in others:
        total += product
    return total.to(rows.dtype)
