"""What a GPU counts of itself and NVML tells this process: memory traffic (GPM, Hopper and newer) and energy (Volta).

Not a model (telemetry counts what is touched) and not a profiler: two samples, and what lies between them. Needs the
package nvidia-ml-py; without it, on older GPUs and where the driver refuses, a counter is missing.
Units: bytes, joules, seconds of the monotonic clock.
"""

from __future__ import annotations

import importlib
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

log = logging.getLogger(__name__)
Made = TypeVar("Made")

# NVML asks for at least 100 ms between two samples.
SHORTEST_S = 0.1


class GpmCounter:
    """Adds up what the memory of one GPU moves.

    Args:
        nvml: the module `pynvml`, initialised.
        device: its handle.
        clock: monotonic seconds.

    Raises:
        nvml.NVMLError: the driver refuses.
    """

    def __init__(self, nvml: Any, device: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self._nvml, self._device, self._clock = nvml, device, clock
        self.peak_bytes_per_second = peak_bandwidth(nvml, device)
        self._earlier, self._later = nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()
        nvml.nvmlGpmSampleGet(device, self._earlier)
        self._taken = clock()
        self._works = True

    def take(self) -> float:
        """Return the bytes moved since the last call that returned any; 0 where that was too short a time ago."""
        now = self._clock()
        if not self._works or now - self._taken < SHORTEST_S:
            return 0.0
        nvml = self._nvml
        try:
            nvml.nvmlGpmSampleGet(self._device, self._later)
            asked = nvml.c_nvmlGpmMetricsGet_t()
            asked.version, asked.numMetrics = nvml.NVML_GPM_METRICS_GET_VERSION, 1
            asked.sample1, asked.sample2 = self._earlier, self._later
            asked.metrics[0].metricId = nvml.NVML_GPM_METRIC_DRAM_BW_UTIL  # percent of the theoretical maximum
            nvml.nvmlGpmMetricsGet(asked)
        except nvml.NVMLError as error:
            log.warning("the counter of memory traffic failed and is not asked again: %s", error)
            self._works = False
            return 0.0
        metric = asked.metrics[0]
        if metric.nvmlReturn != nvml.NVML_SUCCESS or not math.isfinite(metric.value):
            return 0.0  # nothing between these two: the next call has this one's time too
        seconds, self._taken = now - self._taken, now
        self._earlier, self._later = self._later, self._earlier
        return float(metric.value) / 100 * self.peak_bytes_per_second * seconds


class EnergyCounter:
    """Adds up what one GPU uses.

    Args:
        nvml: the module `pynvml`, initialised.
        device: its handle.

    Raises:
        nvml.NVMLError: the driver refuses.
    """

    def __init__(self, nvml: Any, device: Any) -> None:
        self._nvml, self._device = nvml, device
        self._last = self._millijoules()

    def take(self) -> float:
        """Return the joules since the last call; 0 where the counter began anew or does not answer now."""
        try:
            now = self._millijoules()
        except self._nvml.NVMLError:
            return 0.0
        gained, self._last = now - self._last, now
        return 1e-3 * max(0, gained)

    def _millijoules(self) -> int:
        return int(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._device))


@dataclass(frozen=True, kw_only=True)
class GpuCounters:
    """What is known of one GPU.

    Attributes:
        uuid: `GPU-...`.
        peak_bytes_per_second: what its memory can move in theory; 0 where the driver does not say.
        memory, energy: None where there is no such counter.
    """

    uuid: str
    peak_bytes_per_second: float = 0.0
    memory: GpmCounter | None = None
    energy: EnergyCounter | None = None


def peak_bandwidth(nvml: Any, device: Any) -> float:
    """Return bytes/s at double data rate: two transfers a clock, of as many bits as the bus is wide."""
    megahertz = nvml.nvmlDeviceGetMaxClockInfo(device, nvml.NVML_CLOCK_MEM)
    return float(2e6 * megahertz * nvml.nvmlDeviceGetMemoryBusWidth(device) / 8)


def open_counters(uuid: str) -> GpuCounters:
    """Return the counters of the GPU with this UUID (`GPU-...`), as far as there are any."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return GpuCounters(uuid=uuid)
    try:
        nvml.nvmlInit()
        device = nvml.nvmlDeviceGetHandleByUUID(uuid)
    except nvml.NVMLError as error:
        log.debug("no counters of %s: %s", uuid, error)
        return GpuCounters(uuid=uuid)

    def memory() -> GpmCounter | None:
        supported = nvml.nvmlGpmQueryDeviceSupport(device).isSupportedDevice
        return GpmCounter(nvml, device) if supported else None

    return GpuCounters(
        uuid=uuid,
        peak_bytes_per_second=_unless_refused(nvml, lambda: peak_bandwidth(nvml, device)) or 0.0,
        memory=_unless_refused(nvml, memory),
        energy=_unless_refused(nvml, lambda: EnergyCounter(nvml, device)),
    )


def _unless_refused(nvml: Any, make: Callable[[], Made | None]) -> Made | None:
    try:
        return make()
    except nvml.NVMLError as error:
        log.debug("a counter is missing: %s", error)
        return None
