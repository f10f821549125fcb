"""The bandwidth measurement gives a plausible figure, and says when the cache answered."""

from __future__ import annotations

from pathlib import Path

import pytest

from moewe.native import bandwidth
from moewe.native.bandwidth import buffer_size, llc_bytes, measure_read_bandwidth

MIB = 1 << 20


def test_buffer_is_over_the_caches_where_memory_allows() -> None:
    assert buffer_size(32 * MIB, 64 << 30) == 128 * MIB
    assert buffer_size(480 * MIB, 64 << 30) == 1920 * MIB
    assert buffer_size(768 * MIB, 16 << 30) == 2048 * MIB
    assert buffer_size(4096 * MIB, 512 << 30) == 8192 * MIB
    assert buffer_size(480 * MIB, 2 << 30) == 256 * MIB
    assert buffer_size(1 * MIB, 0) == 16 * MIB


def test_ranks_that_read_together_fill_the_caches_together_and_none_of_them_alone() -> None:
    assert buffer_size(480 * MIB, 64 << 30, sharers=2) == 960 * MIB
    assert buffer_size(480 * MIB, 64 << 30, sharers=8) == 720 * MIB


def cache_entry(folder: Path, cpu: int, index: int, **files: str) -> None:
    path = folder / f"cpu{cpu}" / "cache" / f"index{index}"
    path.mkdir(parents=True)
    for name, text in files.items():
        (path / name).write_text(text + "\n")


def test_last_level_caches_of_all_cpus_are_added_up_once_each(tmp_path: Path) -> None:
    for cpu in range(6):
        cache_entry(tmp_path, cpu, 0, level="1", size="48K", shared_cpu_list=str(cpu))
        die = "0-1" if cpu < 2 else "2-3" if cpu < 4 else "4-5"
        cache_entry(tmp_path, cpu, 3, level="3", size="32M", shared_cpu_list=die)
    cache_entry(tmp_path, 6, 3, level="3", shared_cpu_list="6")  # the kernel does not say how large
    cache_entry(tmp_path, 7, 2, level="2", size="1024K", shared_cpu_list="")
    (tmp_path / "cpufreq").mkdir()
    assert llc_bytes(tmp_path) == 97 * MIB
    assert llc_bytes(tmp_path / "nowhere") == 32 * MIB


@pytest.mark.parametrize(("text", "size"), [("48K", 48 << 10), ("32M", 32 * MIB), ("1G", 1 << 30), ("512", 512)])
def test_cache_sizes_as_the_kernel_writes_them(text: str, size: int) -> None:
    assert bandwidth._parse_size(text) == size


def test_a_plausible_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "llc_bytes", lambda: 8 * MIB)
    result = measure_read_bandwidth(2, 8 << 30, pass_seconds=0.01)
    assert result.buffer_bytes == 32 * MIB and not result.cache_resident
    assert 1e8 < result.bytes_per_second < 1e13


@pytest.mark.parametrize(("sharers", "in_cache"), [(1, True), (3, True), (4, False)])
def test_buffers_that_are_not_well_over_the_caches_are_flagged(
    monkeypatch: pytest.MonkeyPatch, sharers: int, in_cache: bool
) -> None:
    monkeypatch.setattr(bandwidth, "llc_bytes", lambda: 32 * MIB)
    result = measure_read_bandwidth(1, 0, sharers=sharers, pass_seconds=0.001)  # no memory is free
    assert result.buffer_bytes == 16 * MIB and result.cache_resident == in_cache


@pytest.mark.parametrize("native", [True, False])
def test_twice_the_caches_are_waited_for_longer_than_the_rest(monkeypatch: pytest.MonkeyPatch, native: bool) -> None:
    if not native:
        monkeypatch.setattr(bandwidth, "load", lambda: None)
    monkeypatch.setattr(bandwidth, "llc_bytes", lambda: 40 * MIB)
    result = measure_read_bandwidth(1, 8 << 30, 0.0, pass_seconds=0.001)
    assert 80 * MIB <= result.buffer_bytes < 160 * MIB and not result.cache_resident
    result = measure_read_bandwidth(1, 8 << 30, 0.0, most_fill_seconds=0.0, pass_seconds=0.001)
    assert 0 < result.buffer_bytes < 80 * MIB and result.cache_resident


def test_several_passes_count_however_long_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[int] = []
    monkeypatch.setattr(bandwidth, "load", lambda: None)
    monkeypatch.setattr(bandwidth, "llc_bytes", lambda: 8 * MIB)
    monkeypatch.setattr(bandwidth.np, "sum", lambda part: passes.append(part.nbytes))
    measure_read_bandwidth(1, 8 << 30, pass_seconds=1e-9)
    assert len(passes) >= bandwidth._LEAST_PASSES and set(passes) == {32 * MIB}


def test_this_machine_has_a_cache() -> None:
    assert llc_bytes() >= MIB


def test_no_threads_is_refused() -> None:
    with pytest.raises(ValueError, match="threads=0"):
        measure_read_bandwidth(0, 8 << 30)
