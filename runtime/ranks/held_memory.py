"""What a rank holds in memory, by part: the memory view of telemetry.

Not a budget (topologies/budget.py) and not an allocation: it looks at what is there. Units: bytes, seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ...attention.tensor_parallel_metered import MeteredGroup
from ...kvcache.storage import KVStorage
from ...moe.wide_ep.exchanges import Exchange
from ...telemetry import resident_of
from .batch import WorkerBatch

_OTHER_EVERY_S = 5.0
_MOST_SHARE = 1e-3  # of the time that looking at resident memory may take


class HeldMemory:
    """Looks at the memory of one rank.

    Args:
        weight_bytes: exact bytes of its weights.
        storage: its KV.
        batch: says what KV is in use.
        exchange: of experts.
        ranks: with which it divides heads; None where it has them all.
        resident: bytes that its process, or its GPU, holds in all; None when that is not known.
        clock: monotonic seconds.

    Attributes:
        graph_bytes: what CUDA graphs took when they were captured.
    """

    def __init__(
        self,
        weight_bytes: int,
        storage: KVStorage,
        batch: WorkerBatch,
        exchange: Exchange,
        ranks: MeteredGroup | None,
        *,
        resident: Callable[[], int | None] = resident_of,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._weights, self._storage, self._batch = weight_bytes, storage, batch
        self._exchange, self._ranks, self._resident, self._clock = exchange, ranks, resident, clock
        self._block_bytes = [storage.block_bytes(group) for group in range(len(storage.num_blocks))]
        self._look_again = float("-inf")
        self._other = self.graph_bytes = 0

    def parts(self) -> tuple[int, ...]:
        """Return the bytes of each of telemetry.MEMORY_PARTS; `other` may be some seconds old.

        The three of KV sum to the pool, of which pages that were never written take no memory yet; `other` is what is
        resident beside the weights, the pages of the pool that are there, and rows on their way.
        """
        pool = self._storage.num_bytes
        granted = used = 0
        for group, block_bytes in enumerate(self._block_bytes):
            blocks, tokens = self._batch.kv_in_use(group)
            granted += blocks * block_bytes
            used += tokens * block_bytes // self._batch.block_size
        exchange = self._exchange.buffer_bytes + (0 if self._ranks is None else self._ranks.buffer_bytes)
        self._look(exchange)
        free = pool - granted
        return self._weights, used, granted - used, free, exchange, self.graph_bytes, self._other

    def _look(self, exchange: int) -> None:
        began = self._clock()
        if began < self._look_again:
            return
        resident = self._resident()
        known = self._weights + self._storage.resident_bytes() + exchange + self.graph_bytes
        self._other = 0 if resident is None else max(0, resident - known)
        now = self._clock()
        self._look_again = now + max(_OTHER_EVERY_S, (now - began) / _MOST_SHARE)
