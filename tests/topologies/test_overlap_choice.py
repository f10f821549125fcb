"""The choice of overlap: a function of what all ranks know, that pays where the model of a layer says so."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moewe.topologies import RankGrid, TopologyError, parse_topology
from moewe.topologies.cost import Ceilings, Link, expected_hit
from moewe.topologies.exchange_choice import EXCHANGES, OVER_LINKS, ExchangeFacts
from moewe.topologies.overlap_choice import (
    HALVES,
    MARGIN,
    NOTHING,
    OVERLAPS,
    SHARED,
    MoELoad,
    OverlapFacts,
    check_overlap,
    choose_overlap,
    layer_seconds,
    moe_load,
)
from tests.topologies.test_budget import DENSE, MODEL

MIB = 1 << 20
LOAD = MoELoad(
    num_experts=64, top_k=8, expert_bytes=4 * MIB, expert_flops=4 * MIB, shared_bytes=8 * MIB, row_bytes=4096
)
FAST = Link(bandwidth=math.inf, latency=0.0)
CEILINGS = Ceilings(memory_bandwidth=2e10, flops=1e12, within=FAST, between=FAST)


def facts(topology: str = "EP4DP1[domains=2+2]", **changes: object) -> OverlapFacts:
    grid = RankGrid(parse_topology(topology), 64)
    known = OverlapFacts(
        asked="auto", grid=grid, load=LOAD, ceilings=CEILINGS, link=Link(bandwidth=2e8, latency=5e-4), part_seconds=5e-4
    )
    return replace(known, **changes)  # type: ignore[arg-type]


def test_what_was_asked_for_is_done_where_rows_travel() -> None:
    for exchange in ("local", "shm", "threads"):
        for asked in OVERLAPS:
            assert choose_overlap(exchange, 4096, facts(asked=asked)) == NOTHING
    for exchange in OVER_LINKS:
        for bucket in (0, 1, 2, 4096):
            assert choose_overlap(exchange, bucket, facts(asked="on")) == HALVES
            assert choose_overlap(exchange, bucket, facts(asked="off")) == NOTHING


@pytest.mark.parametrize("exchange", ["all_to_all", "hierarchical"])
def test_halves_are_for_large_batches_over_slow_links(exchange: str) -> None:
    assert choose_overlap(exchange, 2048, facts()) == HALVES
    assert [choose_overlap(exchange, bucket, facts()) for bucket in (0, 1, 2, 8)] == [SHARED] * 4
    assert choose_overlap(exchange, 2048, facts(link=Link(bandwidth=1e12, latency=0.0))) == SHARED, "nothing to hide"
    assert choose_overlap(exchange, 2048, facts(link=None)) == SHARED, "the cores carry the rows"
    assert choose_overlap(exchange, 2048, facts(load=None)) == SHARED


def test_ranks_that_divide_heads_divide_the_rows() -> None:
    whole, divided = facts("EP4DP1[domains=2+2]"), facts("EP4DP1[atp=4,domains=2+2]")
    first = next(rows for rows in range(2, 4096) if choose_overlap("all_to_all", rows, whole) == HALVES)
    assert choose_overlap("all_to_all", 4 * first, divided) == HALVES
    assert choose_overlap("all_to_all", 4 * (first - 1), divided) == SHARED


def test_the_model_of_a_layer_by_hand() -> None:
    """Two ranks apart, one choice a row: half of the rows cross. Reading binds experts, shared ones come free."""
    load = MoELoad(num_experts=2, top_k=1, expert_bytes=1000, expert_flops=0, shared_bytes=500, row_bytes=10)
    known = facts(
        "EP2DP1[domains=1+1]", load=load, link=Link(bandwidth=100.0, latency=1.0), part_seconds=0.25,
        ceilings=replace(CEILINGS, memory_bandwidth=1000.0),
    )  # fmt: skip
    # Counts 1; eight rows: 4 * 10 / 100 + 1, under it shared experts (0.5); experts; answers as long as the rows.
    hit = expected_hit(0.5, 16)
    assert layer_seconds("all_to_all", (8,), known) == pytest.approx(1 + 1.4 + hit + 0.25 + 1.4)
    # The second half's rows and the first half's answers are hidden; experts are read twice.
    hit = expected_hit(0.5, 8)
    assert layer_seconds("all_to_all", (4, 4), known) == pytest.approx(1 + 1.2 + 2 * (hit + 0.25) + 1.2)
    # Room for eight rows to the other rank and back, without counts.
    assert layer_seconds("padded", (5,), known) == pytest.approx(1.8 + expected_hit(0.5, 10) + 0.25 + 1.8)
    assert layer_seconds("hierarchical", (8,), known) == pytest.approx(layer_seconds("all_to_all", (8,), known))


def test_one_row_crosses_to_a_domain_however_many_ranks_want_it() -> None:
    wide = facts("EP8DP1[domains=4+4]", link=Link(bandwidth=1.0, latency=0.0), ceilings=replace(CEILINGS, flops=1e30))
    flat, once = (layer_seconds(name, (64,), wide) for name in ("all_to_all", "hierarchical"))
    # Of eight choices: 4 * (1 - (7/8)^8) other ranks and four answers, against one row and one sum.
    out, back = 4 * expected_hit(1 / 8, 8), 8 * 4 / 8
    assert flat / once == pytest.approx((out + back) / (2 * expected_hit(0.5, 8)), rel=1e-3)


@given(
    exchange=st.sampled_from(OVER_LINKS),
    bucket=st.integers(0, 8192),
    rate=st.floats(1e6, 1e12),
    latency=st.floats(0, 0.1),
    shared=st.integers(0, 64 * MIB),
)
def test_halves_are_chosen_just_where_they_gain(
    exchange: str, bucket: int, rate: float, latency: float, shared: int
) -> None:
    known = facts(link=Link(bandwidth=rate, latency=latency), load=replace(LOAD, shared_bytes=shared))
    chosen = choose_overlap(exchange, bucket, known)
    assert chosen in (SHARED, HALVES)
    if bucket >= 2:
        first = -(-bucket // 2)
        whole, halves = (layer_seconds(exchange, parts, known) for parts in ((bucket,), (first, bucket - first)))
        assert 0 < whole < math.inf and 0 < halves < math.inf
        assert (chosen == HALVES) == (halves < (1 - MARGIN) * whole)


def test_a_load_is_that_of_one_layer() -> None:
    load = moe_load(replace(MODEL, expert_flops=7))
    assert load == MoELoad(
        num_experts=16, top_k=2, expert_bytes=32 * MIB, expert_flops=7, shared_bytes=2 * MIB, row_bytes=2048
    )
    assert moe_load(DENSE) is None


def test_to_overlap_where_nothing_travels_is_refused() -> None:
    near, far = RankGrid(parse_topology("EP2DP1"), 2), RankGrid(parse_topology("EP2DP1[domains=1+1]"), 2)
    for known in (ExchangeFacts(), ExchangeFacts(as_threads=True), ExchangeFacts(asked="shm")):
        with pytest.raises(
            TopologyError, match=r"overlap='on' .*(shm|threads).*use overlap=auto, or exchange=all_to_all"
        ):
            check_overlap("on", near, known)
        for asked in ("auto", "off"):
            check_overlap(asked, near, known)
    check_overlap("on", far, ExchangeFacts())
    check_overlap("on", near, ExchangeFacts(asked="padded"))
    check_overlap("on", RankGrid(parse_topology("EP1DP2"), 2), ExchangeFacts())


def test_exchanges_over_links_are_known_ones() -> None:
    assert set(OVER_LINKS) < set(EXCHANGES)
