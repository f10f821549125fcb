"""How many replicas each expert of a layer gets.

Not where they stand (spread.py, packing.py). Pure; units: load in tokens per expert. E experts, P slots, W ranks.
"""

from __future__ import annotations

import heapq

import numpy as np


def count_replicas(
    load: np.ndarray, num_slots: int, num_ranks: int, num_domains: int = 1, *, hot: float = 0.5
) -> np.ndarray:
    """Return how many replicas each expert gets: [E] i64, at least 1 each, `num_slots` together.

    Redundant slots go first to experts that are hot for a rank, then to the heaviest that have no replica in
    every domain (each replica more keeps 1 / num_domains of an expert's rows at home), then again to the heaviest by
    load of a replica. No expert gets more replicas than there are ranks unless slots are left otherwise.

    Args:
        load: [E], tokens that each expert gets.
        num_slots: P >= E.
        num_ranks: W.
        num_domains: domains that the ranks stand in.
        hot: an expert is cut until no replica of it gets more than this times the mean of a rank.

    Example:
        >>> count_replicas(np.array([9.0, 2.0, 1.0]), 5, 2).tolist()
        [2, 2, 1]
    """
    num_experts = len(load)
    replicas = np.ones(num_experts, np.int64)
    left = num_slots - num_experts
    most = max(num_ranks, -(-num_slots // num_experts))
    left -= _cut(replicas, load, left, most, floor=hot * load.sum() / num_ranks)
    for expert in np.argsort(-load, kind="stable"):
        more = min(left, num_domains - int(replicas[expert]))
        if more > 0:
            replicas[expert] += more
            left -= more
    left -= _cut(replicas, load, left, most, floor=-1.0)
    assert left == 0, (left, num_slots, most)
    return replicas


def _cut(replicas: np.ndarray, load: np.ndarray, left: int, most: int, *, floor: float) -> int:
    """Add up to `left` replicas in place, each to the heaviest by load of a replica above `floor`; return how many."""
    heap = [(-float(load[e]) / int(replicas[e]), int(replicas[e]), e) for e in range(len(load)) if replicas[e] < most]
    heapq.heapify(heap)
    added = 0
    while added < left and heap and -heap[0][0] > floor:
        _, count, expert = heapq.heappop(heap)
        replicas[expert] = count + 1
        added += 1
        if count + 1 < most:
            heapq.heappush(heap, (-float(load[expert]) / (count + 1), count + 1, expert))
    return added
