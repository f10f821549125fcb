"""Placements: who owns which expert, and how ids become slots."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moewe.moe.wide_ep import ExpertPlacement, assign_replicas, linear_placement, replica_table


def replicated() -> ExpertPlacement:
    """Three experts over two ranks with three slots each; expert 0 stands in slots 0, 3 and 5."""
    return ExpertPlacement(
        physical_to_logical=np.array([[0, 1, 2, 0, 1, 0]], np.int32),
        logical_to_physical=np.array([[[0, 3, 5], [1, 4, -1], [2, -1, -1]]], np.int32),
        num_replicas=np.array([[3, 2, 1]], np.int32),
        slot_ranges=((0, 3), (3, 6)),
    )


def test_linear_placement_divides_unevenly() -> None:
    placement = linear_placement(3, 10, 4)
    assert placement.slot_ranges == ((0, 3), (3, 6), (6, 8), (8, 10))
    assert [placement.local_experts(r).tolist() for r in range(4)] == [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]
    assert placement.num_slots == placement.num_experts == 10
    assert [placement.num_local_slots(r) for r in range(4)] == [3, 3, 2, 2]
    assert placement.logical_to_physical.shape == (3, 10, 1)


@given(st.integers(1, 70), st.integers(1, 8), st.integers(1, 3))
def test_linear_placement_owns_each_expert_once(num_experts: int, num_ranks: int, num_layers: int) -> None:
    num_ranks = min(num_ranks, num_experts)
    placement = linear_placement(num_layers, num_experts, num_ranks)
    owned = [e for rank in range(num_ranks) for e in placement.local_experts(rank, num_layers - 1).tolist()]
    assert owned == list(range(num_experts))
    sizes = [placement.num_local_slots(rank) for rank in range(num_ranks)]
    assert max(sizes) - min(sizes) <= 1


def test_a_dense_model_has_an_empty_placement() -> None:
    placement = linear_placement(0, 0, 1)
    assert placement.slot_ranges == ((0, 0),)
    assert placement.num_slots == 0


def test_more_ranks_than_experts_are_refused() -> None:
    with pytest.raises(ValueError, match=r"EP=9 .* experts \(8\); use EP <= 8"):
        linear_placement(2, 8, 9)


def test_assign_replicas_is_the_identity_on_a_linear_placement() -> None:
    ids = torch.tensor([[0, 7], [3, -1]], dtype=torch.int32)
    physical = assign_replicas(ids, linear_placement(2, 8, 2), 1, 1)
    assert physical.dtype == torch.int32
    assert physical.tolist() == ids.tolist()


def test_assign_replicas_spreads_ranks_over_replicas() -> None:
    ids = torch.tensor([[0, 1], [2, -1]], dtype=torch.int32)
    assert assign_replicas(ids, replicated(), 0, 0).tolist() == [[0, 1], [2, -1]]
    assert assign_replicas(ids, replicated(), 0, 1).tolist() == [[3, 4], [2, -1]]


def test_an_expert_without_owner_maps_to_minus_one() -> None:
    placement = ExpertPlacement(
        physical_to_logical=np.array([[0, 0]], np.int32),
        logical_to_physical=np.array([[[0], [-1]]], np.int32),
        num_replicas=np.array([[1, 0]], np.int32),
        slot_ranges=((0, 2),),
    )
    assert replica_table(placement, 0, 0).tolist() == [0, -1, -1]
