"""`triton_combine` against its reference, bit by bit."""

from __future__ import annotations

import pytest
import torch

from moewe.moe.kernels.combine import triton_combine
from moewe.moe.wide_ep.exchanges.reference import combine_reference, dispatch_reference
from tests.support.cases import RoutingCase, routing_cases
from tests.support.numerics import assert_same
from tests.support.poisoned import assert_untouched
from tests.support.routed import routed


def rows_of(number: int, width: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    return torch.randn(number, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


@routing_cases
def test_combine_equals_its_reference(case: RoutingCase) -> None:
    for ids in (some[:9] for some in case.ids):
        choice = routed(ids, case.num_experts)
        arrived = dispatch_reference([rows_of(len(ids), 33)], [ids], [(0, case.num_experts)])
        rows = rows_of(len(arrived[0].rows_MD), 33)
        (expected,) = combine_reference([rows], [choice.weights], arrived)
        assert_same(assert_untouched(triton_combine, rows, choice.weights, choice.rows), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [1, 1040])
def test_shared_experts_are_added_with_a_rounding_of_their_own(dtype: torch.dtype, width: int) -> None:
    ids = torch.tensor([[1, 0, 2], [2, -1, 0]], dtype=torch.int32)
    choice, rows = routed(ids, 3), rows_of(5, width, dtype)
    shared = rows_of(2, width, dtype, 1)
    plain = triton_combine(rows, choice.weights, choice.rows)
    assert_same(triton_combine(rows, choice.weights, choice.rows, shared=shared), plain + shared)
