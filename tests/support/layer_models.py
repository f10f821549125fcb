"""Models of a layer's time for tests of moves: the fullest rank, with and without a bound on what moves may lose."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moewe.moe.wide_ep.placement import ExpertPlacement
from moewe.topologies.cost import Ceilings, Link
from moewe.topologies.layer_cost import ExpertSize, LayerCost, TokenRows


def fullest_rank(placement: ExpertPlacement, top_k: int, row_s: float = 1e-6) -> LayerCost:
    """A layer waits for its fullest rank: 20 us, and `row_s` a row; links and weights are free."""
    link = Link(bandwidth=1e30, latency=1e-5)
    ceilings = Ceilings(memory_bandwidth=1e30, flops=1 / row_s, within=link, between=link)
    size = ExpertSize(expert_bytes=1, row_bytes=1, flops=1.0)
    return LayerCost(
        size, ceilings, placement.slot_ranges, placement.rank_domain.tolist(), token=TokenRows(top_k=top_k)
    )


class Bold:
    """The fullest rank counts, a second a row, and nothing is ever lost: what is uneven moves at once."""

    def __init__(self, slot_ranges: Sequence[tuple[int, int]]) -> None:
        self._owner = np.repeat(np.arange(len(slot_ranges)), [stop - start for start, stop in slot_ranges])

    def seconds(self, rows: np.ndarray, slots: np.ndarray) -> float:
        """Rows of the fullest rank."""
        return float(np.bincount(self._owner[slots].ravel(), rows.ravel()).max())

    def most_lost(self, before: np.ndarray, after: np.ndarray, *, rows: float, steps: int) -> float:
        """Nothing."""
        return 0.0


class Idle(Bold):
    """A layer that takes no time, so that nothing moves unless a test moves it."""

    def seconds(self, rows: np.ndarray, slots: np.ndarray) -> float:
        """None."""
        return 0.0
