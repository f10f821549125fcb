"""Counts of observations under fixed bounds, as Prometheus' histograms have them.

Not a metric (runtime/metrics/export.py has those of requests, an engine counts its steps with one). Units: of what is
observed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

# Of prompts, answers and batches alike, in tokens: powers of two up to what the longest contexts hold.
TOKEN_BOUNDS = tuple(float(2**power) for power in range(18))


class Histogram:
    """Counts of observations under fixed bounds.

    Args:
        bounds: upper bounds, ascending.

    Attributes:
        counts: of observations by bucket; the last one is of those above all bounds.
        total: the sum of what was observed.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Count `value`, `count` times."""
        value = max(0.0, value)
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count

    def cumulative(self) -> list[tuple[str, float]]:
        """Return Prometheus buckets: bound and how many observations are no larger."""
        return cumulative(self.bounds, self.counts)


def cumulative(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """Return Prometheus buckets of `counts` by bucket: bound and how many observations are no larger."""
    buckets, running = [], 0
    for bound, count in zip([*map(str, bounds), "+Inf"], counts, strict=True):
        running += count
        buckets.append((bound, float(running)))
    return buckets
