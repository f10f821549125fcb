"""`triton_permute` against the reference of dispatch, exactly."""

from __future__ import annotations

import pytest
import torch

from moewe.moe.kernels.permute import triton_permute
from moewe.moe.wide_ep.exchanges.reference import dispatch_reference
from tests.support.cases import RoutingCase, random_ids, routing_cases
from tests.support.numerics import assert_same
from tests.support.poisoned import assert_untouched


def check(ids: torch.Tensor, num_slots: int) -> None:
    (arrived,) = dispatch_reference([torch.zeros(len(ids), 1)], [ids], [(0, num_slots)])
    rows = torch.full(ids.shape, -1, dtype=torch.int32)
    for row, (_, token, k) in enumerate(arrived.origins):
        rows[token, k] = row
    tokens = torch.tensor([token for _, token, _ in arrived.origins], dtype=torch.int32)
    permuted = []
    assert_untouched(lambda there: permuted.append(triton_permute(there, num_slots)) or there, ids)
    assert_same(permuted[0].rows, rows)
    assert_same(permuted[0].tokens_per_slot, arrived.tokens_per_slot)
    assert_same(permuted[0].row_tokens[: len(tokens)], tokens)
    untouched = permuted[0].row_tokens[len(tokens) :]
    assert_same(untouched, torch.full_like(untouched, torch.iinfo(torch.int32).max))


@routing_cases
def test_choices_are_sorted_by_slot(case: RoutingCase) -> None:
    for ids in case.ids:
        check(ids, case.num_experts)


@pytest.mark.parametrize(("num_tokens", "top_k"), [(43, 3), (65, 8), pytest.param(300, 8, marks=pytest.mark.slow)])
def test_many_blocks_of_choices_keep_their_order(num_tokens: int, top_k: int) -> None:
    ids = random_ids(num_tokens, top_k, 16)
    ids[::7, 0] = -1
    check(ids, 16)
