"""The clock of one rank: which of its time goes to steps, to the host's part of them, and to waiting for plans.

Not a counter (counters.py keeps the sums) and not a profiler: five looks at the clock a step, and marks
(step_marks.py) only in steps that are traced. On a GPU the host's part is what it does before it launches layers and
after it has the logits, which is when the device has finished.
Units: seconds of a monotonic clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from .counters import RankCounters
from .step_marks import RESULTS, StepMarks


class StepClock:
    """Call `begin`, `inputs_ready`, `computed` (again where more is computed) and `end` in every step.

    Args:
        counters: get the sums.
        clock: monotonic seconds.

    Attributes:
        marks: of the step that runs, where it is traced; else None.
    """

    def __init__(self, counters: RankCounters, clock: Callable[[], float] = time.perf_counter) -> None:
        self._counters, self._clock = counters, clock
        self._began = self._inputs = self._computed = self._ended = clock()
        self._goes_on = False
        self._starved = 0.0
        self.marks: StepMarks | None = None

    def begin(self, *, traced: bool = False) -> None:
        """A plan has come; `traced`: make marks in this step."""
        now = self._clock()
        self.marks = StepMarks(round(self._ended * 1e9) if self._goes_on else 0) if traced else None
        self._starved = now - self._ended if self._goes_on else 0.0
        self._began = self._inputs = self._computed = now

    def inputs_ready(self) -> None:
        """What layers need is there."""
        self._inputs = self._computed = self._clock()

    def computed(self) -> None:
        """Layers or logits are done."""
        self._computed = self._clock()

    def mark(self, part: int) -> None:
        """End a part of a traced step; nothing in others."""
        if self.marks is not None:
            self.marks.mark(part)

    def end(self, *, goes_on: bool) -> float:
        """Book the step and return how long it took; `goes_on`: this rank has sequences that are not finished."""
        self.mark(RESULTS)
        now = self._clock()
        busy = now - self._began
        host = busy - (self._computed - self._inputs)
        self._counters.end_step(busy, host, self._starved)
        self._ended, self._goes_on = now, goes_on
        return busy
