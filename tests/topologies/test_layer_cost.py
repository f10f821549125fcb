"""The time of one layer by the rows of its slots: what binds, and who waits for whom."""

from __future__ import annotations

import math

import numpy as np
import pytest

from moewe.topologies.cost import Ceilings, ExpertSize, Link, expert_layer_seconds

CEILINGS = Ceilings(
    memory_bandwidth=1e9, flops=1e9, within=Link(bandwidth=1e8, latency=1e-6), between=Link(bandwidth=1e6, latency=1e-4)
)
SIZE = ExpertSize(expert_bytes=10**6, row_bytes=100, flops=1e5)
RANGES = ((0, 2), (2, 4))


def seconds(rows: list[float], domains=(0, 0), ranges=RANGES, size=SIZE) -> float:
    return expert_layer_seconds(size, CEILINGS, ranges, domains)(np.array(rows, float))


def test_few_rows_wait_for_weights_and_many_for_arithmetic() -> None:
    link = 2 * 100 * 0.5 / 1e8  # of a row: half of them come from the other rank
    hit = 1 - math.exp(-1)
    assert seconds([1, 0, 1, 0]) == pytest.approx(hit * 1e-3 + link + 2e-6)
    assert seconds([1000, 0, 10, 10]) == pytest.approx(1000 * 1e-4 + 1000 * link + 2e-6)


def test_the_slowest_rank_sets_the_time() -> None:
    assert seconds([500, 500, 0, 0]) > 1.9 * seconds([250, 250, 250, 250])
    assert seconds([1, 1, 0, 0]) > seconds([1, 0, 1, 0]), "one rank reads both experts"


def test_hitting_one_expert_more_often_costs_no_more_weights() -> None:
    assert seconds([9, 0, 1, 0]) < 1.2 * seconds([5, 0, 5, 0])


def test_rows_between_domains_take_the_slow_link() -> None:
    rows = [100.0, 0, 100, 0]
    slow, fast = seconds(rows, domains=(0, 1)), seconds(rows)
    assert slow - fast == pytest.approx(2 * 100 * 100 * 0.5 * (1e-6 - 1e-8) + 2 * (1e-4 - 1e-6))


def test_one_rank_waits_for_no_link() -> None:
    assert seconds([1000], domains=(0,), ranges=((0, 1),)) == pytest.approx(0.1)
    assert seconds([0, 0, 5.0], domains=(0, 0, 0), ranges=((0, 2), (2, 2), (2, 3))) > 0, "a rank without slots"
