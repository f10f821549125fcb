"""When a rank tells its counters: every quarter second, when nothing runs any more, and where a plan asks.

Not the counters (telemetry.RankCounters) and not their encoding (runtime/metrics/stats.py). Units: seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ..native.gpu_counters import GpuCounters
from ..telemetry import RankCounters
from .metrics.stats import encode_counters
from .ranks.held_memory import HeldMemory

EVERY_S = 0.25


class CounterReports:
    """Encodes the counters of one rank when they are due.

    Args:
        counters: of the rank.
        clock: monotonic seconds.

    Attributes:
        held: what the rank holds in memory; None before it is allocated.
        gpu: counters of the hardware; None on a CPU.
    """

    def __init__(self, counters: RankCounters, clock: Callable[[], float] = time.monotonic) -> None:
        self._counters, self._clock = counters, clock
        self._sent = 0.0
        self._due = False
        self.held: HeldMemory | None = None
        self.gpu: GpuCounters | None = None

    def after_step(self, *, goes_on: bool, at_once: bool) -> bytes:
        """Return the counters if they are due: in time, where nothing `goes_on`, or `at_once`; else nothing."""
        self._due = True
        if not at_once and self._clock() - self._sent < EVERY_S and goes_on:
            return b""
        return self._encoded()

    def late(self) -> bytes:
        """Return the counters when some of them have not gone out with a result; else nothing."""
        return self._encoded() if self._due else b""

    def forget(self) -> None:
        """Nothing is due: the counters began anew."""
        self._due = False

    def forget_gpu(self) -> None:
        """What the GPU has done until now was for no step."""
        self._take_gpu()

    def _take_gpu(self) -> tuple[float, float]:
        """Return bytes and joules since the last call, 0 without a counter."""
        memory, energy = (None, None) if self.gpu is None else (self.gpu.memory, self.gpu.energy)
        return 0.0 if memory is None else memory.take(), 0.0 if energy is None else energy.take()

    def _encoded(self) -> bytes:
        self._sent, self._due = self._clock(), False
        moved, joules = self._take_gpu()
        self._counters.measured_bytes += moved
        self._counters.joules += joules
        return encode_counters(self._counters, self.held.parts() if self.held is not None else ())
