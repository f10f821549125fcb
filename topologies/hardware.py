"""What the host offers this process: memory, cores, NUMA nodes; container limits and CPU affinity respected.

Not a benchmark (native.bandwidth) and not a table of GPUs. Standard library only; Linux files where they exist.
Units: bytes, logical CPUs (numbers as the kernel counts them).
"""

from __future__ import annotations

import os
from pathlib import Path

_ROOT = Path("/")


def host_memory_bytes(root: Path = _ROOT) -> int:
    """Return the bytes that this process could ever use: the machine's memory or the container's limit.

    Args:
        root: where `proc` and `sys` are found (tests).
    """
    return min([_meminfo(root, "MemTotal") or _sysconf_memory(), *_memory_limits(root)])


def available_memory_bytes(root: Path = _ROOT) -> int:
    """Return the bytes that can be allocated now without swapping; caches that the kernel would drop are free."""
    free = [_meminfo(root, "MemAvailable") or _sysconf_memory()]
    for folder in _cgroup_folders(root, "memory"):
        limit = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
        used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes")
        if limit is not None and used is not None:
            free.append(max(0, limit - used + _droppable(folder)))
    return min(free)


def usable_cpus() -> list[int]:
    """Return the logical CPUs that this process may run on, ascending."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def host_cores(root: Path = _ROOT) -> int:
    """Return how many logical CPUs this process can keep busy: its affinity, lowered by a container's CPU quota."""
    cores = len(usable_cpus())
    for folder in _cgroup_folders(root, "cpu"):
        quota, period = _cpu_quota(folder)
        if quota is not None and period:
            cores = min(cores, max(1, quota // period))
    return cores


def numa_nodes(root: Path = _ROOT) -> list[list[int]]:
    """Return the usable CPUs of each NUMA node that has any; one node with all of them where nodes are unknown."""
    usable = set(usable_cpus())
    nodes = []
    for path in sorted(root.glob("sys/devices/system/node/node[0-9]*"), key=lambda path: int(path.name[4:])):
        cpus = [cpu for cpu in parse_cpu_list(_text(path / "cpulist")) if cpu in usable]
        if cpus:
            nodes.append(cpus)
    return nodes or [sorted(usable)]


def parse_cpu_list(text: str) -> list[int]:
    """Return the numbers in the kernel's list form.

    Example:
        >>> parse_cpu_list("0-2,8")
        [0, 1, 2, 8]
    """
    cpus: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.strip():
            cpus.extend(range(int(first), int(last or first) + 1))
    return cpus


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.lstrip("-").isdigit() else None


def _meminfo(root: Path, key: str) -> int | None:
    for line in _text(root / "proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        if name == key:
            return int(rest.split()[0]) * 1024
    return None


def _sysconf_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cgroup_folders(root: Path, controller: str) -> list[Path]:
    """Return the folders whose limits bind this process for `controller`, from its own up to the root (v2 and v1)."""
    folders: list[Path] = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            base = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            base = root / "sys/fs/cgroup" / controller
        else:
            continue
        here = base / path.strip("/")
        # In a container the path is often the host's and does not exist; the mount then shows our own limits.
        folders += [folder for folder in (here, *here.parents) if folder == base or base in folder.parents]
    return list(dict.fromkeys(folder for folder in folders if folder.is_dir()))


def _droppable(folder: Path) -> int:
    """Return the bytes of files that a group is charged for and has not used lately (a checkpoint read once)."""
    counts = dict(line.split(" ", 1) for line in _text(folder / "memory.stat").splitlines() if " " in line)
    found = counts.get("total_inactive_file", counts.get("inactive_file", ""))  # v1 counts groups below apart
    return int(found) if found.isdigit() else 0


def _memory_limits(root: Path) -> list[int]:
    """Return the memory limits that are set (a v1 group without one says a number near 2**63)."""
    folders = _cgroup_folders(root, "memory")
    values = [_number(folder / "memory.max") for folder in folders]
    values += [_number(folder / "memory.limit_in_bytes") for folder in folders]
    return [value for value in values if value is not None and 0 < value < 1 << 60]


def _cpu_quota(folder: Path) -> tuple[int | None, int | None]:
    quota, _, period = _text(folder / "cpu.max").strip().partition(" ")
    if quota.isdigit() and period.isdigit():
        return int(quota), int(period)
    v1_quota = _number(folder / "cpu.cfs_quota_us")
    return (v1_quota, _number(folder / "cpu.cfs_period_us")) if v1_quota and v1_quota > 0 else (None, None)
