"""The bandwidth measurement gives a plausible figure, and says when the cache answered."""

from __future__ import annotations

import pytest

from moewe.native import bandwidth
from moewe.native.bandwidth import buffer_size, llc_bytes, measure_read_bandwidth

MIB = 1 << 20


def test_buffer_is_over_the_cache_where_memory_allows() -> None:
    assert buffer_size(32 * MIB, 64 << 30) == 64 * MIB
    assert buffer_size(480 * MIB, 64 << 30) == 960 * MIB
    assert buffer_size(900 * MIB, 64 << 30) == 1024 * MIB
    assert buffer_size(480 * MIB, 2 << 30) == 256 * MIB
    assert buffer_size(1 * MIB, 0) == 16 * MIB


@pytest.mark.parametrize(("text", "size"), [("48K", 48 << 10), ("32M", 32 * MIB), ("1G", 1 << 30), ("512", 512)])
def test_cache_sizes_as_the_kernel_writes_them(text: str, size: int) -> None:
    assert bandwidth._parse_size(text) == size


def test_a_plausible_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "llc_bytes", lambda: 8 * MIB)
    monkeypatch.setattr(bandwidth, "_PASS_SECONDS", 0.01)
    result = measure_read_bandwidth(2, 8 << 30)
    assert result.buffer_bytes == 16 * MIB and not result.cache_resident
    assert 1e8 < result.bytes_per_second < 1e13


def test_a_buffer_within_the_cache_is_flagged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "llc_bytes", lambda: 64 * MIB)
    monkeypatch.setattr(bandwidth, "buffer_size", lambda llc, free: 16 * MIB)
    monkeypatch.setattr(bandwidth, "_PASS_SECONDS", 0.01)
    assert measure_read_bandwidth(1, 8 << 30).cache_resident


def test_this_machine_has_a_cache() -> None:
    assert llc_bytes() >= MIB


def test_no_threads_is_refused() -> None:
    with pytest.raises(ValueError, match="threads=0"):
        measure_read_bandwidth(0, 8 << 30)
