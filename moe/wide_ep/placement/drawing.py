"""A placement as text: domains, ranks, slots, experts, replicas; short when there are many ranks.

Not the grid of all replicas of a group (topologies/grid.py). Units: slots and experts of one MoE layer of one group.
"""

from __future__ import annotations

from itertools import groupby

import numpy as np

from .record import ExpertPlacement

# More ranks than this are drawn in numbers instead of with the name of every expert.
MAX_NAMED_RANKS = 16


def draw_placement(placement: ExpertPlacement, layer: int = 0, *, max_named_ranks: int = MAX_NAMED_RANKS) -> str:
    """Return the map of one MoE layer.

    Example:
        >>> print(draw_placement(linear_placement(1, 8, 2)))
        domain 0: 2 ranks, 8 slots, 8 experts
          rank 0  slots 0-3  experts 0-3
          rank 1  slots 4-7  experts 4-7
    """
    if not placement.num_layers or not placement.num_experts:
        return "no expert slots"
    named = placement.num_ranks <= max_named_ranks
    lines = []
    for domain in np.unique(placement.rank_domain).tolist():
        ranks = np.flatnonzero(placement.rank_domain == domain).tolist()
        slots = np.concatenate([_slots(placement, rank) for rank in ranks])
        experts = placement.physical_to_logical[layer, slots]
        lines.append(
            f"domain {domain}: {_count(len(ranks), 'rank')}, {_count(len(slots), 'slot')}, "
            f"{_count(len(np.unique(experts)), 'expert')}"
        )
        lines += _named(placement, layer, ranks) if named else _numbers(placement, layer, ranks)
    lines += _replicated(placement, layer)
    return "\n".join(lines)


def _slots(placement: ExpertPlacement, rank: int) -> np.ndarray:
    start, stop = placement.slot_ranges[rank]
    return np.arange(start, stop)


def _named(placement: ExpertPlacement, layer: int, ranks: list[int]) -> list[str]:
    """A line a rank, with its experts."""
    rank_width = len(str(placement.num_ranks - 1))
    spans = [_span(*placement.slot_ranges[rank]) for rank in ranks]
    width = max(map(len, spans))
    lines = []
    for rank, span in zip(ranks, spans):
        experts = [int(expert) for expert in placement.local_experts(rank, layer)]
        lines.append(f"  rank {rank:>{rank_width}}  slots {span:<{width}}  experts {_runs(experts)}")
    return lines


def _numbers(placement: ExpertPlacement, layer: int, ranks: list[int]) -> list[str]:
    """A line for each run of ranks that hold equally many slots."""
    lines = []
    for size, run in groupby(ranks, key=placement.num_local_slots):
        some = list(run)
        slots = np.concatenate([_slots(placement, rank) for rank in some])
        shared = placement.num_replicas[layer, placement.physical_to_logical[layer, slots]] > 1
        who = f"rank {some[0]}" if len(some) == 1 else f"ranks {some[0]}-{some[-1]}"
        what = f"{_count(size, 'slot')} each ({_span(int(slots[0]), int(slots[-1]) + 1)})" if size else "no slots"
        lines.append(f"  {who}: {what}" + (f", {int(shared.sum())} with replicas elsewhere" if shared.any() else ""))
    return lines


def _replicated(placement: ExpertPlacement, layer: int) -> list[str]:
    """Which experts have how many replicas, most first."""
    count = placement.num_replicas[layer]
    lines = []
    for number in sorted(set(count[count > 1].tolist()), reverse=True):
        experts = np.flatnonzero(count == number).tolist()
        lines.append(f"{number} replicas: {'expert' if len(experts) == 1 else 'experts'} {_runs(experts)}")
    if (count == 0).any():
        lines.append(f"nowhere: experts {_runs(np.flatnonzero(count == 0).tolist())}")
    return lines


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _span(start: int, stop: int) -> str:
    """Return [start, stop) as people write it."""
    if stop <= start:
        return "none"
    return str(start) if stop == start + 1 else f"{start}-{stop - 1}"


def _runs(numbers: list[int]) -> str:
    """Return ascending numbers, runs of three or more as `first-last`."""
    parts = []
    for _, group in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        parts += [_span(run[0], run[-1] + 1)] if len(run) > 2 else [str(number) for number in run]
    return " ".join(parts) or "none"
