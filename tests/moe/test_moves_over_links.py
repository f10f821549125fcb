"""Moves of groups that span domains: a slow link counts, a fast one does not, and a router's groups stay together."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from moewe.moe.wide_ep import synthetic
from moewe.moe.wide_ep.balancing import Decision, LoadSteps, PhaseLoad, PolicyOptions, choose_moves
from moewe.moe.wide_ep.balancing.candidates import LayerSlots, into_domains
from moewe.moe.wide_ep.balancing.expected import rows_by_origin
from moewe.moe.wide_ep.balancing.ledger import window_seconds
from moewe.moe.wide_ep.placement import (
    ExpertPlacement,
    Traffic,
    expert_load,
    first_placement,
    linear_placement,
    placement_of,
    traffic,
)
from moewe.topologies.cost import Ceilings, Link
from moewe.topologies.layer_cost import ExpertSize, LayerCost, TokenRows

PAIRS = (0, 0, 1, 1)
SLOW, FAST = 1e6, 1e15  # bytes/s between domains; a row has 10 bytes, and takes 1 us of arithmetic


def model_of(placement: ExpertPlacement, bandwidth: float, token: TokenRows) -> LayerCost:
    ceilings = Ceilings(
        memory_bandwidth=1e12,
        flops=1e12,
        within=Link(bandwidth=FAST, latency=0.0),
        between=Link(bandwidth=bandwidth, latency=0.0),
    )
    size = ExpertSize(expert_bytes=1000, row_bytes=10, flops=1e6)
    return LayerCost(size, ceilings, placement.slot_ranges, placement.domains, token=token)


def placed(experts: list[int], load: np.ndarray) -> ExpertPlacement:
    """Return experts in the slots of four ranks, as many on each, in two domains."""
    own = len(experts) // 4
    ranges = tuple((rank * own, (rank + 1) * own) for rank in range(4))
    return placement_of(np.array([experts]), len(load), ranges, domains=PAIRS, load=load[None])


def decide(
    placement: ExpertPlacement, load: np.ndarray, bandwidth: float, *, most: int, origin: np.ndarray | None = None
) -> Decision:
    window = (PhaseLoad(load=load[None], steps=1, origin=origin),)
    options = PolicyOptions(transfer_s=1e-6, horizon_steps=100, max_moves=most)
    return choose_moves(
        placement, [window] * 2, model=model_of(placement, bandwidth, TokenRows(top_k=1)), options=options
    )


def rows_between(placement: ExpertPlacement, load: np.ndarray) -> float:
    """Return the rows that cross, of a load [E] of which every rank brings an equal part."""
    target = placement.rank_domain[placement.slot_rank[placement.slot_of[0]]]
    return float(rows_by_origin(load, placement.num_ranks)[target != placement.rank_domain[:, None]].sum())


def test_a_move_in_the_domain_wins_over_one_that_makes_rows_cross() -> None:
    """Expert 0 stands on ranks 0 and 2, one a domain; rank 0 is fullest, rank 3 a bit emptier than rank 1."""
    load = 1000.0 * np.array([60, 41, 41, 22, 37.5, 37.5, 35, 35, 22, 35, 35])
    placement = placed([0, 1, 2, 3, 4, 5, 0, 6, 7, 8, 9, 10], load)
    before = rows_between(placement, load)
    slow, fast = (decide(placement, load, bandwidth, most=2) for bandwidth in (SLOW, FAST))
    assert {move.slot // 3 for move in slow.moves if move.expert == 0} == {1}, slow.moves
    assert {move.slot // 3 for move in fast.moves if move.expert == 0} == {3}, fast.moves
    assert rows_between(slow.placement, load) == pytest.approx(before)
    assert rows_between(fast.placement, load) == pytest.approx(before + 30_000)
    assert slow.saved_s == pytest.approx(7e-3) and fast.saved_s == pytest.approx(8e-3)


# Expert 0 stands twice in domain 0, cold expert 17 twice in domain 1; ranks are even.
EVEN = np.array([800.0, *[650] * 8, *[750] * 8, 10])
EVEN_SLOTS = [0, 1, 2, 3, 4, 0, 5, 6, 7, 8, 17, 9, 10, 11, 12, 17, 13, 14, 15, 16]


def test_a_replica_in_each_domain_pays_where_the_link_is_slow() -> None:
    placement = placed(EVEN_SLOTS, EVEN)
    assert decide(placement, EVEN, FAST, most=1).moves == ()
    slow = decide(placement, EVEN, SLOW, most=1)
    assert [move.expert for move in slow.moves] == [0] and slow.moves[0].slot in (10, 15), slow.moves
    assert rows_between(placement, EVEN) - rows_between(slow.placement, EVEN) == pytest.approx(400)


def test_replicas_go_where_tokens_come_from() -> None:
    placement = placed(EVEN_SLOTS, EVEN)
    for origin, slots in (([0.0, 0.0, 0.5, 0.5], (10, 20)), ([0.5, 0.5, 0.0, 0.0], (0, 10))):
        (move,) = decide(placement, EVEN, SLOW, most=1, origin=np.array(origin)).moves
        assert slots[0] <= move.slot < slots[1], (origin, move)


def test_what_chance_makes_of_even_loads_brings_no_replica() -> None:
    domain = np.array([0, 0, 0, 1, 1, 1])
    slots = LayerSlots(experts=np.array([0, 1, 2, 0, 3, 4]), rank=np.arange(6), domain=domain, num_experts=5)
    load = np.array([1000, 1000, 1000, 1100, 1000])
    assert into_domains(slots, load, noise=6.0) == []
    assert into_domains(slots, load, noise=2.0) == [(50.0, ((0, 3),))]
    twice = LayerSlots(experts=np.array([0, 1, 0, 2, 3, 4]), rank=np.arange(6), domain=domain, num_experts=5)
    kept = [pair[0] for pair in into_domains(twice, load, noise=6.0)]
    assert kept == [550.0, 550.0], "the other replica of expert 0 serves its domain"


E, K, W, WINDOW = 64, 4, 8, 2048
TWO = (0,) * 4 + (1,) * 4
REDUNDANT = first_placement(1, E, num_redundant=E // 2, domains=TWO)
OPTIONS = PolicyOptions(transfer_s=1e-5, horizon_steps=100)
MAKERS = {
    "uniform": (synthetic.uniform, {}),
    "zipf": (synthetic.zipf, {}),
}


@cache
def routing(name: str, number: int = 12) -> np.ndarray:
    maker, options = MAKERS[name]
    return maker(number * WINDOW, E, K, seed=4, **options)


def windows(ids: np.ndarray) -> list[LoadSteps]:
    parts = ids.reshape(-1, WINDOW, K)
    return [(PhaseLoad(load=expert_load(part[None], E), steps=1),) for part in parts]


def crossing(placement: ExpertPlacement, ids: np.ndarray) -> Traffic:
    return traffic(ids, placement, 0, np.arange(len(ids)) % W)


def settled(placement: ExpertPlacement, ids: np.ndarray, model: LayerCost) -> ExpertPlacement:
    """Return what stands after all decisions that ids bring, whatever they may lose."""
    loads = windows(ids)
    for i in range(3, len(loads) + 1):
        placement = choose_moves(placement, loads[i - 3 : i], model=model, options=OPTIONS).placement
    return placement


@pytest.mark.parametrize("token", [TokenRows(top_k=K), TokenRows(top_k=K, together=True)], ids=["rows", "copies"])
def test_moves_over_a_slow_link_bring_rows_home(token: TokenRows) -> None:
    ids, model = routing("zipf"), model_of(REDUNDANT, SLOW, token)
    after = settled(REDUNDANT, ids[:-WINDOW], model)
    was, now = (crossing(placement, ids[-WINDOW:]) for placement in (REDUNDANT, after))
    assert now.rows_between < 0.8 * was.rows_between and now.domain_copies < was.domain_copies, (was, now)
    (judged,) = windows(ids[-WINDOW:])
    assert window_seconds(after, judged, model) < 0.95 * window_seconds(REDUNDANT, judged, model)


def test_uniform_routing_moves_nothing_over_a_slow_link() -> None:
    ids, token = routing("uniform", 6), TokenRows(top_k=K)
    assert settled(REDUNDANT, ids, model_of(REDUNDANT, SLOW, token)) is REDUNDANT


def test_over_a_fast_link_it_is_the_fullest_rank_that_counts() -> None:
    ids = routing("zipf")
    fast = settled(REDUNDANT, ids[:-WINDOW], model_of(REDUNDANT, FAST, TokenRows(top_k=K)))
    was, now = (crossing(placement, ids[-WINDOW:]) for placement in (REDUNDANT, fast))
    assert now.imbalance < 1.2 < was.imbalance, (was, now)


def test_groups_of_the_router_are_not_scattered_over_domains() -> None:
    """Eight groups of which a token uses two, two groups in each of four domains."""
    domains = tuple(np.repeat(range(4), 2).tolist())
    placement = linear_placement(1, E, W, domains=domains)
    ids = synthetic.grouped(8 * WINDOW, E, K, seed=1, num_groups=8, top_groups=2)
    token = TokenRows(top_k=K, together=True, num_groups=8, top_groups=2)
    before = crossing(placement, ids[-WINDOW:]).domain_copies
    after = {}
    for bandwidth in (SLOW, FAST):
        now = settled(placement, ids[:-WINDOW], model_of(placement, bandwidth, token))
        after[bandwidth] = crossing(now, ids[-WINDOW:]).domain_copies
    assert after[SLOW] <= before * 1.01, (after, before)
    assert after[FAST] > before * 1.05, "which is what happens where nobody asks"
