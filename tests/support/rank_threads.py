"""A worker in a thread of its own: calls go in, results come out in order, an error breaks the whole group.

Not a launcher (runtime/processes/launch.py): no channel, no supervision, for tests that want to look inside.
Units: seconds. A step's result comes with the rows that reached this rank's experts so far, [L_moe] i64.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Sequence
from typing import Any

from moewe.models.config import ModelConfig
from moewe.moe.wide_ep import ShmExchange, ShmShape
from moewe.moe.wide_ep.exchanges.threads import ThreadHub
from moewe.moe.wide_ep.placement import ExpertPlacement
from moewe.quant import parse_format
from moewe.runtime.worker import Worker
from moewe.topologies.host_memory import create_memory
from tests.support.setups import Setup

STEP_TIMEOUT_S = 120


class RankThread:
    """A worker in a thread of its own: calls go in, results come out in order."""

    def __init__(self, worker: Worker, hub: ThreadHub | None) -> None:
        self.worker = worker
        self._hub = hub
        self._calls: queue.Queue[tuple[str, tuple[Any, ...]] | None] = queue.Queue()
        self._results: queue.Queue[Any] = queue.Queue()
        self._thread = threading.Thread(target=self._loop, daemon=True, name=f"rank {worker.rank}")
        self._thread.start()

    def call(self, name: str, *args: Any) -> None:
        self._calls.put((name, args))

    def result(self) -> Any:
        """Return the oldest result, or the exception instead of it."""
        return self._results.get(timeout=STEP_TIMEOUT_S)

    def close(self) -> None:
        self._calls.put(None)
        self._thread.join(STEP_TIMEOUT_S)

    def _loop(self) -> None:
        while (call := self._calls.get()) is not None:
            name, args = call
            try:
                value = getattr(self.worker, name)(*args)
                if name == "run":
                    value = (value, self.worker.counters.expert_tokens.sum(1))
                self._results.put(value)
            except Exception as error:
                if self._hub is not None:
                    self._hub.abort(f"rank {self.worker.rank}: {error}")
                self._results.put(error)


class GroupMemory:
    """Memory for the exchange `shm`, which serves ranks that are threads as those that are processes."""

    def __init__(self, setup: Setup, model: ModelConfig, placement: ExpertPlacement) -> None:
        assert model.moe is not None, "a model without experts exchanges nothing"
        self._shape = ShmShape(
            slot_ranges=placement.slot_ranges,
            capacity=setup.max_num_batched_tokens,
            top_k=model.moe.routing.top_k,
            width=model.hidden_size,
            dtype=parse_format(model.dtype if setup.dtype == "auto" else setup.dtype).torch_dtype,
        )
        self._fd = create_memory("exchange", self._shape.offsets()[-1])

    def rank(self, rank: int) -> ShmExchange:
        """Return what the thread of a rank uses."""
        return ShmExchange(self._fd, self._shape, rank)

    def close(self) -> None:
        os.close(self._fd)


def results_of(ranks: Sequence[RankThread]) -> list[Any]:
    """Return one result of each rank; raise the error of the rank that failed first, not of those that lost it."""
    results = [rank.result() for rank in ranks]
    errors = [result for result in results if isinstance(result, Exception)]
    if errors:
        raise min(errors, key=lambda error: isinstance(error, RuntimeError))
    return results
