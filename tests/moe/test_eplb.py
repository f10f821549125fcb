"""The baseline: DeepSeek's EPLB as published."""

from __future__ import annotations

import numpy as np
import pytest

from moewe.moe.wide_ep.placement import eplb_placement
from moewe.moe.wide_ep.placement.eplb import pack, replicate


def test_packs_are_of_equal_counts_and_filled_lightest_first() -> None:
    assert pack(np.array([9.0, 1, 8, 2, 3, 7]), 2) == [[0, 4, 3], [2, 5, 1]]
    assert pack(np.array([9.0, 1.0, 1.0, 1.0]), 2) == [[0, 3], [1, 2]], "a full pack takes no more"


def test_the_heaviest_replica_is_cut_again_and_again() -> None:
    assert replicate(np.array([12.0, 5, 4]), 6).tolist() == [0, 1, 2, 0, 0, 1]


def test_global_without_groups() -> None:
    """Two ranks, one expert with half of the load: each rank gets a replica of it."""
    placement = eplb_placement(np.array([[8.0, 1, 2, 3, 0]]), num_redundant=1, domains=(0, 0))
    assert placement.num_replicas.tolist() == [[2, 1, 1, 1, 1]]
    assert [sorted(placement.local_experts(rank).tolist()) for rank in (0, 1)] == [[0, 3, 4], [0, 1, 2]]


def test_hierarchical_keeps_groups_and_their_replicas_in_a_node() -> None:
    load = np.array([[10.0, 1, 1, 1, 5, 5, 2, 2]])
    placement = eplb_placement(load, num_redundant=4, domains=(0, 0, 1, 1), num_groups=4)
    domain = placement.rank_domain[placement.slot_rank]
    for group in range(4):
        held = np.isin(placement.physical_to_logical[0], [2 * group, 2 * group + 1])
        assert len(set(domain[held].tolist())) == 1
    assert np.bincount(domain).tolist() == [6, 6]


def test_groups_that_nodes_do_not_divide_are_placed_globally() -> None:
    domains = (0, 0, 1, 1, 2, 2)
    placement = eplb_placement(np.arange(8.0)[None], num_redundant=4, domains=domains, num_groups=4)
    assert placement.num_replicas.sum() == 12 and (placement.num_replicas >= 1).all()


def test_uneven_slots_are_beyond_it() -> None:
    with pytest.raises(ValueError, match="equal slots on every rank, got 9 slots for 2 ranks"):
        eplb_placement(np.ones((1, 8)), num_redundant=1, domains=(0, 0))
