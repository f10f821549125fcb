"""A rank without a model: every token is followed by the next id. It books plans exactly as a real worker does.

Not a mock of the worker's inside: the same `WorkerBatch`, no torch. Run as a module it is a worker process; the
environment variable FAKE_WORKER then says what goes wrong, e.g. `rank=1,step=3,do=raise`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from moewe.runtime.messages import KVAllocated, Loaded, ToWorker
from moewe.runtime.metrics.stats import encode_counters
from moewe.runtime.plan import RankPlan, RankResult, StepHeader, pack
from moewe.runtime.processes.channel import Channel
from moewe.runtime.processes.child import enter_child, log_as
from moewe.runtime.processes.launch import WorkerStart, board_path
from moewe.runtime.ranks.batch import WorkerBatch
from moewe.runtime.worker_main import run_rank
from moewe.telemetry import ProgressBoard, RankCounters, RankProgress
from moewe.topologies.link_probes import EXCHANGE, EXPERTS, LinkProbe, RankFound

VOCAB_SIZE = 1000
LOADING, COMPILING, WARMING_UP = -1, -2, -3
MODULE = "tests.support.fake_worker"


@dataclass
class Trouble:
    """What goes wrong on one rank: at `step` it does `do`; LOADING, COMPILING and WARMING_UP are steps, too.

    With `others_wait` all other ranks wait in that step for ever, as in a collective.
    """

    rank: int = -1
    step: int = 0
    do: str = "raise"
    delay_s: float = 0.0
    others_wait: bool = False
    ranks: list[int] = field(default_factory=list)

    @classmethod
    def parse(cls, text: str) -> Trouble:
        values = dict(part.split("=") for part in text.split(",") if part)
        return cls(
            rank=int(values.get("rank", -1)),
            step=int(values.get("step", 0)),
            do=values.get("do", "raise"),
            delay_s=float(values.get("delay", 0)),
            others_wait="others_wait" in values,
        )

    def strike(self, rank: int, step: int) -> None:
        if step != self.step:
            return
        if rank != self.rank:
            time.sleep(3600 if self.others_wait else 0)
            return
        if self.do == "raise":
            raise RuntimeError("the fake worker broke")
        if self.do == "value_error":
            raise ValueError("shard=7 is missing; fetch the checkpoint again")
        if self.do == "exit":
            os._exit(9)
        if self.do == "nap":
            time.sleep(1.0)
        if self.do == "hang":
            time.sleep(3600)


class FakeWorker:
    moves = None

    def __init__(self, start: WorkerStart, progress: RankProgress, trouble: Trouble) -> None:
        self._start, self._progress, self._trouble = start, progress, trouble
        self._counters = RankCounters(2, 4)
        self.steps: list[StepHeader] = []

    def load(self) -> Loaded:
        self._trouble.strike(self._start.rank, LOADING)
        return Loaded(
            rank=self._start.rank,
            num_blocks=self._start.config.cache.num_blocks or 64,
            weight_bytes=1000,
            weight_bytes_read=1000,
            pid=os.getpid(),
        )

    def allocate(self, num_blocks: int) -> None:
        self._trouble.strike(self._start.rank, COMPILING)
        schedule, cache = self._start.config.schedule, self._start.config.cache
        self._batch = WorkerBatch(
            num_slots=schedule.max_num_seqs,
            max_model_len=num_blocks * cache.block_size + 1,
            block_size=cache.block_size,
        )

    def warm_up(self) -> KVAllocated:
        self._trouble.strike(self._start.rank, WARMING_UP)
        return KVAllocated(rank=self._start.rank, memory_bandwidth=1e9, cache_resident=False)

    def probe(self, probe: LinkProbe) -> RankFound:
        seconds = {name: (1e-3,) * probe.repeats for name in (EXCHANGE, EXPERTS, *probe.overlaps)}
        return RankFound(seconds=seconds, near_bytes=1e3 * probe.rows, expert_bytes=1e6, expert_flops=1e6 * probe.rows)

    def run(self, header: StepHeader, plan: RankPlan, before_layers: Callable[[], None] | None = None) -> RankResult:
        if before_layers is not None:
            before_layers()
        self._trouble.strike(self._start.rank, header.step)
        time.sleep(self._trouble.delay_s)
        self.steps.append(header)
        self._progress.tick()
        self._batch.apply(plan, snapshot=header.snapshot)
        rows = self._batch.rows(plan.chunks, plan.held)
        self._counters.begin_step(header.kind, rows.num_rows)
        tokens = (rows.input_ids[rows.sample_rows] + 1) % VOCAB_SIZE
        flags = self._batch.commit(rows, tokens, np.ones(self._batch.num_slots, np.bool_)).flags
        self._batch.check_invariants()
        return RankResult(
            step=header.step,
            slots=pack(rows.sample_slots),
            sequence_ids=pack(self._batch.sequence_ids[rows.sample_slots], "<i8"),
            tokens=pack(tokens),
            flags=pack(flags, "u1"),
            num_rows=rows.num_rows,
            counters=encode_counters(self._counters),
        )

    def late_counters(self) -> bytes:
        return b""


def factory(trouble: Trouble | None = None, made: list[FakeWorker] | None = None) -> Callable[..., FakeWorker]:
    """Return what `GroupParts.make_worker` wants; workers that it makes are appended to `made`."""

    def make(start: WorkerStart, progress: RankProgress, on_loading: object, hub: object) -> FakeWorker:
        worker = FakeWorker(start, progress, trouble or Trouble())
        if made is not None:
            made.append(worker)
        return worker

    return make


def main() -> None:
    channel: Channel = enter_child(WorkerStart | ToWorker)
    start = channel.receive()
    log_as(start.label)
    progress = ProgressBoard(start.num_ranks, board_path(Path(start.run_directory))).rank(start.rank)
    fine = run_rank(channel, start, progress, factory(Trouble.parse(os.environ.get("FAKE_WORKER", ""))))
    sys.stderr.flush()
    os._exit(0 if fine else 1)


if __name__ == "__main__":
    main()
