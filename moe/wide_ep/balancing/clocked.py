"""What moves saved by a clock: how long steps really took before the first move and since, at like numbers of rows.

Not the model's books (ledger.py), by which moves are decided: a clock also sees contexts that grow and neighbours that
come and go. Pure: counters come in. Units: seconds, steps; rows of all ranks together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

# Steps compare whose mean rows differ by no more than about this factor.
_LIKE = 1.1


@dataclass(frozen=True, kw_only=True)
class PhaseTime:
    """Sums since the start, of the steps of one phase; seconds are those of the slowest rank."""

    steps: int = 0
    rows: int = 0
    seconds: float = 0.0


class ClockedGain:
    """Compares steps; `observe` is told of every stretch of them, in order.

    Attributes:
        saved_s: that steps since the first move took less than like ones before it; negative where they took more.
        compared_steps: how many that is of; steps with other numbers of rows than any before count in neither.

    Example:
        >>> gain = ClockedGain()
        >>> gain.observe({"decode": PhaseTime(steps=10, rows=80, seconds=1.0)}, moved=False)
        >>> gain.observe({"decode": PhaseTime(steps=15, rows=120, seconds=1.25)}, moved=True)
        >>> gain.saved_s, gain.compared_steps
        (0.25, 5)
    """

    def __init__(self) -> None:
        self.saved_s, self.compared_steps = 0.0, 0
        self._last: dict[str, PhaseTime] = {}
        self._before: dict[tuple[str, int], PhaseTime] = {}  # by phase and number of rows

    def observe(self, sums: Mapping[str, PhaseTime], *, moved: bool) -> None:
        """Take newer sums by phase; `moved` where experts stood otherwise than at the start, in all steps since."""
        for phase, now in sums.items():
            last = self._last.get(phase, PhaseTime())
            self._last[phase] = now
            new = PhaseTime(steps=now.steps - last.steps, rows=now.rows - last.rows, seconds=now.seconds - last.seconds)
            if new.steps <= 0 or new.rows <= 0:
                continue
            key = phase, round(math.log(new.rows / new.steps, _LIKE))
            before = self._before.get(key, PhaseTime())
            if not moved:
                self._before[key] = PhaseTime(
                    steps=before.steps + new.steps, rows=before.rows + new.rows, seconds=before.seconds + new.seconds
                )
            elif before.steps:
                self.saved_s += new.steps * before.seconds / before.steps - new.seconds
                self.compared_steps += new.steps
