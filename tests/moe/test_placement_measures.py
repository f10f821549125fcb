"""What is counted of routing under a placement, by brute force; and the synthetic routing that it is counted on."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from moewe.moe.wide_ep import synthetic
from moewe.moe.wide_ep.placement import (
    above_chance,
    balanced_placement,
    coactivation,
    expert_load,
    linear_placement,
    round_robin_placement,
    traffic,
)
from moewe.moe.wide_ep.placement.measures import Traffic

DOMAINS = (0, 0, 0, 1, 1, 2)


def by_hand(ids: np.ndarray, placement, source: np.ndarray) -> Traffic:
    """The same by loops over tokens and choices."""
    rows = np.zeros(placement.num_ranks, np.int64)
    within = between = domain_copies = rows_between = 0
    domain = placement.rank_domain
    for row, own in zip(ids.tolist(), source.tolist()):
        ranks = [int(placement.slot_rank[placement.slot_of[0, own, expert]]) for expert in row if expert >= 0]
        for rank in ranks:
            rows[rank] += 1
            rows_between += domain[rank] != domain[own]
        others = set(ranks) - {own}
        within += sum(domain[rank] == domain[own] for rank in others)
        between += sum(domain[rank] != domain[own] for rank in others)
        domain_copies += len({int(domain[rank]) for rank in others} - {int(domain[own])})
    return Traffic(
        num_tokens=len(ids),
        rows=rows,
        copies_within=within,
        copies_between=between,
        domain_copies=domain_copies,
        rows_between=rows_between,
    )


@pytest.mark.parametrize("num_redundant", [0, 5])
def test_traffic_is_what_a_loop_counts(num_redundant: int) -> None:
    ids = synthetic.zipf(300, 24, 4, seed=2)
    ids[::7, 1] = -1
    source = np.random.default_rng(0).integers(6, size=300)
    load = expert_load(ids[None], 24)
    placement = balanced_placement(load, num_redundant=num_redundant, domains=DOMAINS)
    counted, wanted = traffic(ids, placement, 0, source), by_hand(ids, placement, source)
    assert counted.rows.tolist() == wanted.rows.tolist()
    assert counted.rows.sum() == (ids >= 0).sum(), "P-EP-03: every choice is computed exactly once"
    for name in ("num_tokens", "copies_within", "copies_between", "domain_copies", "rows_between"):
        assert getattr(counted, name) == getattr(wanted, name), name
    flat = (wanted.copies_between + wanted.rows_between) * 100 / 300
    assert counted.bytes_between(100) == pytest.approx(flat)
    assert counted.bytes_between(100, hierarchical=True) == pytest.approx(2 * wanted.domain_copies * 100 / 300)


def test_no_tokens_are_no_traffic() -> None:
    counted = traffic(np.empty((0, 2), np.int32), linear_placement(1, 4, 2), 0, np.empty(0, np.int64))
    assert counted.rows.tolist() == [0, 0] and counted.imbalance == 1.0 and counted.bytes_between(8) == 0


def test_round_robin_deals_experts_in_turn() -> None:
    placement = round_robin_placement(2, 10, 4)
    assert [placement.local_experts(rank, 1).tolist() for rank in range(4)] == [[0, 4, 8], [1, 5, 9], [2, 6], [3, 7]]
    assert (placement.num_replicas == 1).all()


def test_pairs_are_counted_and_held_against_chance() -> None:
    ids = np.array([[0, 1], [1, 0], [2, 3], [0, -1]], np.int32)
    pairs = coactivation(ids, 4)
    assert pairs.tolist() == [[0, 2, 0, 0], [2, 0, 0, 0], [0, 0, 0, 1], [0, 0, 1, 0]]
    excess = above_chance(pairs)
    assert excess[0, 1] > 0 > excess[0, 2] and excess[0, 0] == 0
    assert not above_chance(np.zeros((3, 3))).any()


GENERATORS: dict[str, Callable[..., np.ndarray]] = {
    name: getattr(synthetic, name) for name in ("uniform", "zipf", "shifting", "correlated", "grouped")
}


@pytest.mark.parametrize("name", GENERATORS)
def test_generators_are_seeded_and_give_distinct_experts(name: str) -> None:
    make = GENERATORS[name]
    ids = make(5000, 64, 6, seed=3)
    assert ids.shape == (5000, 6) and ids.dtype == np.int32
    assert ids.min() >= 0 and ids.max() < 64
    assert (np.diff(np.sort(ids, 1), axis=1) > 0).all(), "no expert twice in a row"
    assert np.array_equal(make(5000, 64, 6, seed=3), ids) and not np.array_equal(make(5000, 64, 6, seed=4), ids)
    assert make(0, 64, 6, seed=3).shape == (0, 6)


def test_uniform_is_even_and_zipf_is_not() -> None:
    even, skewed = (
        expert_load(make(20_000, 64, 6, seed=0)[None], 64)[0] for make in (synthetic.uniform, synthetic.zipf)
    )
    assert even.max() < 1.2 * even.mean()
    assert skewed.max() > 5 * skewed.mean()


def test_the_hot_set_shifts_after_a_period() -> None:
    ids = synthetic.shifting(6000, 64, 4, seed=0, period=3000)
    first, second = expert_load(np.stack([ids[:3000], ids[3000:]]), 64)
    same = expert_load(np.stack([ids[:1500], ids[1500:3000]]), 64)
    assert np.corrcoef(*same)[0, 1] > 0.95 > 0.5 > np.corrcoef(first, second)[0, 1]


def test_teams_fire_together() -> None:
    ids = synthetic.correlated(8000, 64, 4, seed=0, team_size=8, pull=6.0)
    excess = above_chance(coactivation(ids, 64))
    assert sorted((excess > 0).sum(1).tolist())[32] <= 8, "an expert has its team, and few others"


def test_grouped_routing_touches_few_groups() -> None:
    ids = synthetic.grouped(4000, 64, 6, seed=0, num_groups=8, top_groups=3)
    assert max(len(set(row)) for row in (ids // 8).tolist()) <= 3
