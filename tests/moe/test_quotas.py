"""Which replica each rank uses: nearest first, shared out evenly, moved off full ranks."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from moewe.moe.wide_ep import ExpertPlacement, assign_replicas
from moewe.moe.wide_ep.placement import placement_of
from moewe.moe.wide_ep.placement.quotas import choose_replicas, share_out


def ranks_used(placement: ExpertPlacement, expert: int) -> list[int]:
    """The rank that each rank sends rows of `expert` to, in layer 0."""
    return placement.slot_rank[placement.slot_of[0, :, expert]].tolist()


def placed(slots: list[list[int]], num_experts: int, domains: tuple[int, ...] = (), load=None) -> ExpertPlacement:
    """One layer, a list of experts for each rank."""
    stops = np.cumsum([len(held) for held in slots]).tolist()
    ranges = tuple(zip([0, *stops[:-1]], stops))
    flat = np.array([[expert for held in slots for expert in held]], np.int32)
    load = None if load is None else np.array([load], float)
    return placement_of(flat, num_experts, ranges, domains=domains, load=load)


def test_a_rank_uses_its_own_replica_and_the_others_share_evenly() -> None:
    placement = placed([[0, 1], [2, 3], [4, 5], [0, 6], [7, 8], [9, 10]], 11)
    used = ranks_used(placement, 0)
    assert used[0] == 0 and used[3] == 3
    assert sorted(used) == [0, 0, 0, 3, 3, 3]


def test_a_domain_with_a_replica_serves_itself() -> None:
    domains = (0, 0, 0, 1, 1, 1)
    placement = placed([[1, 2], [0, 3], [4, 5], [6, 7], [8, 0], [9, 10]], 11, domains)
    assert ranks_used(placement, 0) == [1, 1, 1, 4, 4, 4]


def test_domains_without_a_replica_go_where_fewest_are_served() -> None:
    domains = (0, 0, 1, 1, 2, 2)
    placement = placed([[0, 1], [2, 3], [0, 4], [0, 5], [6, 7], [8, 9]], 10, domains)
    used = ranks_used(placement, 0)
    assert used[:4] == [0, 0, 2, 3]
    assert sorted(used[4:]) == [2, 3], "rank 0 serves two ranks already, the others one each"


def test_the_odd_rank_goes_to_the_emptier_holder() -> None:
    """Three ranks, two replicas: rank 2 asks the one that has less to do otherwise."""
    heavy_at_0 = placed([[0, 1], [0, 2], [3, 4]], 5, load=[6, 3, 1, 3, 2])
    heavy_at_1 = placed([[0, 1], [0, 2], [3, 4]], 5, load=[6, 1, 3, 3, 2])
    assert ranks_used(heavy_at_0, 0) == [0, 1, 1]
    assert ranks_used(heavy_at_1, 0) == [0, 1, 0]


def test_a_full_rank_gives_rows_away_that_it_could_compute_itself() -> None:
    """Rank 0 has all of expert 1 to do, so its own rows of expert 0 go to rank 1."""
    placement = placed([[0, 1], [0, 2]], 3, load=[4, 10, 1])
    assert ranks_used(placement, 0) == [1, 1]


def test_rows_leave_their_domain_only_for_a_large_gain() -> None:
    domains = (0, 1)
    slightly = placed([[0, 1], [0, 2]], 3, domains, load=[2, 20, 17])
    near = placed([[0, 1], [0, 2]], 3, load=[2, 20, 17])
    badly = placed([[0, 1], [0, 2]], 3, domains, load=[4, 10, 1])
    assert ranks_used(slightly, 0) == [0, 1] and ranks_used(near, 0) == [1, 1]
    assert ranks_used(badly, 0) == [1, 1]


def test_two_replicas_on_one_rank_are_no_trouble() -> None:
    placement = placed([[0, 0, 0], [1, 2, 3]], 4)
    assert ranks_used(placement, 0) == [0, 0]


def test_an_expert_without_owner_stays_without() -> None:
    placement = placed([[0, 1], [0, 1]], 3)
    assert placement.slot_of[0, :, 2].tolist() == [-1, -1]
    assert placement.num_replicas.tolist() == [[2, 2, 0]]


@st.composite
def layers(draw: st.DrawFn) -> tuple[np.ndarray, int, int, np.ndarray, np.ndarray]:
    """Any slots of one layer: experts of slots, E, W, domain of each rank, load."""
    num_ranks = draw(st.integers(1, 9))
    num_experts = draw(st.integers(1, 12))
    per_rank = draw(st.integers(1, 4))
    slots = draw(
        st.lists(st.integers(0, num_experts - 1), min_size=per_rank * num_ranks, max_size=per_rank * num_ranks)
    )
    domains = np.sort(np.array(draw(st.lists(st.integers(0, 3), min_size=num_ranks, max_size=num_ranks))))
    load = draw(st.lists(st.integers(0, 50), min_size=num_experts, max_size=num_experts))
    return np.array(slots, np.int32), num_experts, per_rank, domains, np.array(load, float)


@given(layers())
def test_each_rank_is_sent_to_a_slot_that_holds_the_expert(layer) -> None:
    slots, num_experts, per_rank, domains, load = layer
    num_ranks = len(domains)
    ranges = tuple((rank * per_rank, (rank + 1) * per_rank) for rank in range(num_ranks))
    placement = placement_of(slots[None], num_experts, ranges, domains=tuple(domains.tolist()), load=load[None])
    table = placement.slot_of[0]
    assert table.shape == (num_ranks, num_experts)
    for expert in range(num_experts):
        held = np.flatnonzero(slots == expert)
        for rank in range(num_ranks):
            assert table[rank, expert] in held if held.size else table[rank, expert] == -1
    again = choose_replicas(placement.logical_to_physical[0], placement.slot_rank, domains, load)
    assert np.array_equal(again, table), "the same arguments give the same tables"


@given(st.lists(st.integers(0, 3), min_size=1, max_size=9), st.data())
def test_ranks_that_ask_are_shared_out_nearest_first(domains: list[int], data: st.DataObject) -> None:
    rank_domain = np.array(sorted(domains))
    num_ranks = len(rank_domain)
    held_by = np.array(sorted(data.draw(st.sets(st.integers(0, num_ranks - 1), min_size=1))))
    busy = np.array(data.draw(st.lists(st.integers(0, 9), min_size=num_ranks, max_size=num_ranks)), float)
    picks = share_out(held_by, rank_domain, busy)
    served = np.bincount(picks, minlength=len(held_by))
    for rank, pick in enumerate(picks):
        holders_near = rank_domain[held_by] == rank_domain[rank]
        if rank in held_by:
            assert held_by[pick] == rank
        elif holders_near.any():
            assert holders_near[pick]
    for domain in set(domains):
        inside = [served[i] for i in np.flatnonzero(rank_domain[held_by] == domain)]
        if inside and set(rank_domain[held_by]) == set(domains):
            assert max(inside) - min(inside) <= 1, "replicas that are equally near serve equally many"


def test_assign_replicas_is_a_lookup_of_the_table() -> None:
    placement = placed([[0, 1], [2, 3], [0, 4], [5, 6]], 7, (0, 0, 1, 1))
    ids = torch.tensor([[0, 3], [6, -1], [4, 0]], dtype=torch.int32)
    for rank in range(4):
        physical = assign_replicas(ids, placement, 0, rank)
        assert physical.dtype == torch.int32
        wanted = [[-1 if e < 0 else int(placement.slot_of[0, rank, e]) for e in row] for row in ids.tolist()]
        assert physical.tolist() == wanted
