"""What a DCGM exporter says of GPUs, and what follows from it for ranks: bytes that memory really moved, and joules.

Not a connection (server/http/exporter_watch.py) and not NVML in the rank itself (native/gpu_counters.py), which goes
first where it answers. What an exporter says is not trusted. DCGM_FI_PROF_DRAM_ACTIVE is the share of cycles in which
memory moved data, over the exporter's last interval (NVIDIA's DCGM field documentation); times the peak of that memory
and the time between two looks it is bytes.
Units: bytes, joules, seconds of the monotonic clock.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...telemetry import WrappingCounter
from ..rank_stats import Gpu

DRAM_ACTIVE, ENERGY = "DCGM_FI_PROF_DRAM_ACTIVE", "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION"
_SAMPLE = re.compile(rf"({DRAM_ACTIVE}|{ENERGY})\{{((?:[^\"}}]|\"(?:[^\"\\]|\\.)*\")*)\}}\s+(\S{{1,32}})")
_LABEL = re.compile(r'(\w{1,64})="((?:[^"\\]|\\.)*)"')
_UUID = re.compile(r"GPU-[0-9a-fA-F-]{1,64}")
_MOST_GPUS, _LONGEST_LINE = 256, 4096
_MOST_ACTIVE = 1.0 + 1e-3
_MOST_MILLIJOULES = 1 << 63
MOST_GAP_S = 90.0  # between two looks; what happened in a longer one nobody knows
WINDOW_S = 90.0


@dataclass(frozen=True)
class GpuReading:
    """Of one GPU: the share of time in which its memory moved data, and millijoules since its driver began."""

    dram_active: float | None = None
    millijoules: int | None = None


def read_exporter(text: str) -> dict[str, GpuReading]:
    """Return the readings in an exporter's answer, by UUID; lines that are not understood are left out.

    Instances of a divided GPU (MIG) are left out: their share is not one of the whole memory.
    """
    found: dict[str, GpuReading] = {}
    for line in text.splitlines():
        sample = _SAMPLE.match(line) if len(line) <= _LONGEST_LINE else None
        if sample is None:
            continue
        name, labels, number = sample[1], dict(_LABEL.findall(sample[2])), _value(sample[3])
        uuid = labels.get("UUID", "")
        if number is None or "GPU_I_ID" in labels or not _UUID.fullmatch(uuid):
            continue
        if uuid not in found and len(found) >= _MOST_GPUS:
            continue
        known = found.get(uuid, GpuReading())
        if name == DRAM_ACTIVE and number <= _MOST_ACTIVE:
            found[uuid] = GpuReading(number, known.millijoules)
        elif name == ENERGY and number < _MOST_MILLIJOULES:
            found[uuid] = GpuReading(known.dram_active, int(number))
    return found


def _value(text: str) -> float | None:
    """Return a number that is finite and not below 0."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if 0.0 <= number < float("inf") else None


@dataclass
class _RankSums:
    """Of one rank, while the exporter was heard: bytes that it counted, bytes that its GPU moved."""

    counted: float = 0.0
    measured: float = 0.0


class ExporterCounts:
    """Adds up what an exporter says of the GPUs of one replica, beside what its ranks counted in the same time.

    Args:
        gpus: of its ranks.
    """

    def __init__(self, gpus: Sequence[Gpu]) -> None:
        self._gpus = tuple(gpus)
        self._sums = [_RankSums() for _ in gpus]
        self._energy = [WrappingCounter() for _ in gpus]
        self._last: tuple[float, list[float]] | None = None
        # (time, counted and measured bytes of each rank), the first from about a window ago.
        self._past: deque[tuple[float, list[tuple[float, float]]]] = deque()

    def knows(self, readings: Mapping[str, GpuReading]) -> bool:
        """Tell whether any of our GPUs is among `readings`."""
        return any(gpu.uuid in readings for gpu in self._gpus)

    def observe(self, readings: Mapping[str, GpuReading], counted: Sequence[float], now: float) -> None:
        """Take what the exporter says.

        Args:
            readings: by UUID.
            counted: bytes of weights and KV that each rank has counted until now; fewer where some have not yet.
            now: monotonic seconds.
        """
        before, self._last = self._last, (now, list(counted))
        for i, gpu in enumerate(self._gpus):
            reading = readings.get(gpu.uuid, GpuReading())
            if reading.millijoules is not None:
                self._energy[i].read(reading.millijoules)
            if before is None or i >= len(counted) or i >= len(before[1]) or reading.dram_active is None:
                continue
            seconds, gained = now - before[0], counted[i] - before[1][i]
            if seconds <= MOST_GAP_S and gained >= 0:
                self._sums[i].counted += gained
                self._sums[i].measured += reading.dram_active * gpu.peak_bytes_per_second * seconds
        self._past.append((now, [(sums.counted, sums.measured) for sums in self._sums]))
        while len(self._past) > 2 and now - self._past[1][0] >= WINDOW_S:
            self._past.popleft()

    def measured_bytes(self, i: int) -> float:
        """Return what the memory of rank `i` moved while the exporter was heard; 0 where it says nothing of it."""
        return self._sums[i].measured if i < len(self._sums) else 0.0

    def model_error(self, i: int) -> float:
        """Return counted over measured bytes of rank `i`, less 1, in the window; 0 where nothing moved."""
        if not self._past:
            return 0.0
        (_, first), (_, last) = self._past[0], self._past[-1]
        counted, measured = (now - then for now, then in zip(last[i], first[i], strict=True))
        return counted / measured - 1 if measured > 0 else 0.0

    def joules(self, i: int) -> float:
        """Return what the GPU of rank `i` has used since it was first heard of; 0 where nothing was."""
        return 1e-3 * self._energy[i].total if i < len(self._energy) else 0.0
