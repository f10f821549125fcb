"""An engine whose ranks have no model: the token at a position is fixed, and a step takes as long as it is told to.

Everything else is real: scheduler, books, plans, detokeniser, messages. Started by benchmarks/server_overhead.py in
place of the engine's own module. Not a test double: tests/support has those.
Units: seconds of the monotonic clock, which all processes of a machine share. Shapes: [requests, positions] f64 stamps.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from moewe.runtime.engine_main import run_engine
from moewe.runtime.messages import KVAllocated, Loaded, ToEngine
from moewe.runtime.plan import RankPlan, RankResult, StepHeader, pack
from moewe.runtime.processes.channel import Channel
from moewe.runtime.processes.child import enter_child, freeze_heap, log_as
from moewe.runtime.processes.group import GroupParts
from moewe.runtime.processes.launch import EngineStart, WorkerStart
from moewe.runtime.prompts import model_tokenizer
from moewe.runtime.ranks.batch import WorkerBatch
from moewe.telemetry import RankProgress
from moewe.text import Tokenizer

# In the environment of the server: seconds of a step, and the file into which moments of tokens are written.
STEP_VARIABLE, STAMPS_VARIABLE, SHAPE_VARIABLE = "NULL_STEP_S", "NULL_STAMPS", "NULL_STAMPS_SHAPE"
NUM_BLOCKS = 4096


def spoken_ids(tokenizer: Tokenizer) -> list[int]:
    """Return the ids that a null model says in a circle: 97 words of ASCII, which no JSON needs to escape."""
    found: list[int] = []
    for token_id in range(300, 10_000):
        data = tokenizer.token_bytes(token_id)
        if token_id not in tokenizer.special_ids and data.strip().isalpha() and data.isascii():
            found.append(token_id)
        if len(found) == 97:
            return found
    raise ValueError("the tokenizer has too few plain words for this benchmark")


def spoken_text(tokenizer: Tokenizer, start: int, count: int) -> str:
    """Return what a null model says at positions [start, start + count)."""
    ids = spoken_ids(tokenizer)
    said = [ids[position % len(ids)] for position in range(start, start + count)]
    return b"".join(map(tokenizer.token_bytes, said)).decode()


class NullWorker:
    """One rank."""

    def __init__(self, start: WorkerStart, progress: RankProgress, *_: Any) -> None:
        self._start, self._progress = start, progress
        self._step_s = float(os.environ[STEP_VARIABLE])
        rows, columns = map(int, os.environ[SHAPE_VARIABLE].split("x"))
        self._stamps = np.memmap(os.environ[STAMPS_VARIABLE], np.float64, "r+", shape=(rows, columns))
        self._due = 0.0

    def load(self) -> Loaded:
        """Learn the words."""
        tokenizer = model_tokenizer(self._start.config.model)
        assert tokenizer is not None
        self._words = np.array(spoken_ids(tokenizer), np.int64)
        return Loaded(
            rank=self._start.rank, num_blocks=NUM_BLOCKS, weight_bytes=1, weight_bytes_read=1, pid=os.getpid()
        )

    def allocate(self, num_blocks: int) -> None:
        """Take blocks that hold nothing."""
        config = self._start.config
        self._batch = WorkerBatch(
            num_slots=config.schedule.max_num_seqs,
            max_model_len=num_blocks * config.cache.block_size,
            block_size=config.cache.block_size,
        )
        self._request_of = np.zeros(config.schedule.max_num_seqs, np.int64)

    def warm_up(self) -> KVAllocated:
        """Be warm."""
        return KVAllocated(rank=self._start.rank, memory_bandwidth=1e9)

    def run(self, header: StepHeader, plan: RankPlan, before_layers: Callable[[], None] | None = None) -> RankResult:
        """Say the next word of every sequence once the step has lasted as long as it must."""
        self._progress.tick()
        for admission in plan.admitted:
            self._request_of[admission.slot] = admission.sampling.seed % len(self._stamps)
        self._batch.apply(plan, snapshot=header.snapshot)
        rows = self._batch.rows(plan.chunks, plan.held)
        places = rows.positions[rows.sample_rows] + 1
        tokens = self._words[places % len(self._words)]
        if before_layers is not None:
            before_layers()
        flags = self._batch.commit(rows, tokens).flags
        if self._step_s:
            time.sleep(max(0.0, self._due - time.monotonic()))
            self._due = time.monotonic() + self._step_s
        kept = places < self._stamps.shape[1]
        self._stamps[self._request_of[rows.sample_slots][kept], places[kept]] = time.monotonic()
        return RankResult(
            step=header.step,
            slots=pack(rows.sample_slots),
            sequence_ids=pack(self._batch.sequence_ids[rows.sample_slots], "<i8"),
            tokens=pack(tokens),
            flags=pack(flags, "u1") if flags.any() else b"",
            num_rows=rows.num_rows,
        )

    @property
    def moves(self) -> None:
        """Experts stay."""
        return None

    def late_counters(self) -> bytes:
        """Nothing is counted."""
        return b""


def main() -> None:
    """Be an engine process."""
    client: Channel[Any] = enter_child(EngineStart | ToEngine)
    start = client.receive()
    assert isinstance(start, EngineStart)
    log_as("null engine")
    code = run_engine(client, start, GroupParts(make_worker=NullWorker), freeze_heap)
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
