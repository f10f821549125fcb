"""What follows from probes of links: fits that find what machines were made of, and choices that real ones bear out."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from moewe.topologies import RankGrid, parse_topology
from moewe.topologies.cost import ExpertSpeed, Link
from moewe.topologies.exchange_cost import BETWEEN, ExchangeCost, MeasuredLinks, rows_sent
from moewe.topologies.link_probes import (
    ANYWHERE,
    EXCHANGE,
    EXPERTS,
    FAR,
    LAYERS,
    NEAR,
    Found,
    LinkProbe,
    RankFound,
    fit_exchange,
    fit_experts,
    found_by,
    probe_links,
)
from moewe.topologies.machine import HOST_CEILINGS, rank_ceilings
from moewe.topologies.overlap_choice import HALVES, SHARED, MoELoad, OverlapFacts, choose_overlap, layer_seconds

MIB = 1 << 20
# The model of benchmarks/overlap.py: width 1024, 32 experts of 512, 8 a token, a shared one.
LOAD = MoELoad(
    num_experts=32, top_k=8, expert_bytes=3 * MIB, expert_flops=3 * MIB, shared_bytes=3 * MIB, row_bytes=2048
)
APART = "EP2DP1[domains=1+1,rate=200,delay=500]"
Machine = Callable[[LinkProbe], Found]


def facts(topology: str = APART, **changes: object) -> OverlapFacts:
    grid = RankGrid(parse_topology(topology), 64)
    known = OverlapFacts(
        asked="auto", grid=grid, load=LOAD, ceilings=HOST_CEILINGS, link=Link(bandwidth=2e8, latency=5e-4),
        part_seconds=5e-4,
    )  # fmt: skip
    return replace(known, **changes)  # type: ignore[arg-type]


def found(seconds: dict[str, float], took_s: float = 0.0, **more: float) -> Found:
    return Found(
        seconds=seconds, near_bytes=more.get("near", 0.0), far_bytes=more.get("far", 0.0),
        expert_bytes=more.get("num_bytes", 0.0), expert_flops=more.get("flops", 0.0), took_s=took_s,
    )  # fmt: skip


def ask(names: list[str], known: OverlapFacts, machine: Machine, **how: float) -> tuple[MeasuredLinks, list[LinkProbe]]:
    """Answer all questions as `machine` does; return what follows, and what was asked."""
    asked: list[LinkProbe] = []
    probing = probe_links(names, known, **{"most_rows": 4096, **how})  # type: ignore[arg-type]
    probe = next(probing)
    while True:
        asked.append(probe)
        try:
            probe = probing.send(machine(probe))
        except StopIteration as end:
            return end.value, asked


def made_of(costs: dict[str, ExchangeCost], experts: ExpertSpeed, known: OverlapFacts) -> Machine:
    """Return a machine that does as the model says."""
    truth = replace(known, measured=MeasuredLinks(exchanges=tuple(costs.values()), experts=experts))

    def answer(probe: LinkProbe) -> Found:
        cost = costs[probe.exchange]
        if probe.what != LAYERS:
            sent = rows_sent(probe.exchange, probe.rows, known.grid, LOAD.top_k)
            near = 0.0 if probe.what == FAR else LOAD.row_bytes * (sent.near_out + sent.near_back)
            far = 0.0 if probe.what == NEAR else LOAD.row_bytes * (sent.far_out + sent.far_back)
            seconds = cost.seconds(near, far)
            return found({EXCHANGE: seconds}, seconds * probe.repeats, near=near, far=far)
        first = -(-probe.rows // 2)
        ways = {SHARED: (probe.rows,), HALVES: (first, probe.rows - first)}
        seconds_of = {way: layer_seconds(probe.exchange, ways.get(way, (probe.rows,)), truth) for way in probe.overlaps}
        num_bytes, flops = LOAD.num_experts / 2 * LOAD.expert_bytes, probe.rows * LOAD.top_k * LOAD.expert_flops
        took = sum(seconds_of.values()) * probe.repeats
        return found(
            {**seconds_of, EXPERTS: experts.seconds(num_bytes, flops)}, took, num_bytes=num_bytes, flops=float(flops)
        )

    return answer


def test_the_slowest_rank_of_the_best_turn_counts() -> None:
    ranks = [
        RankFound(seconds={EXCHANGE: (3.0, 5.0), EXPERTS: (1.0, 2.0)}, near_bytes=10, far_bytes=0),
        RankFound(seconds={EXCHANGE: (4.0, 2.0), EXPERTS: (5.0, 3.0)}, near_bytes=30, far_bytes=8, expert_bytes=6),
    ]
    both = found_by(ranks, 0.5)
    assert both.seconds == {EXCHANGE: 4.0, EXPERTS: 2.5}
    assert (both.near_bytes, both.far_bytes, both.expert_bytes, both.took_s) == (20, 4, 3, 0.5)


@pytest.mark.parametrize("hidden", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("topology", [APART, "EP4DP1[domains=2+2]", "EP2DP1"])
@pytest.mark.parametrize("name", ["all_to_all", "hierarchical", "padded"])
def test_probes_find_what_a_machine_is_made_of(name: str, topology: str, hidden: float) -> None:
    known = facts(topology)
    wide, spans = max(known.grid.group_domains) > 1, known.grid.spans_domains
    cost = ExchangeCost(name=name, fixed_s=2e-3, within_s=1e-9 * wide, between_s=6e-9 * spans, hidden=hidden)
    experts = ExpertSpeed(byte_s=1e-10, flop_s=2e-12)
    links, asked = ask([name], known, made_of({name: cost}, experts, known))
    (actual,) = links.exchanges
    assert actual.fixed_s == pytest.approx(2e-3, rel=1e-3)
    assert actual.within_s == pytest.approx(cost.within_s, rel=1e-3)
    assert actual.between_s == pytest.approx(cost.between_s, rel=1e-3)
    assert actual.hidden == pytest.approx(hidden, abs=0.051)
    assert links.experts is not None and links.experts.byte_s == pytest.approx(1e-10)
    assert links.experts.flop_s == pytest.approx(2e-12)
    assert 0 < links.took_s <= 0.6
    assert {probe.what for probe in asked} == {ANYWHERE, LAYERS, *[NEAR] * wide, *[FAR] * spans}


def test_where_nothing_can_be_chosen_layers_run_one_way() -> None:
    known = facts("EP2DP1")
    cost = ExchangeCost(name="shm", fixed_s=2e-4, within_s=1e-9, between_s=0.0)
    links, asked = ask(["shm"], known, made_of({"shm": cost}, ExpertSpeed(byte_s=1e-10, flop_s=2e-12), known))
    assert {probe.overlaps for probe in asked if probe.what == LAYERS} == {("none",)}
    assert links.exchanges[0].hidden == 0.0 and links.experts is not None
    off = facts(asked="off")
    cost = replace(cost, name="all_to_all", between_s=1e-9)
    _, asked = ask(["all_to_all"], off, made_of({"all_to_all": cost}, ExpertSpeed(byte_s=1e-10, flop_s=0.0), off))
    assert {probe.overlaps for probe in asked if probe.what == LAYERS} == {("none",)}


def test_without_time_one_probe_an_exchange_is_made_and_the_rest_is_assumed() -> None:
    known = facts()
    costs = {
        name: ExchangeCost(name=name, fixed_s=0.5, within_s=0.0, between_s=1e-6) for name in ("padded", "all_to_all")
    }
    machine = made_of(costs, ExpertSpeed(byte_s=1e-10, flop_s=2e-12), known)
    links, asked = ask(["all_to_all", "padded"], known, machine, budget_s=0.0)
    assert [(probe.exchange, probe.rows, probe.repeats) for probe in asked] == [("all_to_all", 1, 1), ("padded", 1, 1)]
    assert links.experts is None
    for cost in links.exchanges:
        assert cost.fixed_s == pytest.approx(0.5, rel=0.05) and cost.hidden == 0.0
        assert 1 / cost.between_s == pytest.approx(HOST_CEILINGS.between.bandwidth)
        assert cost.bandwidth(BETWEEN) is None and "MB/s" not in str(cost), "nobody measured that"
    assert choose_overlap("all_to_all", 4096, replace(known, measured=links)) == SHARED, "nobody knows what hides"


@pytest.mark.parametrize("rate", [20e6, 200e6])
def test_a_link_so_slow_that_time_is_up_is_measured_all_the_same(rate: float) -> None:
    """As benchmarks/overlap.py on a busy machine: 7 ms a layer before any byte."""
    known = facts()
    cost = ExchangeCost(name="hierarchical", fixed_s=2e-2, within_s=0.0, between_s=1 / rate)
    links, _ = ask(
        ["hierarchical"], known, made_of({"hierarchical": cost}, ExpertSpeed(byte_s=1e-10, flop_s=2e-12), known)
    )
    assert links.exchanges[0].bandwidth(BETWEEN) == pytest.approx(rate, rel=1e-3)
    assert links.took_s < 1.8


@pytest.mark.parametrize("slowness", [1, 10, 100])
def test_slow_machines_are_asked_less(slowness: int) -> None:
    known = facts("EP8DP1[domains=4+4]")
    cost = ExchangeCost(
        name="hierarchical", fixed_s=1e-3 * slowness, within_s=1e-9 * slowness, between_s=5e-9 * slowness, hidden=0.3
    )
    experts = ExpertSpeed(byte_s=1e-11 * slowness, flop_s=1e-13 * slowness)
    links, asked = ask(["hierarchical"], known, made_of({"hierarchical": cost}, experts, known), most_rows=512)
    assert links.took_s < (2.0 if slowness == 100 else 0.8)
    assert (LAYERS in {probe.what for probe in asked}) == (slowness < 100)
    assert all(probe.rows <= 512 for probe in asked)


def test_few_rows_of_a_step_are_the_most_that_is_probed() -> None:
    known = facts()
    cost = ExchangeCost(name="all_to_all", fixed_s=1e-4, within_s=0.0, between_s=1e-9)
    _, asked = ask(
        ["all_to_all"], known, made_of({"all_to_all": cost}, ExpertSpeed(byte_s=1e-11, flop_s=0.0), known), most_rows=12
    )
    assert {probe.rows for probe in asked} == {1}


def test_nothing_that_was_fitted_is_negative() -> None:
    known = facts("EP4DP1[domains=2+2]")
    rng = np.random.default_rng(7)
    for _ in range(200):
        samples = [
            found(
                {EXCHANGE: float(rng.uniform(1e-4, 1e-2))},
                near=float(rng.integers(0, 10**6)),
                far=float(rng.integers(0, 10**6)),
            )
            for _ in range(int(rng.integers(1, 5)))
        ]
        cost = fit_exchange("all_to_all", samples, known)
        assert min(cost.fixed_s, cost.within_s, cost.between_s) >= 0 and cost.within_s > 0 and cost.between_s > 0


def test_experts_whose_weights_and_rows_cannot_be_told_apart_are_not_known() -> None:
    few, many = (found({EXPERTS: 1.0}, num_bytes=100.0, flops=flops) for flops in (10.0, 19.0))
    assert fit_experts([few]) is None and fit_experts([few, many]) is None
    speed = fit_experts([few, found({EXPERTS: 2.0}, num_bytes=100.0, flops=110.0)])
    assert speed is not None and (speed.byte_s, speed.flop_s) == (pytest.approx(0.009), pytest.approx(0.01))


# --- a day of 2026-11: benchmarks/overlap.py and exchange.py on two quiet cores, microseconds a layer -----------------
ROWS = (16, 128, 512, 2048)
MEASURED = {
    "all_to_all": {
        "none": (11472, 26221, 80555, 340510),
        SHARED: (11731, 25206, 76845, 326145),
        HALVES: (18372, 29484, 69790, 279105),
    },
    "hierarchical": {
        "none": (15160, 32961, 88185, 314254),
        SHARED: (12934, 29366, 84780, 307970),
        HALVES: (21503, 37015, 88779, 277469),
    },
}
# Bytes to the other domain and microseconds of an exchange alone, over the same slowed link.
ALONE = {
    "all_to_all": ((24616, 3593), (360968, 5929), (2596872, 26178)),
    "hierarchical": ((8264, 5973), (132104, 8353), (1056776, 28917)),
}


def two_cores(probe: LinkProbe) -> Found:
    """Answer with what was measured, between its sizes along straight lines of logarithms."""
    sent = rows_sent(probe.exchange, probe.rows, RankGrid(parse_topology(APART), 2), LOAD.top_k)
    far = LOAD.row_bytes * (sent.far_out + sent.far_back)
    known_bytes, known_us = zip(*ALONE[probe.exchange], strict=True)
    alone = 1e-6 * float(np.interp(far, known_bytes, known_us))
    if probe.what != LAYERS:
        return found({EXCHANGE: alone}, alone * probe.repeats, far=far)
    seconds = {
        way: 1e-6 * math.exp(np.interp(math.log(probe.rows), np.log(ROWS), np.log(MEASURED[probe.exchange][way])))
        for way in probe.overlaps
    }
    took = sum(seconds.values()) * probe.repeats
    num_bytes, flops = 16.0 * LOAD.expert_bytes, float(probe.rows * LOAD.top_k * LOAD.expert_flops)
    # What is left of a layer without overlap, but for the router and the shared expert.
    experts = 6.5e-3 + 60e-6 * probe.rows
    return found({**seconds, EXPERTS: experts}, took, num_bytes=num_bytes, flops=flops)


@pytest.mark.parametrize("name", list(MEASURED))
def test_what_is_chosen_of_what_was_measured_is_nearly_the_best(name: str) -> None:
    known = facts()
    links, _ = ask([name], known, two_cores)
    assert links.took_s <= 0.6
    for i, rows in enumerate(ROWS):
        chosen = choose_overlap(name, rows, replace(known, measured=links))
        ways = {way: us[i] for way, us in MEASURED[name].items()}
        assert ways[chosen] <= 1.03 * ways["none"], (rows, chosen, links)
        assert ways[chosen] <= 1.05 * min(ways.values()), (rows, chosen, links)


def test_reading_experts_twice_makes_halves_of_few_rows_slow() -> None:
    """Where an exchange hides as a whole, halves still lose while weights are what experts wait for."""
    cost = ExchangeCost(name="all_to_all", fixed_s=1e-3, within_s=0.0, between_s=1e-8, hidden=1.0)
    links = MeasuredLinks(exchanges=(cost,), experts=ExpertSpeed(byte_s=1e-10, flop_s=1e-13))
    known = facts(measured=links)
    assert [choose_overlap("all_to_all", rows, known) for rows in (2, 16)] == [SHARED, SHARED]
    assert choose_overlap("all_to_all", 512, known) == HALVES


def test_a_model_of_links_gets_what_was_measured() -> None:
    cost = ExchangeCost(name="all_to_all", fixed_s=4e-3, within_s=1e-9, between_s=0.0)
    ceilings = rank_ceilings(on_host=True, num_ranks=2, exchange=cost)
    assert ceilings.within == Link(bandwidth=pytest.approx(1e9), latency=2e-3)
    assert ceilings.between == HOST_CEILINGS.between, "nothing was sent over it"
    assert rank_ceilings(on_host=True, num_ranks=2).within == HOST_CEILINGS.within
    assert replace(cost, between_s=1e-8).link(BETWEEN) == Link(bandwidth=pytest.approx(1e8), latency=2e-3)
