"""Placements that know no load: experts in order, and in turns. Where others start, and what ours is compared with.

Not a balancer (balanced.py, eplb.py). Letters: L MoE layers (counted among MoE layers), E experts, W ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ....topologies import slot_ranges
from .record import ExpertPlacement, placement_of


def linear_placement(
    num_layers: int, num_experts: int, num_ranks: int | None = None, *, domains: Sequence[int] = ()
) -> ExpertPlacement:
    """Place experts in order, as evenly as they divide, without replicas.

    Args:
        num_layers: MoE layers; 0 for a dense model.
        num_experts: E; 0 for a dense model.
        num_ranks: W; None: one for each of `domains`.
        domains: the domain of each rank; empty when all share one.

    Raises:
        ValueError: there are more ranks than experts.

    Example:
        10 experts over 4 ranks: slots [0, 3), [3, 6), [6, 8), [8, 10).
    """
    return _in_order(np.arange(num_experts, dtype=np.int32), num_layers, num_ranks, domains)


def round_robin_placement(
    num_layers: int, num_experts: int, num_ranks: int | None = None, *, domains: Sequence[int] = ()
) -> ExpertPlacement:
    """Place expert e on rank e modulo W, without replicas; arguments as `linear_placement` has them.

    Example:
        10 experts over 4 ranks: [0, 4, 8], [1, 5, 9], [2, 6], [3, 7].
    """
    width = num_ranks or len(domains)
    row = np.concatenate([np.arange(rank, num_experts, width, dtype=np.int32) for rank in range(width)])
    return _in_order(row, num_layers, num_ranks, domains)


def _in_order(row: np.ndarray, num_layers: int, num_ranks: int | None, domains: Sequence[int]) -> ExpertPlacement:
    num_experts, width = len(row), num_ranks or len(domains)
    if num_experts and width > num_experts:
        raise ValueError(
            f"EP={width} is more ranks than the model has experts ({num_experts}); use EP <= {num_experts}"
        )
    return placement_of(
        np.tile(row, (num_layers, 1)), num_experts, slot_ranges(num_experts, width), domains=tuple(domains)
    )
