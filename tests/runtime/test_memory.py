"""What a rank says of its machine: read bandwidth and matrix rate, each measured once for the process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from moewe.native.bandwidth import Bandwidth
from moewe.native.matrix_rate import MatrixRate
from moewe.runtime.config import QUICK_VARIABLE
from moewe.runtime.ranks import memory

CPU = torch.device("cpu")
waits: list[dict[str, float]] = []  # what else the last measurements were told


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    """What measurements were told of free memory and of others at it, on a host that has 8 GiB."""
    shares: list[tuple[int, int]] = []

    def measure(threads: int, free_bytes: int, *, sharers: int, **times: float) -> Bandwidth:
        shares.append((free_bytes, sharers))
        waits.append(times)
        return Bandwidth(1e9, 16 << 20, cache_resident=False)

    waits.clear()
    monkeypatch.setattr(memory, "available_memory_bytes", lambda: 8 << 30)
    monkeypatch.setattr(memory, "llc_bytes", lambda: 100)
    monkeypatch.setattr(memory, "measure_read_bandwidth", measure)
    monkeypatch.delenv(QUICK_VARIABLE, raising=False)
    memory.read_bandwidth.cache_clear()
    yield shares
    memory.read_bandwidth.cache_clear()


def test_it_is_measured_once_for_the_process(asked: list[tuple[int, int]]) -> None:
    assert memory.read_bandwidth(CPU, 1, 500) is memory.read_bandwidth(CPU, 1, 500)
    assert asked == [(8 << 30, 1)]


def test_ranks_that_measure_together_share_the_memory(asked: list[tuple[int, int]]) -> None:
    assert memory.read_bandwidth(CPU, 1, 500) is not memory.read_bandwidth(CPU, 4, 500)
    assert asked == [(8 << 30, 1), (2 << 30, 4)]


def test_tests_measure_little(asked: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(QUICK_VARIABLE, "1")
    memory.read_bandwidth(CPU, 2, 500)
    assert asked == [(0, 2)] and waits == [{"pass_seconds": memory._QUICK_SECONDS}]


def test_a_model_that_caches_hold_does_not_wait_for_memory(asked: list[tuple[int, int]]) -> None:
    for num_ranks, weight_bytes in ((1, 100), (2, 50), (1, 101), (2, 51)):
        memory.read_bandwidth(CPU, num_ranks, weight_bytes)
    assert waits == [{"most_fill_seconds": 0.0}] * 2 + [{}] * 2


def test_the_matrix_rate_is_measured_once_for_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []

    def measure(threads: int, seconds: float) -> MatrixRate:
        asked.append(seconds)
        return MatrixRate(threads, bf16=7e12, int8=15e12)

    monkeypatch.setattr(memory, "measure_matrix_rate", measure)
    monkeypatch.delenv(QUICK_VARIABLE, raising=False)
    memory.matrix_rates.cache_clear()
    try:
        for _ in range(2):
            assert memory.matrix_rates(CPU, 2) == {"bfloat16": 7e12, "int8": 15e12}
        assert len(asked) == 1 and asked[0] > 0.05
        monkeypatch.setenv(QUICK_VARIABLE, "1")
        memory.matrix_rates(CPU, 3)
        assert asked[1] < 0.01
    finally:
        memory.matrix_rates.cache_clear()


def test_a_cpu_without_native_kernels_has_no_matrix_rate_and_a_gpu_that_of_its_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[torch.device, int]] = []
    monkeypatch.setattr(memory, "measure_matrix_rate", lambda *_: None)
    monkeypatch.setattr(memory, "product_rate", lambda *what: asked.append(what) or 8e14)
    memory.matrix_rates.cache_clear()
    try:
        assert memory.matrix_rates(CPU, 1) == {} and not asked
        assert memory.matrix_rates(torch.device("cuda"), 1) == {"bfloat16": 8e14}
        assert asked == [(torch.device("cuda"), 8192)]
    finally:
        memory.matrix_rates.cache_clear()


def test_the_rate_of_products_is_that_of_the_best_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([0.0, 9.0, 10.0, 13.0, 20.0, 22.0])
    monkeypatch.setattr(memory.time, "perf_counter", lambda: next(ticks))
    assert memory.product_rate(CPU, 8, passes=2) == 2 * 8**3 / 2.0
