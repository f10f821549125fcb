"""The counter of a GPU's memory traffic, where it has one: NVML's GPM, read in this process (Hopper and newer).

Not a model (telemetry counts what is touched) and not a profiler: two samples, and what lies between them. Needs the
package nvidia-ml-py; without it, on older GPUs and where the driver refuses, there is no counter.
Units: bytes, seconds of the monotonic clock.
"""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)

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
        # Double data rate: two transfers a clock, of as many bits as the bus is wide.
        megahertz = nvml.nvmlDeviceGetMaxClockInfo(device, nvml.NVML_CLOCK_MEM)
        self.peak_bytes_per_second: float = 2e6 * megahertz * nvml.nvmlDeviceGetMemoryBusWidth(device) / 8
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
        seconds, self._taken = now - self._taken, now
        self._earlier, self._later = self._later, self._earlier
        return float(asked.metrics[0].value) / 100 * self.peak_bytes_per_second * seconds


def open_counter(uuid: str) -> GpmCounter | None:
    """Return the counter of the GPU with this UUID (`GPU-...`), None where there is none."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
        device = nvml.nvmlDeviceGetHandleByUUID(uuid)
        if not nvml.nvmlGpmQueryDeviceSupport(device).isSupportedDevice:
            return None
        return GpmCounter(nvml, device)
    except nvml.NVMLError as error:
        log.debug("no counter of memory traffic: %s", error)
        return None
