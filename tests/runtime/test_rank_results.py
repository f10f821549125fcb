"""When a rank's results go out: at once, or, in the engine's own process, when the next step needs no interpreter."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from moewe.runtime.messages import (
    FromWorker,
    KVAllocated,
    Loaded,
    RunStep,
    StepDone,
    StopWorker,
    ToWorker,
    WorkerFailed,
)
from moewe.runtime.plan import RankPlan, RankResult, StepHeader
from moewe.runtime.processes.channel import Channel, channel_pair
from moewe.runtime.worker_main import run_rank
from moewe.telemetry import ProgressBoard


class Start:
    rank, num_ranks, cpus = 0, 1, ()


class Worker:
    """Stops at two places of each step until the test lets it go on."""

    def __init__(self) -> None:
        self.prepared, self.may_compute = threading.Semaphore(0), threading.Semaphore(0)
        self.computing, self.may_end = threading.Semaphore(0), threading.Semaphore(0)
        self.fails_at = -1

    moves = None

    def load(self) -> Loaded:
        return Loaded(rank=0, num_blocks=1, weight_bytes=1, weight_bytes_read=1, pid=1)

    def allocate(self, num_blocks: int) -> None:
        raise AssertionError(num_blocks)

    def warm_up(self) -> KVAllocated:
        raise AssertionError

    def run(self, header: StepHeader, plan: RankPlan, before_layers: Callable[[], None] | None = None) -> RankResult:
        assert before_layers is not None
        self.prepared.release()
        assert self.may_compute.acquire(timeout=10)
        if header.step == self.fails_at:
            raise RuntimeError("broken")
        before_layers()
        self.computing.release()
        assert self.may_end.acquire(timeout=10)
        return RankResult(step=header.step)

    def late_counters(self) -> bytes:
        return b""

    def pass_on(self) -> None:
        """Let it end the step that it prepares."""
        self.may_compute.release()
        assert self.computing.acquire(timeout=10)
        self.may_end.release()


def step(number: int) -> RunStep:
    header = StepHeader(step=number, epoch=0, kind="decode", bucket=1, exchange="local")
    return RunStep(header=header, plan=RankPlan())


@contextmanager
def running(waits: bool) -> Iterator[tuple[Channel[Any], Worker]]:
    ours, theirs = channel_pair(FromWorker, ToWorker)
    worker, start = Worker(), Start()
    made: Any = lambda *_: worker  # noqa: E731
    rank = threading.Thread(
        target=run_rank, args=(theirs, start, ProgressBoard(1).rank(0), made), kwargs={"results_wait": waits}
    )
    rank.start()
    assert isinstance(ours.receive(10), Loaded)
    yield ours, worker
    rank.join(10)
    assert not rank.is_alive()
    ours.close()


@pytest.mark.parametrize("waits", [True, False])
def test_a_result_waits_for_the_next_step_only_where_it_is_told_to(waits: bool) -> None:
    with running(waits) as (ours, worker):
        ours.send(step(0))
        ours.send(step(1))
        worker.pass_on()
        for _ in range(2):
            assert worker.prepared.acquire(timeout=10)
        # Step 1 is being prepared.
        early = ours.receive(0.2)
        assert (early is None) == waits
        worker.may_compute.release()
        done = early or ours.receive(10)
        assert isinstance(done, StepDone) and done.result.step == 0
        worker.may_end.release()
        done = ours.receive(10)  # nothing follows, so it does not wait
        assert isinstance(done, StepDone) and done.result.step == 1
        ours.send(StopWorker())


def test_a_result_is_not_lost_when_the_next_step_fails() -> None:
    with running(waits=True) as (ours, worker):
        worker.fails_at = 1
        ours.send(step(0))
        ours.send(step(1))
        worker.pass_on()
        worker.may_compute.release()
        done, failed = ours.receive(10), ours.receive(10)
        assert isinstance(done, StepDone) and done.result.step == 0
        assert isinstance(failed, WorkerFailed) and "broken" in failed.reason
