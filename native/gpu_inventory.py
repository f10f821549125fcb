"""What NVML says of the GPUs of this host: memory, clocks, what slows them down, counters, and how they are linked.

Not a measurement and not what torch sees (runtime/gpus.py). Needs the package nvidia-ml-py and a driver; what cannot be
read is named with why, and nothing else is lost for it. Units: bytes, megahertz.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

Read = TypeVar("Read")

# nvml.h, nvmlClocksEventReason*; older drivers call them throttle reasons.
_REASONS = {
    0x1: "idle", 0x2: "clocks set by an application", 0x4: "power limit", 0x8: "hardware slowdown",
    0x10: "waits for others (sync boost)", 0x20: "heat (driver)", 0x40: "heat (hardware)",
    0x80: "power brake", 0x100: "display",
}  # fmt: skip
HARMLESS_REASONS = frozenset({"idle", "clocks set by an application", "display"})
_MOST_LINKS = 36  # NVML_NVLINK_MAX_LINKS
# nvmlGpuP2PCapsIndex_t and nvmlGpuP2PStatus_t; the package has a tuple where READ should be 0.
_P2P_READ, _P2P_NVLINK, _P2P_OK = 0, 2, 0
_REMOTES = {0: "GPU", 1: "NPU", 2: "switch"}  # nvmlNvLinkDeviceType_t
_COMPLETED = 3  # nvmlGpuFabricState_t


class FabricInfo(ctypes.Structure):
    """`nvmlGpuFabricInfo_t` of nvml.h; the package's own had a wrong layout in several versions."""

    _fields_ = (
        ("clusterUuid", ctypes.c_ubyte * 16),
        ("status", ctypes.c_uint),
        ("cliqueId", ctypes.c_uint),
        ("state", ctypes.c_ubyte),
    )


@dataclass(frozen=True, kw_only=True)
class GpuRecord:
    """One GPU. A field is None where it could not be read.

    Attributes:
        index: NVML's, which counts all GPUs of the host, whatever CUDA_VISIBLE_DEVICES says.
        memory_bytes, used_bytes: of its memory, and what of it is in use.
        sm_mhz, memory_mhz: clocks now and at most.
        slowed_by: why clocks are lower than they could be; empty: nothing.
        has_gpm: whether it counts what its memory moves (GPM).
        links: active NVLinks, by what stands at the other end.
        fabric: cluster and clique of the NVLink fabric, which may span hosts; empty: it is in none.
        unread: what could not be read, and why.
    """

    index: int
    name: str
    uuid: str
    memory_bytes: int | None
    used_bytes: int | None
    sm_mhz: tuple[int, int] | None
    memory_mhz: tuple[int, int] | None
    slowed_by: tuple[str, ...] | None
    has_gpm: bool | None
    links: dict[str, int] | None
    fabric: str | None
    unread: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class GpuInventory:
    """All GPUs of the host.

    Attributes:
        why_none: why NVML says nothing; `gpus` is empty then.
        driver, cuda_driver: versions of the driver and of CUDA that it runs at most.
        p2p: of each pair (row reads from column): `nvlink`, `yes`, `no`, or `?` where it could not be read.
        domains: GPUs that NVLink joins, by index.
    """

    why_none: str = ""
    driver: str | None = None
    cuda_driver: str | None = None
    gpus: tuple[GpuRecord, ...] = ()
    p2p: tuple[tuple[str, ...], ...] = ()
    domains: tuple[tuple[int, ...], ...] = ()


@dataclass
class _Asker:
    """Asks NVML and writes down what it refuses."""

    nvml: Any
    refused: list[str] = field(default_factory=list)

    def __call__(self, what: str, ask: Callable[[], Read]) -> Read | None:
        try:
            return ask()
        except self.nvml.NVMLError as error:
            self.refused.append(f"{what}: {error}")
        except AttributeError:
            self.refused.append(f"{what}: this nvidia-ml-py does not know it; install a newer one")
        return None


def gpu_inventory() -> GpuInventory:
    """Return what NVML says now; never raises for a machine without GPU, driver or package."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return GpuInventory(why_none="the package nvidia-ml-py is missing; pip install nvidia-ml-py")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return GpuInventory(why_none=f"NVML does not start: {error}")
    try:
        return read_inventory(nvml)
    finally:
        nvml.nvmlShutdown()


def read_inventory(nvml: Any) -> GpuInventory:
    """Return the same from the module `pynvml`, initialised."""
    ask = _Asker(nvml)
    devices = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    cuda = ask("CUDA of the driver", nvml.nvmlSystemGetCudaDriverVersion)
    p2p = tuple(tuple(_pair(nvml, a, b) for b in devices) for a in devices)
    return GpuInventory(
        why_none="" if devices else "the driver knows no GPU",
        driver=ask("driver", nvml.nvmlSystemGetDriverVersion),
        cuda_driver=None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
        gpus=tuple(_record(nvml, index, device) for index, device in enumerate(devices)),
        p2p=p2p,
        domains=joined(p2p),
    )


def _record(nvml: Any, index: int, device: Any) -> GpuRecord:
    ask = _Asker(nvml)
    memory = ask("memory", lambda: nvml.nvmlDeviceGetMemoryInfo(device))

    def clocks(kind: int) -> tuple[int, int]:
        return nvml.nvmlDeviceGetClockInfo(device, kind), nvml.nvmlDeviceGetMaxClockInfo(device, kind)

    def slowed_by() -> tuple[str, ...]:
        newer = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
        bits = (newer or nvml.nvmlDeviceGetCurrentClocksThrottleReasons)(device)
        return tuple(name for bit, name in _REASONS.items() if bits & bit)

    fields = {
        "sm_mhz": ask("clock of multiprocessors", lambda: clocks(nvml.NVML_CLOCK_SM)),
        "memory_mhz": ask("clock of memory", lambda: clocks(nvml.NVML_CLOCK_MEM)),
        "slowed_by": ask("what slows it down", slowed_by),
        "has_gpm": ask("GPM", lambda: bool(nvml.nvmlGpmQueryDeviceSupport(device).isSupportedDevice)),
        "links": ask("NVLink", lambda: _links(nvml, device)),
        "fabric": ask("NVLink fabric", lambda: _fabric(nvml, device)),
    }
    return GpuRecord(
        index=index,
        name=ask("name", lambda: str(nvml.nvmlDeviceGetName(device))) or "unknown",
        uuid=ask("UUID", lambda: str(nvml.nvmlDeviceGetUUID(device))) or "unknown",
        memory_bytes=None if memory is None else int(memory.total),
        used_bytes=None if memory is None else int(memory.used),
        unread=tuple(ask.refused),
        **fields,  # type: ignore[arg-type]
    )


def _links(nvml: Any, device: Any) -> dict[str, int]:
    """Return active links; a GPU without NVLink refuses the first one, one with fewer than there can be a later one."""
    found: dict[str, int] = {}
    for link in range(_MOST_LINKS):
        try:
            if not nvml.nvmlDeviceGetNvLinkState(device, link):
                continue
            remote = _REMOTES.get(nvml.nvmlDeviceGetNvLinkRemoteDeviceType(device, link), "unknown")
        except nvml.NVMLError:
            break
        found[remote] = found.get(remote, 0) + 1
    return found


def _fabric(nvml: Any, device: Any) -> str:
    info = FabricInfo()
    nvml.nvmlDeviceGetGpuFabricInfo(device, ctypes.byref(info))
    if info.state != _COMPLETED:
        return ""
    return f"cluster {bytes(info.clusterUuid).hex()}, clique {info.cliqueId}"


def _pair(nvml: Any, reader: Any, other: Any) -> str:
    """Return how `reader` reads the memory of `other`."""
    if reader is other:
        return "self"
    try:
        if nvml.nvmlDeviceGetP2PStatus(reader, other, _P2P_NVLINK) == _P2P_OK:
            return "nvlink"
        return "yes" if nvml.nvmlDeviceGetP2PStatus(reader, other, _P2P_READ) == _P2P_OK else "no"
    except nvml.NVMLError:
        return "?"


def joined(p2p: tuple[tuple[str, ...], ...]) -> tuple[tuple[int, ...], ...]:
    """Return the groups that `nvlink` joins, directly or over others; a GPU without one is a group of its own.

    Example:
        >>> joined((("self", "nvlink", "no"), ("nvlink", "self", "no"), ("no", "no", "self")))
        ((0, 1), (2,))
    """
    groups: list[set[int]] = []
    for index, row in enumerate(p2p):
        near = {index, *(other for other, how in enumerate(row) if how == "nvlink")}
        apart = [group for group in groups if not group & near]
        groups = [*apart, near.union(*(group for group in groups if group & near))]
    return tuple(sorted(tuple(sorted(group)) for group in groups))
