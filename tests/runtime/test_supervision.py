"""The judge names the rank that stands still, and only when it stands still."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from moewe.runtime.processes.supervision import (
    Limits,
    Watch,
    Watchdog,
    judge,
    predicted_layer_s,
    process_state,
)
from moewe.telemetry import ProgressBoard
from moewe.telemetry.progress import STATE_BUSY, STATE_IDLE, STATE_STARTING

LIMITS = Limits(stall_s=5.0, starting_s=60.0)


class Clock:
    """Feeds the judge with a board and a clock that only the test moves."""

    def __init__(self, num_ranks):
        self.board = ProgressBoard(num_ranks)
        self.ranks = [self.board.rank(rank) for rank in range(num_ranks)]
        self.stopped = [False] * num_ranks
        self.now = 100.0
        self.watch: Watch | None = None
        self.ask()

    def ask(self, limits=LIMITS):
        self.watch, verdict = judge(self.watch, self.board.snapshot(), self.stopped, self.now, limits)
        return verdict

    def run(self, seconds, each=lambda: None, limits=LIMITS):
        """Let time pass in quarters of a second; return the first verdict and how long it took."""
        for quarter in range(int(seconds * 4)):
            each()
            self.now += 0.25
            verdict = self.ask(limits)
            if verdict is not None:
                return verdict, (quarter + 1) / 4
        return None, seconds


@pytest.fixture
def clock():
    return Clock(3)


def busy(clock, step, ticks):
    for rank, count in zip(clock.ranks, ticks):
        rank.enter(STATE_BUSY, step)
        for _ in range(count):
            rank.tick()


def test_ranks_that_tick_are_never_stuck(clock):
    busy(clock, 0, [0, 0, 0])
    assert clock.run(60, lambda: [rank.tick() for rank in clock.ranks])[0] is None


def test_rank_with_least_progress_in_a_step_is_named(clock):
    busy(clock, 7, [12, 9, 12])
    verdict, after = clock.run(20)
    assert verdict.rank == 1
    assert 5.0 <= after <= 5.5
    assert "rank 1 is stuck" in verdict.reason
    assert "step 7, after 9 operations" in verdict.reason


def test_rank_still_in_an_older_step_is_named(clock):
    busy(clock, 7, [30, 2, 2])
    clock.ranks[1].enter(STATE_BUSY, 8)
    clock.ranks[2].enter(STATE_IDLE, 7)
    assert clock.run(20, lambda: clock.ranks[2].heartbeat())[0].rank == 0


def test_idle_rank_without_heartbeat_is_named(clock):
    for rank in clock.ranks:
        rank.enter(STATE_IDLE, 3)
    verdict, after = clock.run(20, lambda: [clock.ranks[rank].heartbeat() for rank in (0, 1)])
    assert verdict.rank == 2
    assert 5.0 <= after <= 5.5
    assert "idle after step 3" in verdict.reason


def test_idle_ranks_that_beat_once_a_second_live(clock):
    beats = iter(range(10**6))
    for rank in clock.ranks:
        rank.enter(STATE_IDLE, 3)
    assert clock.run(60, lambda: [r.heartbeat() for r in clock.ranks if next(beats) % 12 < 3])[0] is None


def test_stopped_process_is_named_though_others_got_less_far(clock):
    busy(clock, 7, [5, 9, 5])
    clock.stopped[1] = True
    verdict, _ = clock.run(20)
    assert verdict.rank == 1
    assert "stopped by a signal" in verdict.reason


def test_process_stopped_for_a_moment_is_forgiven(clock):
    busy(clock, 7, [5, 5, 5])
    clock.stopped[1] = True
    assert clock.run(4)[0] is None
    clock.stopped[1] = False
    clock.ranks[1].tick()
    assert clock.run(1)[0] is None


def test_loading_may_take_long_but_not_for_ever(clock):
    for rank in clock.ranks:
        rank.enter(STATE_STARTING, -1)
    verdict, after = clock.run(100, lambda: [clock.ranks[rank].tick() for rank in (0, 2)])
    assert verdict.rank == 1
    assert 60 <= after <= 60.5


def test_who_waits_for_a_compiler_elsewhere_is_not_blamed(clock):
    """It has said that it is done, and gives signs of life until all are."""
    compiles, waits = clock.ranks[1], (clock.ranks[0], clock.ranks[2])
    for rank in clock.ranks:
        rank.enter(STATE_STARTING, -1)
    beats = [rank.heartbeat for rank in waits]
    assert clock.run(150, lambda: [beat() for beat in [*beats, compiles.tick]])[0] is None
    assert clock.run(100, lambda: [beat() for beat in beats])[0].rank == 1


def test_process_stopped_while_loading_is_named_soon(clock):
    clock.stopped[2] = True
    verdict, after = clock.run(100)
    assert verdict.rank == 2
    assert after <= 5.5


def test_suspended_supervisor_blames_nobody(clock):
    busy(clock, 7, [5, 5, 5])
    clock.now += 3600
    assert clock.ask() is None
    assert clock.run(3, lambda: [rank.tick() for rank in clock.ranks])[0] is None


def test_slow_layers_raise_the_limit():
    layer = predicted_layer_s(weight_bytes=40 << 30, num_layers=40, memory_bandwidth=1 << 30, num_rows=1)
    assert layer == 1.0
    assert predicted_layer_s(weight_bytes=40 << 30, num_layers=40, memory_bandwidth=1 << 30, num_rows=512) == 128.0
    assert predicted_layer_s(weight_bytes=1, num_layers=0, memory_bandwidth=0, num_rows=1) == 0.0


def test_process_state_tells_stopped_from_gone():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        os.kill(child.pid, signal.SIGSTOP)
        deadline = time.monotonic() + 5
        while process_state(child.pid) != "T" and time.monotonic() < deadline:
            time.sleep(0.01)
        assert process_state(child.pid) == "T"
    finally:
        child.kill()
        child.wait()
    assert process_state(child.pid) is None


def test_watchdog_reports_once_and_stops():
    class Rank:
        def stopped(self):
            return False

    board = ProgressBoard(2)
    verdicts = []
    board.rank(0).enter(STATE_IDLE, 0)
    board.rank(1).enter(STATE_BUSY, 0)
    dog = Watchdog(board, [Rank(), Rank()], Limits(stall_s=0.5), verdicts.append)
    dog.start()
    deadline = time.monotonic() + 10
    while not verdicts and time.monotonic() < deadline:
        board.rank(0).heartbeat()
        time.sleep(0.02)
    dog.stop()
    assert [verdict.rank for verdict in verdicts] == [1]
    assert isinstance(verdicts[0].reason, str)
    assert np.array_equal(board.snapshot()[1], [0, 0, 0, STATE_BUSY])
