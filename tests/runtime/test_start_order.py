"""Nobody waits in a collective for a compiler, and timers of serving begin when the last rank has captured."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from moewe.runtime import worker_main
from moewe.runtime.engine_main import EXIT_NOT_STARTED, EXIT_STOPPED, run_engine
from moewe.runtime.messages import Failed, FromEngine, KVAllocated, Message, Ready, Shutdown, ToEngine
from moewe.runtime.processes.channel import Channel, channel_pair
from moewe.runtime.processes.group import GroupParts
from moewe.runtime.processes.supervision import Limits
from moewe.runtime.rank_parts import START_TIMEOUT_S
from moewe.runtime.start_up import collective_timeout_s
from moewe.topologies.meeting import PeersLostError
from tests.runtime.test_launch import engine_start
from tests.support.fake_worker import COMPILING, WARMING_UP, FakeWorker, Trouble

SLOW_S = 0.1


class Starting(FakeWorker):
    """Of two ranks the second is slow in all that it does; warming up is a collective."""

    def __init__(self, events: list[str], meeting: threading.Barrier, *args: Any) -> None:
        super().__init__(*args)
        self._events, self._meeting = events, meeting

    def allocate(self, num_blocks: int) -> None:
        time.sleep(SLOW_S * self._start.rank)
        super().allocate(num_blocks)
        self._events.append("compiled")

    def warm_up(self) -> KVAllocated:
        self._events.append("collective")
        try:
            found = super().warm_up()
            self._meeting.wait(10)
        except threading.BrokenBarrierError:
            raise PeersLostError("a rank has ended") from None
        except RuntimeError:
            self._meeting.abort()
            raise
        time.sleep(SLOW_S * self._start.rank)
        self._events.append("captured")
        return found


def start_up(events: list[str], trouble: Trouble | None = None) -> tuple[int, Message]:
    """Start an engine with two such ranks and end it; return its exit code and Ready, or what it said instead."""
    meeting = threading.Barrier(2)

    def make(start: Any, progress: Any, on_loading: object, hub: object) -> Starting:
        return Starting(events, meeting, start, progress, trouble or Trouble())

    ours, theirs = channel_pair(FromEngine, ToEngine)
    codes: list[int] = []
    parts: Any = GroupParts(make_worker=make)  # type: ignore[arg-type]
    engine = threading.Thread(target=lambda: codes.append(run_engine(theirs, engine_start(ranks="threads"), parts)))
    engine.start()
    said = _first_of(ours, (Ready, Failed))
    if isinstance(said, Ready):
        ours.send(Shutdown())
    engine.join(20)
    ours.close()
    return codes[0], said


def _first_of(channel: Channel[Any], kinds: tuple[type[Message], ...]) -> Message:
    while not isinstance(message := channel.receive(10), kinds):
        assert message is not None, "the engine says nothing"
    return message


def test_compiling_then_collectives_then_timers(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    limited: list[float] = []

    def limit(timeout_s: float) -> None:
        limited.append(timeout_s)
        events.append("timer")

    monkeypatch.setattr(worker_main, "limit_waits", limit)
    code, said = start_up(events)
    assert code == EXIT_STOPPED and isinstance(said, Ready)
    assert events == [kind for kind in ("compiled", "collective", "captured", "timer") for _ in range(2)]
    assert limited == [limited[0]] * 2 and limited[0] < START_TIMEOUT_S


@pytest.mark.parametrize("step", [COMPILING, WARMING_UP])
def test_a_rank_that_fails_before_all_are_warm_is_named(step: int) -> None:
    code, said = start_up([], Trouble(rank=1, step=step))
    assert code == EXIT_NOT_STARTED
    assert isinstance(said, Failed) and said.reason == "rank 1 failed: RuntimeError: the fake worker broke"


def test_a_supervisor_loses_patience_before_a_collective_does() -> None:
    for stall_s in (1.0, 60.0, 1000.0):
        assert collective_timeout_s(Limits(stall_s=stall_s)) >= 4 * stall_s
