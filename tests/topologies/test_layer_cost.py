"""The time of one layer by who sends rows where: what binds, who waits for whom, and which links rows take."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moewe.topologies.cost import Ceilings, Link
from moewe.topologies.layer_cost import ExpertSize, LayerCost, TokenRows, copies_to_domains

CEILINGS = Ceilings(
    memory_bandwidth=1e9, flops=1e9, within=Link(bandwidth=1e8, latency=1e-6), between=Link(bandwidth=1e6, latency=1e-4)
)
SIZE = ExpertSize(expert_bytes=10**6, row_bytes=100, flops=1e5)
RANGES = ((0, 2), (2, 4))


def seconds(rows: list[float], domains=(0, 0), ranges=RANGES, size=SIZE) -> float:
    """Return the seconds where each slot has an expert of its own, of whose rows all ranks bring equal parts."""
    of_rank = np.tile(np.array(rows, float) / len(ranges), (len(ranges), 1))
    slots = np.tile(np.arange(len(rows)), (len(ranges), 1))
    return LayerCost(size, CEILINGS, ranges, domains, token=TokenRows(top_k=1)).seconds(of_rank, slots)


def test_few_rows_wait_for_weights_and_many_for_arithmetic() -> None:
    link = 100 / 1e8  # of a row, one way: half of them come from the other rank, and as many answers go out
    hit = 1 - math.exp(-1)
    assert seconds([1, 0, 1, 0]) == pytest.approx(hit * 1e-3 + (0.5 + 0.5) * link + 2e-6)
    assert seconds([1000, 0, 10, 10]) == pytest.approx(1000 * 1e-4 + (500 + 10) * link + 2e-6)


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


FOUR, PAIRS = ((0, 1), (1, 2), (2, 3), (3, 4)), (0, 0, 1, 1)
ONE_ROW = TokenRows(top_k=1)
NO_WORK = ExpertSize(expert_bytes=0, row_bytes=100, flops=0.0)


def link_seconds(rows: list[list[float]], slots: list[list[int]], token: TokenRows = ONE_ROW) -> float:
    """Return what EP4 in two domains pays for links alone, by origin and expert."""
    layer = LayerCost(NO_WORK, CEILINGS, FOUR, PAIRS, token=token)
    return layer.seconds(np.array(rows, float), np.array(slots)) - 2e-4


def test_rows_pay_for_the_way_that_they_really_take() -> None:
    """One expert, its rows all of rank 0: at home, with the neighbour, in the other domain."""
    rows = [[60.0], [0.0], [0.0], [0.0]]

    def at(slot: int) -> float:
        return link_seconds(rows, [[slot]] * 4)

    assert at(0) == 0.0
    assert at(1) == pytest.approx(60 * 100 / 1e8)
    assert at(2) == at(3) == pytest.approx(60 / 2 * 100 / 1e6), "shared by the links of the domain's two ranks"


def test_a_replica_in_each_domain_keeps_rows_off_the_slow_link() -> None:
    rows = [[25.0]] * 4
    one_domain, each = link_seconds(rows, [[0], [1], [0], [1]]), link_seconds(rows, [[0], [0], [2], [2]])
    assert each == pytest.approx(25 * 100 / 1e8)
    assert one_domain == pytest.approx(50 / 2 * 100 / 1e6)


def test_rows_of_a_token_cross_together_and_are_handed_on() -> None:
    """Rank 0 has 10 tokens with two experts each, both of them on ranks of the other domain."""
    rows, slots = [[10.0, 10.0]] + [[0.0, 0.0]] * 3, [[2, 3]] * 4
    assert link_seconds(rows, slots) == pytest.approx(20 / 2 * 100 / 1e6)
    together = link_seconds(rows, slots, TokenRows(top_k=2, together=True))
    # Half of the rows that cross are for the relay itself; of the rest it sends rows and gets answers.
    assert together == pytest.approx(10 / 2 * 100 / 1e6 + (5 + 5) * 100 / 1e8)


def test_groups_that_stay_whole_need_fewer_copies() -> None:
    """Two groups of two experts, of which a token uses one; 40 tokens of one rank."""
    token, rows = TokenRows(top_k=2, num_groups=2, top_groups=1), np.full((1, 4), 20.0)
    assert copies_to_domains(rows, np.array([[0, 0, 1, 1]]), 2, token).tolist() == [[20.0, 20.0]]
    assert copies_to_domains(rows, np.array([[0, 1, 0, 1]]), 2, token).tolist() == [[30.0, 30.0]]
    apart = copies_to_domains(rows, np.array([[0, 0, 1, 1]]), 2, TokenRows(top_k=2))
    assert apart.tolist() == [[30.0, 30.0]], "without groups any two experts fire together"


@given(
    rows=st.lists(st.floats(0, 1e4), min_size=8, max_size=8),
    at=st.lists(st.integers(0, 2), min_size=8, max_size=8),
    top_k=st.integers(1, 8),
    groups=st.sampled_from([(1, 1), (2, 1), (4, 2)]),
)
def test_copies_are_no_more_than_rows_nor_than_tokens(
    rows: list[float], at: list[int], top_k: int, groups: tuple[int, int]
) -> None:
    load, place = np.array([rows]), np.array([at])
    token = TokenRows(top_k=top_k, num_groups=groups[0], top_groups=groups[1])
    copies = copies_to_domains(load, place, 3, token)[0]
    of_domain = np.bincount(at, rows, 3)
    assert (copies >= -1e-6).all() and (copies <= sum(rows) / top_k * (1 + 1e-9)).all()
    assert (copies * top_k >= of_domain * (1 - 1e-9) - 1e-6).all(), "a copy brings K rows at most"
    if top_k == 1 and groups[0] == 1:
        assert copies == pytest.approx(of_domain)
