"""`StepRecorder`: where the time of some steps went, in the engine itself and, as they say, on all of its ranks.

Not the marks of a rank (telemetry/step_marks.py) and no picture (server/trace/): it asks ranks by the header of a step
to make marks, and keeps what comes with the results. There is one only while somebody traces.
Units: nanoseconds of CLOCK_MONOTONIC.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
import numpy as np

from ..telemetry.step_marks import num_marks
from .messages import StartTrace, Traced, TracedStep
from .plan import RankResult, StepPlan, pack

ENGINE_PARTS = ("plan", "hand over", "collect", "book")
PLAN, HAND_OVER, COLLECT, BOOK = range(len(ENGINE_PARTS))


class StepRecorder:
    """Records steps of one engine. The engine calls `turn`, then in each of its turns what happens.

    Args:
        order: what to record.
        num_ranks: of the group.
        clock: nanoseconds.

    Attributes:
        trace_id: whose trace.
        num_booked: steps that are recorded to their end.
    """

    def __init__(self, order: StartTrace, num_ranks: int, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self.trace_id = order.trace_id
        self.num_booked = 0
        self._order, self._num_ranks, self._clock = order, num_ranks, clock
        self._phases: dict[int, str] = {}  # of steps that ranks were asked to mark
        self._results: dict[int, dict[int, RankResult]] = {}
        self._engine: list[tuple[int, int, int, int]] = []
        self._num_marks = 0
        self._last = clock()

    @property
    def is_done(self) -> bool:
        """True when nothing more will be recorded."""
        return not self._wants_more and self.num_booked == len(self._phases)

    @property
    def _is_full(self) -> bool:
        return self._num_marks >= self._order.most_marks

    @property
    def _wants_more(self) -> bool:
        return len(self._phases) < self._order.num_steps and not self._is_full

    def turn(self) -> None:
        """The engine begins a turn of its loop."""
        self._last = self._clock()

    def planned(self, plan: StepPlan) -> StepPlan:
        """Take note of a plan that was made in this turn; return it as ranks shall get it."""
        if not self._wants_more:
            self.turn()
            return plan
        self._phases[plan.header.step] = plan.header.kind
        self._mark(PLAN, plan.header.step)
        return msgspec.structs.replace(plan, header=msgspec.structs.replace(plan.header, traced=True))

    def handed_over(self, step: int) -> None:
        """All ranks have been sent their plans."""
        self._mark(HAND_OVER, step)

    def collected(self, step: int) -> None:
        """All results are there."""
        self._mark(COLLECT, step)

    def booked(self, step: int) -> None:
        """The results are booked and made into texts."""
        self._mark(BOOK, step)
        self.num_booked += step in self._phases

    def see(self, rank: int, result: RankResult) -> None:
        """Take what a rank says of a step; called before `collected`."""
        if result.step in self._phases:
            self._results.setdefault(result.step, {})[rank] = result
            self._num_marks += num_marks(result.marks)

    def traced(self) -> Traced:
        """Return what all ranks have said of, in order."""
        whole = [step for step in self._phases if len(self._results.get(step, ())) == self._num_ranks]
        steps = []
        for step in whole:
            results = [self._results[step][rank] for rank in range(self._num_ranks)]
            steps.append(
                TracedStep(
                    step=step,
                    phase=self._phases[step],
                    rows=tuple(result.num_rows for result in results),
                    marks=tuple(result.marks for result in results),
                )
            )
        return Traced(
            trace_id=self.trace_id,
            steps=tuple(steps),
            engine=pack(np.array(self._engine, np.int64), "<i8"),
            is_full=self._is_full and len(self._phases) < self._order.num_steps,
        )

    def _mark(self, part: int, step: int) -> None:
        now = self._clock()
        if step in self._phases:
            self._engine.append((part, step, self._last, now))
        self._last = now
