"""Every exchange against the reference, bit for bit (P-EP-02, P-EP-03, P-EP-05)."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from hypothesis import given, settings

from moewe.moe.wide_ep import LocalExchange, ThreadHub, linear_placement
from moewe.moe.wide_ep.exchanges.reference import combine_reference, dispatch_reference
from tests.support.cases import ROUTING_CASES, RoutingCase, drawn_cases, routing_cases
from tests.support.exchanges import check_rank, fake_experts
from tests.support.numerics import assert_same
from tests.support.ranks import run_threads


@routing_cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_threads_equal_reference(case: RoutingCase, dtype: torch.dtype) -> None:
    hub = ThreadHub(linear_placement(1, case.num_experts, case.num_ranks).slot_ranges, timeout_s=30)
    run_threads(hub, lambda rank, exchange: check_rank(case, exchange, rank, dtype))


@pytest.mark.parametrize("case", [c for c in ROUTING_CASES if c.num_ranks == 1], ids=lambda c: c.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_local_equals_reference(case: RoutingCase, dtype: torch.dtype) -> None:
    check_rank(case, LocalExchange(case.num_experts), 0, dtype)


@routing_cases
def test_one_rank_equals_many(case: RoutingCase) -> None:
    """The tokens of all ranks give the same bits at EP1 as in their own topology."""
    dtype = torch.bfloat16
    inputs, weights = case.inputs(24, dtype), case.weights()
    ranges = linear_placement(1, case.num_experts, case.num_ranks).slot_ranges
    arrived = dispatch_reference(inputs, case.ids, ranges)
    outputs = [fake_experts(a.rows_MD, a.tokens_per_slot, ranges[r][0]) for r, a in enumerate(arrived)]
    expected = torch.cat(combine_reference(outputs, weights, arrived))
    local = LocalExchange(case.num_experts)
    dispatched = local.dispatch(torch.cat(inputs), torch.cat(case.ids))
    rows = fake_experts(dispatched.rows, dispatched.tokens_per_slot, 0)
    assert_same(local.combine(rows, torch.cat(weights), dispatched.handle), expected)


@settings(max_examples=60, deadline=None)
@given(case=drawn_cases())
def test_random_ids_equal_reference(case: RoutingCase) -> None:
    hub = ThreadHub(linear_placement(1, case.num_experts, case.num_ranks).slot_ranges, timeout_s=30)
    run_threads(hub, lambda rank, exchange: check_rank(case, exchange, rank, torch.float32, width=3))


def test_combine_starts_from_positive_zero_and_ignores_what_was_dropped() -> None:
    local = LocalExchange(2)
    ids = torch.tensor([[0, -1], [-1, -1], [-1, 1]], dtype=torch.int32)
    dispatched = local.dispatch(torch.ones(3, 2), ids)
    weights = torch.tensor([[1.0, torch.nan], [torch.nan, torch.inf], [torch.nan, 1.0]])
    out = local.combine(torch.tensor([[-0.0, 1.0], [2.0, torch.nan]]), weights, dispatched.handle)
    assert_same(out[:2], torch.tensor([[0.0, 1.0], [0.0, 0.0]]))
    assert out[2, 0] == 2 and out[2, 1].isnan()


@pytest.mark.parametrize("bad", [8, 1 << 20])
def test_an_id_that_names_no_slot_is_a_hard_error(bad: int) -> None:
    with pytest.raises(RuntimeError, match=f"physical id {bad} names no expert slot; there are 8"):
        LocalExchange(8).dispatch(torch.ones(1, 4), torch.tensor([[0, bad]], dtype=torch.int32))


def test_abort_wakes_the_waiting_ranks_with_the_reason() -> None:
    hub = ThreadHub(((0, 1), (1, 2)))
    timer = threading.Timer(0.05, hub.abort, ("rank 1 failed: no memory",))
    timer.start()
    with pytest.raises(RuntimeError, match="rank 1 failed: no memory"):
        hub.rank(0).dispatch(torch.ones(1, 4), torch.zeros(1, 1, dtype=torch.int32))
    with pytest.raises(RuntimeError, match="rank 1 failed: no memory"):
        hub.rank(1).dispatch(torch.ones(1, 4), torch.zeros(1, 1, dtype=torch.int32))


def test_a_rank_that_does_not_come_ends_the_wait() -> None:
    hub = ThreadHub(((0, 1), (1, 2)), timeout_s=0.05)
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=r"exchange between threads broken: a rank did not come within 0\.05 s"):
        hub.rank(0).dispatch(torch.ones(1, 4), torch.zeros(1, 1, dtype=torch.int32))
    assert time.monotonic() - begin < 10
