"""A process that is ready leaves what it holds out of garbage collections; ranks say when that is."""

from __future__ import annotations

import gc
import threading
from typing import Any

from moewe.runtime.messages import AllocateKV, Compiled, FromWorker, KVAllocated, Loaded, StopWorker, ToWorker, WarmUp
from moewe.runtime.processes.channel import channel_pair
from moewe.runtime.processes.child import freeze_heap
from moewe.runtime.worker_main import run_rank
from moewe.telemetry import ProgressBoard


class Start:
    rank, num_ranks, cpus = 0, 1, ()


class Worker:
    moves = None

    def load(self) -> Loaded:
        return Loaded(rank=0, num_blocks=1, weight_bytes=1, weight_bytes_read=1, pid=1)

    def allocate(self, num_blocks: int) -> None:
        pass

    def warm_up(self) -> KVAllocated:
        return KVAllocated(rank=0, memory_bandwidth=1.0)


def test_what_exists_is_left_out_and_garbage_is_not_kept() -> None:
    before = gc.get_freeze_count()
    cycle: list[object] = []
    cycle.append(cycle)
    del cycle
    try:
        freeze_heap()
        assert gc.get_freeze_count() > before
        assert gc.collect() == 0
    finally:
        gc.unfreeze()


def test_a_rank_is_ready_when_it_is_warm_and_says_so_once() -> None:
    ours, theirs = channel_pair(FromWorker, ToWorker)
    told: list[int] = []
    made: Any = lambda *_: Worker()  # noqa: E731
    start: Any = Start()
    progress = ProgressBoard(1).rank(0)
    rank = threading.Thread(
        target=run_rank, args=(theirs, start, progress, made), kwargs={"on_ready": lambda: told.append(1)}
    )
    rank.start()
    assert isinstance(ours.receive(10), Loaded) and not told
    ours.send(AllocateKV(num_blocks=1))
    assert isinstance(ours.receive(10), Compiled) and not told
    ours.send(WarmUp())
    assert isinstance(ours.receive(10), KVAllocated) and told == [1]
    ours.send(StopWorker())
    rank.join(10)
    assert not rank.is_alive() and told == [1]
    ours.close()
