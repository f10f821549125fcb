"""When an engine tells its client how it stands, and what it says: the `Stats` message, which is its heartbeat too.

Not metrics (runtime/metrics/export.py) and not the counters' encoding (runtime/metrics/stats.py).
Units: seconds. Once when the engine is ready (so that no gauge is missing when requests are taken), then at most twice
a second while busy, once when it falls idle, and each second in any case.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from .engine import Engine
from .messages import Stats, ToEngine
from .metrics.stats import rank_stats
from .processes.channel import Channel
from .processes.workers import Workers

BUSY_EVERY_S = 0.5
IDLE_EVERY_S = 1.0


class StatsReporter:
    """Sends `Stats` when one is due.

    Args:
        client: who is told; while it has not read the last ones it gets no more.
        workers: keep the newest counters of each rank.
        clock: monotonic seconds.

    Attributes:
        cache_resident: the weights of all ranks fit the host's last-level cache, so memory may not be read at all; or a
            ceiling was measured in a cache.
    """

    def __init__(
        self, client: Channel[ToEngine], workers: Workers, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.cache_resident = False
        self._client = client
        self._workers = workers
        self._clock = clock
        self._last = float("-inf")
        self._was_busy = False
        self._was_ready = False

    def report(self, engine: Engine | None) -> None:
        """Send statistics if they are due; `engine` is None before it is ready."""
        busy = engine is not None and engine.has_work
        due = self._last + (BUSY_EVERY_S if busy else IDLE_EVERY_S)
        fell_idle = self._was_busy and not busy
        became_ready = engine is not None and not self._was_ready
        now = self._clock()
        self._was_busy |= busy
        if not became_ready and ((now < due and not fell_idle) or self._client.pending_bytes):
            return
        self._last, self._was_busy, self._was_ready = now, busy, engine is not None
        self._client.post(self._stats(engine))

    def _stats(self, engine: Engine | None) -> Stats:
        if engine is None:
            return Stats(num_running=0, num_waiting=0, num_preemptions=0, num_steps=0)
        figures = engine.scheduler
        atp = self._workers.atp  # ranks of an attention replica hold the same requests, in blocks of the same numbers
        blocks, running = figures.fullest_groups, figures.running_per_rank
        return Stats(
            num_running=figures.num_running,
            num_waiting=figures.num_waiting,
            num_preemptions=figures.num_preemptions,
            num_steps=engine.num_steps,
            num_prompt_tokens=engine.num_prompt_tokens,
            ranks=tuple(
                rank_stats(
                    rank,
                    counters,
                    used_blocks=blocks[rank // atp][0],
                    total_blocks=blocks[rank // atp][1],
                    cache_resident=self.cache_resident,
                )
                for rank, counters in enumerate(self._workers.counters)
            ),
            running_per_rank=tuple(number for number in running for _ in range(atp)),
            step_tokens=tuple(engine.step_tokens.counts),
            num_step_tokens=int(engine.step_tokens.total),
            balance=None if engine.balancer is None else engine.balancer.stats(),
        )
