"""The recorder of an engine: just the steps that were asked for, all ranks the same ones, and an end that is told."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import pytest

from moewe.runtime.messages import StartTrace, StopTrace, Traced, TraceProgress
from moewe.runtime.plan import RankResult, StepPlan, StepResult, unpack
from moewe.runtime.step_recorder import ENGINE_PARTS, StepRecorder
from moewe.runtime.trace_session import TraceSession
from moewe.telemetry import StepMarks
from moewe.telemetry.step_marks import INPUTS
from tests.runtime.test_engine import FakeGroup, make_engine, run, submit


class MarkingGroup(FakeGroup):  # type: ignore[misc]
    """Ranks that mark what they are asked to, and show it to the recorder of their engine."""

    def __init__(self) -> None:
        super().__init__()
        self.recorder: StepRecorder | None = None

    def collect(self, timeout: float | None = None) -> StepResult | None:
        result: StepResult = super().collect(timeout)
        header = self.plans[result.step].header
        ranks = []
        for rank, one in enumerate(result.ranks):
            marks = StepMarks()
            marks.mark(INPUTS)
            ranks.append(msgspec.structs.replace(one, step=result.step, marks=marks.packed() if header.traced else b""))
            if self.recorder is not None:
                self.recorder.see(rank, ranks[-1])
        return StepResult(step=result.step, ranks=tuple(ranks))


def traced_steps(group: MarkingGroup) -> list[int]:
    plans: list[StepPlan] = group.plans
    return [plan.header.step for plan in plans if plan.header.traced]


def record(num_steps: int, most_marks: int = 1000) -> tuple[MarkingGroup, StepRecorder]:
    """Run a request of 20 tokens, from its sixth step on with a recorder."""
    group = MarkingGroup()
    engine = make_engine(group)
    engine.add(submit("a", [1, 2, 3], max_tokens=20))
    for _ in range(8):
        engine.step()
    assert len(group.plans) >= 5 and not traced_steps(group)
    order = StartTrace(trace_id=7, num_steps=num_steps, most_marks=most_marks)
    engine.recorder = group.recorder = StepRecorder(order, 2)
    assert run(engine)["a"][2] == "length"
    return group, engine.recorder


def test_the_next_steps_are_recorded_and_no_others() -> None:
    group, recorder = record(4)
    asked = traced_steps(group)
    assert len(asked) == 4 and asked == list(range(asked[0], asked[0] + 4)) and asked[-1] < len(group.plans) - 1
    assert recorder.is_done
    trace = recorder.traced()
    assert [step.step for step in trace.steps] == asked and not trace.is_full
    assert all(step.phase == "decode" and sum(step.rows) == 1 and all(step.marks) for step in trace.steps)
    engine = unpack(trace.engine, "<i8").reshape(-1, 4)
    assert sorted((part, step) for part, step, *_ in engine.tolist()) == sorted(
        (part, step) for part in range(len(ENGINE_PARTS)) for step in asked
    )
    assert (engine[:, 2] <= engine[:, 3]).all() and (engine[1:, 2] >= engine[:-1, 3]).all()


def test_a_trace_is_no_larger_than_it_may_be() -> None:
    group, recorder = record(10, most_marks=4)
    assert recorder.is_done and recorder.traced().is_full
    # Two ranks mark once a step, and another step was on its way already.
    assert 2 <= len(recorder.traced().steps) == len(traced_steps(group)) <= 3


def test_a_trace_that_ends_halfway_holds_what_all_ranks_have_said() -> None:
    group, recorder = record(100)
    assert not recorder.is_done and recorder.num_booked == len(traced_steps(group)) < 100
    assert len(recorder.traced().steps) == recorder.num_booked
    last = max(traced_steps(group))
    recorder.see(0, RankResult(step=last + 1))  # nobody asked for it
    assert recorder.traced().steps[-1].step == last


@dataclass
class Recording:
    """A replica that keeps what it was told."""

    lives: bool = True
    told: list[StartTrace | StopTrace] = field(default_factory=list)
    on_trace: object = None

    def trace(self, order: StartTrace | StopTrace) -> None:
        self.told.append(order)


def hear(replica: Recording, message: TraceProgress | Traced) -> None:
    assert callable(replica.on_trace)
    replica.on_trace(message)


def test_a_session_is_done_when_every_replica_is_or_is_lost() -> None:
    replicas = [Recording(), Recording(), Recording()]
    said: list[None] = []
    session = TraceSession(replicas, 9, lambda: said.append(None), most_marks=30)  # type: ignore[arg-type]
    (order,) = replicas[0].told
    assert isinstance(order, StartTrace) and (order.num_steps, order.most_marks) == (9, 10)
    hear(replicas[0], TraceProgress(trace_id=order.trace_id, num_steps=4))
    hear(replicas[0], TraceProgress(trace_id=order.trace_id - 1, num_steps=8))  # of another trace
    hear(replicas[1], Traced(trace_id=order.trace_id - 1, steps=(), engine=b""))
    assert session.steps == [4, 0, 0] and not session.is_done
    for replica in replicas[:2]:
        hear(replica, Traced(trace_id=order.trace_id, steps=(), engine=b""))
    assert not session.is_done
    replicas[2].lives = False
    assert session.is_done
    session.close()
    assert [len(replica.told) for replica in replicas] == [1, 1, 2] and replicas[0].on_trace is None
    assert len(said) == 2


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_step_that_a_rank_has_not_answered_is_left_out(num_ranks: int) -> None:
    recorder = StepRecorder(StartTrace(trace_id=1, num_steps=1, most_marks=9), num_ranks)
    group = FakeGroup()
    engine = make_engine(group)
    engine.recorder = recorder
    engine.add(submit("a", [1], max_tokens=2))
    engine.step()
    (step,) = [plan.header.step for plan in group.plans if plan.header.traced]
    recorder.see(0, RankResult(step=step, num_rows=1))
    assert len(recorder.traced().steps) == 2 - num_ranks
