"""What a rank says it holds in memory: exact where it is known, the rest of its process, looked at now and then."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moewe.runtime.metrics.stats import rank_stats
from moewe.runtime.ranks.batch import WorkerBatch
from moewe.runtime.ranks.held_memory import HeldMemory
from moewe.runtime.ranks.memory import resident_on
from moewe.telemetry import MEMORY_PARTS
from tests.support.fixtures import checkpoint, random_prompt
from tests.support.harness import Group, greedy
from tests.support.setups import Setup


class Clock:
    def __init__(self) -> None:
        self.now, self.a_look_takes = 100.0, 0.0

    def __call__(self) -> float:
        return self.now


def storage(clock: Clock, **more: Any) -> Any:
    """A pool of two groups, 8 blocks of 100 bytes and 4 of 40, of which 500 bytes are in memory."""

    def resident_bytes() -> int:
        clock.now += clock.a_look_takes
        return 500

    sizes = {"block_bytes": lambda group: (100, 40)[group], "num_blocks": (8, 4), "num_bytes": 960}
    return SimpleNamespace(resident_bytes=resident_bytes, **sizes | more)


def held(clock: Clock, resident: list[int | None]) -> HeldMemory:
    batch = WorkerBatch(num_slots=2, max_model_len=64, block_size=4, groups=(("full", 0), ("window", 4)))
    batch.end_block[:, 0] = (3, 3)
    batch.num_computed_tokens[0] = 9
    batch.first_block[1, 0] = 1
    parts: Any = {"exchange": SimpleNamespace(buffer_bytes=30), "ranks": SimpleNamespace(buffer_bytes=3)}
    memory = HeldMemory(2_000, storage(clock), batch, **parts, resident=lambda: resident[0], clock=clock)
    memory.graph_bytes = 50
    return memory


def test_parts_are_what_is_known_and_the_rest() -> None:
    parts = dict(zip(MEMORY_PARTS, held(Clock(), [3_000]).parts(), strict=True))
    # Of the full group 3 blocks with 9 of 12 tokens, of the window 2 with 5 of 8.
    assert parts == {
        "weights": 2_000, "kv_used": 225 + 50, "kv_reserved": 380 - 275, "kv_free": 960 - 380, "exchange": 33,
        "graphs": 50, "other": 3_000 - 2_000 - 500 - 33 - 50,
    }  # fmt: skip


@pytest.mark.parametrize("resident", [None, 100])
def test_the_rest_is_never_below_nothing(resident: int | None) -> None:
    assert held(Clock(), [resident]).parts()[-1] == 0


def test_the_rest_is_looked_at_now_and_then() -> None:
    clock, resident = Clock(), [3_000]
    memory = held(clock, resident)  # type: ignore[arg-type]
    assert memory.parts()[-1] == 417
    resident[0] = 4_000
    clock.now += 4.9
    assert memory.parts()[-1] == 417
    clock.now += 0.2
    clock.a_look_takes = 0.05  # a large pool: a thousandth of the time is then 50 s
    assert memory.parts()[-1] == 1_417
    resident[0] = 5_000
    clock.now += 49.0
    assert memory.parts()[-1] == 1_417
    clock.now += 1.1
    assert memory.parts()[-1] == 2_417


def test_a_rank_sends_it_with_its_counters() -> None:
    with Group(checkpoint("T-MIX"), Setup()) as group:
        worker = group.workers[0]
        group.submit("a", random_prompt(10), greedy(60))
        for _ in range(5):
            group.step()
        sent = rank_stats(0, worker.late_counters() or worker._reports._encoded(), used_blocks=0, total_blocks=1)
        parts = dict(zip(MEMORY_PARTS, sent.memory, strict=True))
        assert parts["weights"] == group.loaded[0].weight_bytes
        pool = worker.storage.num_bytes
        assert parts["kv_used"] + parts["kv_reserved"] + parts["kv_free"] == pool
        tokens = int(worker.batch.num_computed_tokens.sum())
        assert tokens >= 10
        assert parts["kv_used"] == pool // worker.storage.num_blocks[0] * tokens // worker.config.cache.block_size
        assert parts["exchange"] == parts["graphs"] == 0 and parts["other"] > 1 << 20, "Python and torch at least"
        group.run()


def test_a_process_on_a_cpu_holds_what_the_kernel_says() -> None:
    resident = resident_on(torch.device("cpu"))
    assert resident is not None and resident > 1 << 20
