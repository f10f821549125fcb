"""What the host offers, on made-up /proc and /sys trees and on this machine."""

from __future__ import annotations

from pathlib import Path

from moewe.topologies.hardware import (
    available_memory_bytes,
    host_cores,
    host_memory_bytes,
    numa_nodes,
    parse_cpu_list,
    usable_cpus,
)


def tree(root: Path, **files: str) -> Path:
    base = {"proc/meminfo": "MemTotal:  1000 kB\nMemAvailable:  800 kB\n"}
    for name, text in (base | {key.replace("__", "/"): text for key, text in files.items()}).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_memory_without_limits(tmp_path: Path) -> None:
    assert host_memory_bytes(tree(tmp_path)) == 1000 * 1024
    assert available_memory_bytes(tmp_path) == 800 * 1024


def test_memory_under_a_v2_limit_of_a_parent(tmp_path: Path) -> None:
    root = tree(tmp_path, proc__self__cgroup="0::/a/b\n")
    for folder, limit, used in (("a", "512000", "500000"), ("a/b", "max", "100")):
        (root / "sys/fs/cgroup" / folder).mkdir(parents=True, exist_ok=True)
        (root / "sys/fs/cgroup" / folder / "memory.max").write_text(limit)
        (root / "sys/fs/cgroup" / folder / "memory.current").write_text(used)
    assert host_memory_bytes(root) == 512000
    assert available_memory_bytes(root) == 12000
    (root / "sys/fs/cgroup/a/memory.stat").write_text("anon 1\ninactive_file 300000\nactive_file 50\n")
    assert available_memory_bytes(root) == 312000  # a checkpoint that was read stays in the cache until room is needed


def test_memory_under_a_v1_limit_seen_at_the_mount(tmp_path: Path) -> None:
    root = tree(tmp_path, proc__self__cgroup="4:memory:/not/visible\n")
    folder = root / "sys/fs/cgroup/memory"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text("300000")
    (folder / "memory.usage_in_bytes").write_text("400000")
    assert host_memory_bytes(root) == 300000
    assert available_memory_bytes(root) == 0
    (folder / "memory.stat").write_text("inactive_file 7\ntotal_inactive_file 150000\n")
    assert available_memory_bytes(root) == 50000
    (folder / "memory.limit_in_bytes").write_text(str(2**63 - 4096))
    assert host_memory_bytes(root) == 1000 * 1024


def test_cores_follow_the_quota(tmp_path: Path) -> None:
    root = tree(tmp_path, proc__self__cgroup="0::/\n")
    (root / "sys/fs/cgroup").mkdir(parents=True)
    assert host_cores(root) == len(usable_cpus())
    (root / "sys/fs/cgroup/cpu.max").write_text("100000 100000\n")
    assert host_cores(root) == 1
    (root / "sys/fs/cgroup/cpu.max").write_text("max 100000\n")
    assert host_cores(root) == len(usable_cpus())


def test_numa_nodes_keep_usable_cpus_only(tmp_path: Path) -> None:
    first = usable_cpus()[0]
    root = tree(tmp_path)
    for node, cpus in (("node0", f"{first}"), ("node1", "100000-100003")):
        (root / "sys/devices/system/node" / node).mkdir(parents=True)
        (root / "sys/devices/system/node" / node / "cpulist").write_text(cpus + "\n")
    assert numa_nodes(root) == [[first]]


def test_cpu_lists() -> None:
    assert parse_cpu_list("0-2,8\n") == [0, 1, 2, 8]
    assert parse_cpu_list("") == []


def test_this_machine() -> None:
    assert 0 < available_memory_bytes() <= host_memory_bytes()
    assert 1 <= host_cores() <= len(usable_cpus())
    assert sorted(cpu for node in numa_nodes() for cpu in node) == usable_cpus()
