"""NVML without a driver: as much of the module `pynvml` as the inventory asks, with GPUs that a test describes.

Not the counters' fake (tests/native/test_gpu_counters.py), which has samples of one GPU.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

from moewe.native.gpu_inventory import FabricInfo


@dataclass(frozen=True, kw_only=True)
class FakeGpu:
    """One GPU: `nvlinks` remote types, `domain` of GPUs it reaches by NVLink, `refuses` names of functions."""

    memory: tuple[int, int] = (141 << 30, 41 << 30)
    reasons: int = 0
    gpm: int = 1
    nvlinks: tuple[int, ...] = (2,) * 18
    domain: int = 0
    fabric_state: int = 3
    refuses: tuple[str, ...] = ()


class FakeGpus(ModuleType):
    """The module."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM = 1, 2
    NVML_P2P_CAPS_INDEX_READ = (0,)  # as in the package, which has a comma too many

    class NVMLError(Exception):
        """As of NVML."""

    def __init__(self, *gpus: FakeGpu, starts: bool = True) -> None:
        super().__init__("pynvml")
        self.gpus, self._starts, self.initialised = gpus, starts, 0

    def nvmlInit(self) -> None:
        if not self._starts:
            raise self.NVMLError("Driver Not Loaded")
        self.initialised += 1

    def nvmlShutdown(self) -> None:
        self.initialised -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        return "570.86.15"

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return 12080

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        return self.gpus[index]

    def _ask(self, gpu: FakeGpu, name: str) -> FakeGpu:
        assert self.initialised == 1
        if name in gpu.refuses:
            raise self.NVMLError("Not Supported")
        return gpu

    def nvmlDeviceGetName(self, gpu: FakeGpu) -> str:
        return self._ask(gpu, "name") and "NVIDIA H200"

    def nvmlDeviceGetUUID(self, gpu: FakeGpu) -> str:
        return self._ask(gpu, "uuid") and "GPU-1"

    def nvmlDeviceGetMemoryInfo(self, gpu: FakeGpu) -> Any:
        return SimpleNamespace(total=self._ask(gpu, "memory").memory[0], used=gpu.memory[1])

    def nvmlDeviceGetClockInfo(self, gpu: FakeGpu, kind: int) -> int:
        return self._ask(gpu, "clocks") and {1: 345, 2: 3201}[kind]

    def nvmlDeviceGetMaxClockInfo(self, gpu: FakeGpu, kind: int) -> int:
        return {1: 1980, 2: 3201}[kind]

    def nvmlDeviceGetCurrentClocksEventReasons(self, gpu: FakeGpu) -> int:
        return self._ask(gpu, "reasons").reasons

    def nvmlGpmQueryDeviceSupport(self, gpu: FakeGpu) -> Any:
        return SimpleNamespace(isSupportedDevice=self._ask(gpu, "gpm").gpm)

    def nvmlDeviceGetNvLinkState(self, gpu: FakeGpu, link: int) -> int:
        if link >= len(gpu.nvlinks):
            raise self.NVMLError("Invalid Argument")
        return int(gpu.nvlinks[link] >= 0)

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, gpu: FakeGpu, link: int) -> int:
        return gpu.nvlinks[link]

    def nvmlDeviceGetGpuFabricInfo(self, gpu: FakeGpu, found: Any) -> None:
        info = ctypes.cast(found, ctypes.POINTER(FabricInfo)).contents
        info.state, info.cliqueId = self._ask(gpu, "fabric").fabric_state, 7
        info.clusterUuid[1] = 0xAB  # behind a zero byte, at which text would end

    def nvmlDeviceGetP2PStatus(self, reader: FakeGpu, other: FakeGpu, index: int) -> int:
        self._ask(reader, "p2p")
        assert type(index) is int, "ctypes takes no tuple"
        if index == 2:  # NVML_P2P_CAPS_INDEX_NVLINK
            return 0 if reader.domain == other.domain else 4
        return 0 if other.memory[0] else 1
