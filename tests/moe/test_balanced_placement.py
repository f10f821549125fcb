"""Our placement: what holds for any experts, redundant slots, ranks and domains, and how even it is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moewe.moe.wide_ep import ExpertPlacement, synthetic
from moewe.moe.wide_ep.placement import (
    balanced_placement,
    coactivation,
    expert_load,
    first_placement,
    imbalance,
    linear_placement,
    traffic,
)
from moewe.moe.wide_ep.placement.replication import count_replicas
from moewe.moe.wide_ep.placement.spread import served_by, spread_over_domains
from moewe.topologies import RankGrid, make_topology

ONE_DOMAIN, TWO_DOMAINS = (0,) * 8, (0,) * 4 + (1,) * 4


@st.composite
def wanted(draw: st.DrawFn) -> tuple[np.ndarray, int, tuple[int, ...], int]:
    """Any load [L, E], redundant slots, domain of each rank, groups."""
    groups = draw(st.sampled_from([1, 1, 2, 4]))
    num_experts = groups * draw(st.integers(1, 12))
    num_redundant = draw(st.integers(0, 3 * num_experts))
    num_ranks = draw(st.integers(1, min(16, num_experts + num_redundant)))
    grid = RankGrid(make_topology(num_ranks), draw(st.integers(1, 16)))
    rows = draw(st.lists(st.sampled_from([0, 1, 2, 5, 40, 900]), min_size=num_experts, max_size=num_experts))
    load = np.array([rows, rows[::-1]], float)
    return load, num_redundant, grid.domains(), groups


def assert_sound(placement: ExpertPlacement, num_experts: int, num_redundant: int, num_ranks: int) -> None:
    sizes = [placement.num_local_slots(rank) for rank in range(num_ranks)]
    assert sum(sizes) == num_experts + num_redundant and max(sizes) - min(sizes) <= 1
    assert (placement.num_replicas >= 1).all()
    unavoidable = sum(sizes) > num_experts * num_ranks
    for layer in range(placement.num_layers):
        for rank in range(num_ranks):
            held = placement.local_experts(rank, layer).tolist()
            assert held == sorted(held)
            assert unavoidable or len(set(held)) == len(held), f"rank {rank} holds an expert twice: {held}"
        for expert in range(num_experts):
            slots = placement.logical_to_physical[layer, expert]
            slots = slots[: placement.num_replicas[layer, expert]]
            assert (placement.physical_to_logical[layer, slots] == expert).all()
    assert placement.num_replicas.sum(1).tolist() == [sum(sizes)] * placement.num_layers


@settings(max_examples=80, deadline=None)
@given(wanted())
def test_every_placement_is_sound(case: tuple[np.ndarray, int, tuple[int, ...], int]) -> None:
    load, num_redundant, domains, groups = case
    pairs = np.ones((2, load.shape[1], load.shape[1]))
    for coactive in (None, pairs * load[:, :, None] * load[:, None]):
        placement = balanced_placement(
            load, num_redundant=num_redundant, domains=domains, coactivation=coactive, num_groups=groups
        )
        assert_sound(placement, load.shape[1], num_redundant, len(domains))
        again = balanced_placement(
            load, num_redundant=num_redundant, domains=domains, coactivation=coactive, num_groups=groups
        )
        assert np.array_equal(again.physical_to_logical, placement.physical_to_logical), "the same load, the same slots"


@given(st.integers(1, 40), st.integers(0, 60), st.integers(1, 12), st.integers(1, 6), st.integers(0, 3))
def test_replicas_add_up_and_no_expert_has_more_than_ranks(
    num_experts: int, redundant: int, num_ranks: int, num_domains: int, seed: int
) -> None:
    load = np.random.default_rng(seed).integers(0, 100, num_experts).astype(float)
    replicas = count_replicas(load, num_experts + redundant, num_ranks, min(num_domains, num_ranks))
    assert replicas.sum() == num_experts + redundant and replicas.min() >= 1
    assert replicas.max() <= max(num_ranks, -(-(num_experts + redundant) // num_experts))


def test_an_expert_too_heavy_for_a_rank_is_cut_first_and_the_rest_goes_to_domains() -> None:
    """Four ranks of 8 tokens in the mean: experts of more than 4 are cut; then two slots are left."""
    load = np.array([8.0, 5, 3, 3, 3, 3, 3, 4])
    assert count_replicas(load, 12, 4, 2).tolist() == [2, 2, 2, 1, 1, 1, 1, 2], "the heaviest come to both domains"
    assert count_replicas(load, 12, 4, 1).tolist() == [3, 2, 1, 1, 1, 1, 1, 2], "the heaviest replicas are cut again"


ZIPF_WINDOWS = [synthetic.zipf(8192, 256, 8, seed=seed) for seed in range(3)]


def fit_and_judge(ids: np.ndarray, domains: tuple[int, ...], num_redundant: int) -> tuple[float, float]:
    """Fit on the first half of the tokens; return the imbalance of ours and of linear on the second."""
    half = len(ids) // 2
    num_ranks = len(domains)
    load = expert_load(ids[None, :half], 256)
    source = np.arange(len(ids) - half) % num_ranks
    ours = balanced_placement(load, num_redundant=num_redundant, domains=domains)
    linear = linear_placement(1, 256, domains=domains)
    return tuple(traffic(ids[half:], each, 0, source).imbalance for each in (ours, linear))  # type: ignore[return-value]


@pytest.mark.parametrize("domains", [ONE_DOMAIN, TWO_DOMAINS], ids=["one_domain", "two_domains"])
@pytest.mark.parametrize("ids", ZIPF_WINDOWS, ids=["seed0", "seed1", "seed2"])
def test_zipf_traffic_of_the_next_window_is_balanced(ids: np.ndarray, domains: tuple[int, ...]) -> None:
    """Zipf-1.2, 256 experts, top-8, EP8 with 64 redundant slots; fitted on 4,096 tokens, judged on the next 4,096."""
    ours, linear = fit_and_judge(ids, domains, 64)
    assert ours <= 1.15
    assert ours < linear


def test_uneven_slots_balance_as_well() -> None:
    """61 redundant slots on 7 ranks are 46 slots for some and 45 for others."""
    ours, _ = fit_and_judge(ZIPF_WINDOWS[0], (0,) * 7, 61)
    assert ours <= 1.15


def test_one_expert_in_every_top_k_is_shared_by_all_ranks() -> None:
    """P-EP-05: a router that sends each token to expert 7 too."""
    ids = synthetic.uniform(4096, 64, 2, seed=0)
    ids[:, 0] = 7
    ids[ids[:, 1] == 7, 1] = 8
    load = expert_load(ids[None], 64)
    source = np.arange(4096) % 4
    linear = traffic(ids, linear_placement(1, 64, 4), 0, source)
    ours = balanced_placement(load, num_redundant=4, domains=(0,) * 4)
    counted = traffic(ids, ours, 0, source)
    assert linear.imbalance > 2, "visible before"
    assert ours.num_replicas[0, 7] == 4
    assert counted.imbalance < 1.05
    assert counted.rows.sum() == linear.rows.sum() == 4096 * 2, "no row is lost"


def test_experts_that_nobody_chose_have_a_place() -> None:
    """P-EP-04: all tokens go to experts 0 and 1 of 8; the others keep a slot each, and the load of two ranks is cut."""
    placement = balanced_placement(np.array([[50.0, 50, 0, 0, 0, 0, 0, 0]]), num_redundant=4, domains=(0,) * 4)
    assert_sound(placement, 8, 4, 4)
    ids = np.tile(np.array([[0, 1]], np.int32), (400, 1))
    assert traffic(ids, placement, 0, np.arange(400) % 4).imbalance == 1.0


def test_a_layer_without_load_is_placed_as_if_all_experts_were_the_same() -> None:
    load = np.array([[0.0] * 8, [1.0] * 8])
    placement = balanced_placement(load, num_redundant=2, domains=(0, 0))
    assert np.array_equal(placement.physical_to_logical[0], placement.physical_to_logical[1])


def test_domains_with_many_redundant_slots_serve_hot_experts_themselves() -> None:
    """Two domains: rows that cross fall by more than half against placements without replicas."""
    ids = ZIPF_WINDOWS[0][:4096]
    source = np.arange(4096) % 8
    ours = balanced_placement(expert_load(ids[None], 256), num_redundant=64, domains=TWO_DOMAINS)
    ours_between = traffic(ids, ours, 0, source).rows_between
    assert ours_between < 0.5 * traffic(ids, linear_placement(1, 256, domains=TWO_DOMAINS), 0, source).rows_between


def test_experts_that_fire_together_share_a_domain() -> None:
    ids = synthetic.correlated(16_384, 64, 4, seed=5, team_size=8, pull=6.0)
    pairs = coactivation(ids[:8192], 64)[None]
    load = expert_load(ids[None, :8192], 64)
    source = np.arange(8192) % 8
    blind = balanced_placement(load, num_redundant=0, domains=TWO_DOMAINS)
    seeing = balanced_placement(load, num_redundant=0, domains=TWO_DOMAINS, coactivation=pairs)
    before, after = (traffic(ids[8192:], each, 0, source) for each in (blind, seeing))
    assert after.domain_copies < 0.75 * before.domain_copies
    assert after.imbalance < 1.15


@pytest.mark.parametrize("sees_pairs", [False, True], ids=["told_groups", "saw_pairs"])
def test_groups_of_the_router_share_a_domain(sees_pairs: bool) -> None:
    """8 groups on 4 domains, 2 groups a token; pairs tell the same as the number of groups does."""
    ids = synthetic.grouped(8192, 256, 8, seed=1, num_groups=8, top_groups=2, exponent=0.3)
    domains = tuple(rank // 4 for rank in range(16))
    load = expert_load(ids[None], 256)
    pairs = coactivation(ids, 256)[None] if sees_pairs else None
    placement = balanced_placement(load, num_redundant=0, domains=domains, num_groups=8, coactivation=pairs)
    blind = balanced_placement(load, num_redundant=0, domains=domains)
    domain_of = placement.rank_domain[placement.slot_rank[placement.logical_to_physical[0, :, 0]]]
    largest = [np.bincount(domain_of[group * 32 : group * 32 + 32]).max() for group in range(8)]
    assert sum(largest) >= 0.85 * 256, "groups are cut only where a domain would have too much to do"
    source = np.arange(8192) % 16
    ours, theirs = (traffic(ids, each, 0, source) for each in (placement, blind))
    assert ours.domain_copies < 0.75 * theirs.domain_copies
    assert ours.imbalance < 1.15


def test_a_domain_without_a_replica_is_served_by_all_that_have_one() -> None:
    part = np.array([0.5, 0.25, 0.25])
    served = served_by(np.array([[1, 0, 0], [2, 1, 0], [1, 1, 1]]), part)
    assert served.tolist() == [[1, 0, 0], [0.625, 0.375, 0], [0.5, 0.25, 0.25]]


def test_replicas_of_an_expert_go_to_different_domains() -> None:
    copies = spread_over_domains(
        np.array([8.0, 4, 1, 1, 1, 1]), np.array([3, 2, 1, 1, 1, 1]), np.array([3, 3, 3]), np.array([2, 2, 2])
    )
    assert copies[0].tolist() == [1, 1, 1] and copies[1].max() == 1
    assert copies.sum(0).tolist() == [3, 3, 3]


def test_the_first_placement_is_linear_without_redundant_slots() -> None:
    first = first_placement(3, 10, domains=(0,) * 4)
    assert np.array_equal(first.physical_to_logical, linear_placement(3, 10, 4).physical_to_logical)
    assert first_placement(0, 0, num_redundant=4, domains=(0,)).num_slots == 0
    with_spares = first_placement(3, 10, num_redundant=3, domains=(0, 0, 1, 1))
    assert_sound(with_spares, 10, 3, 4)
    assert with_spares.domains == (0, 0, 1, 1)


def test_imbalance_is_over_ranks() -> None:
    """Rows [ranks] of each layer, not of slots: the axis that others got wrong."""
    rows = np.array([[4, 2, 2, 0], [1, 1, 1, 1], [0, 0, 0, 0]])
    assert imbalance(rows).tolist() == [2.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("load", "options", "says"),
    [
        (np.ones(8), {}, r"load must be \[MoE layers, experts\], got shape \(8,\)"),
        (np.array([[1.0, np.nan]]), {}, "finite numbers"),
        (np.array([[1.0, -1.0]]), {}, "finite numbers of at least 0"),
        (np.ones((1, 4)), {"num_redundant": -1}, "num_redundant must be at least 0, got -1"),
        (
            np.ones((1, 4)),
            {"domains": (0,) * 7, "num_redundant": 2},
            "7 ranks cannot share 4 experts and 2 .* use 1 to 6",
        ),
        (np.ones((1, 4)), {"num_groups": 3}, "num_groups must divide the 4 experts, got 3"),
        (np.ones((1, 4)), {"coactivation": np.ones((4, 4))}, r"coactivation must be \(1, 4, 4\), got \(4, 4\)"),
    ],
)
def test_what_does_not_fit_is_refused(load: np.ndarray, options: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        balanced_placement(load, **{"num_redundant": 0, "domains": (0, 0), **options})  # type: ignore[arg-type]
