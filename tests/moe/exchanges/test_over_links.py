"""Exchanges over links between threads, against the reference, bit for bit (P-EP-02, P-EP-03, P-EP-05)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moewe.moe.wide_ep.exchanges import Exchange, StepwiseExchange, ThreadHub
from moewe.moe.wide_ep.exchanges.group_shape import GroupShape, SlowRate
from moewe.moe.wide_ep.exchanges.joining import join_over_links
from tests.support.cases import ROUTING_CASES, RoutingCase, drawn_cases
from tests.support.exchanges import check_rank, partitions, shape_of
from tests.support.ranks import run_threads


def check(
    case: RoutingCase, shape: GroupShape, names: list[str], dtype: torch.dtype, width: int = 24, payload: str = "auto"
) -> None:
    """Run a case through exchanges over links, all ranks as threads."""
    hub = ThreadHub(shape.slot_ranges, shape=shape, timeout_s=30)

    def work(rank: int, _: Exchange) -> None:
        for name in names:
            exchange = join_over_links(name, shape, rank, lambda ranks: hub.link(ranks, rank), payload=payload)
            check_rank(case, StepwiseExchange([exchange]), rank, dtype, width, shape=shape, payload=payload)

    run_threads(hub, work)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [pytest.param(case, (torch.bfloat16, torch.float32)[i % 2], id=case.name) for i, case in enumerate(ROUTING_CASES)],
)
def test_bitwise_class_equals_reference(case: RoutingCase, dtype: torch.dtype) -> None:
    check(case, shape_of(case), ["all_to_all", "padded"], dtype)


DOMAINS = [
    pytest.param(case, sizes, id=f"{case.name}-{'+'.join(map(str, sizes))}")
    for case in ROUTING_CASES
    for sizes in partitions(case.num_ranks)
]


@pytest.mark.parametrize(("case", "sizes"), DOMAINS)
def test_hierarchical_equals_its_reference(case: RoutingCase, sizes: tuple[int, ...]) -> None:
    check(case, shape_of(case, sizes), ["hierarchical", "all_to_all"], torch.bfloat16)


@settings(max_examples=60, deadline=None)
@given(
    case=drawn_cases(),
    data=st.data(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    payload=st.sampled_from(["auto", "fp8"]),
)
def test_random_ids_equal_reference(case: RoutingCase, data: st.DataObject, dtype: torch.dtype, payload: str) -> None:
    shape = shape_of(case, data.draw(st.sampled_from(partitions(case.num_ranks))))
    check(case, shape, ["hierarchical", "padded", "all_to_all"], dtype, width=3, payload=payload)


def test_a_rank_may_own_no_slot() -> None:
    ids = [torch.tensor([[0, 3], [2, -1]], dtype=torch.int32), torch.tensor([[1, 0]], dtype=torch.int32)] * 2
    case = RoutingCase(name="bare_ranks", num_experts=4, ids=ids)
    for sizes in partitions(4):
        shape = GroupShape(slot_ranges=((0, 0), (0, 3), (3, 3), (3, 4)), domain_sizes=sizes)
        check(case, shape, ["hierarchical", "all_to_all", "padded"], torch.float32)


def test_rows_cross_once_a_domain_and_are_added_there() -> None:
    """A token with four experts in the other domain: one row goes, one comes back; flat, two go and four come back."""
    ids = [torch.tensor([[4, 5, 6, 7]], dtype=torch.int32), *[torch.empty(0, 4, dtype=torch.int32)] * 3]
    case = RoutingCase(name="far", num_experts=8, ids=ids)
    shape = shape_of(case, (2, 2))
    hub = ThreadHub(shape.slot_ranges, shape=shape, timeout_s=30)
    width, sent = 1024, {}

    def work(rank: int, _: Exchange) -> None:
        for name in ("hierarchical", "all_to_all"):
            exchange = join_over_links(name, shape, rank, lambda ranks: hub.link(ranks, rank))
            arrived = exchange.dispatch(torch.ones(len(ids[rank]), width), ids[rank])
            exchange.combine(arrived.rows, torch.ones(len(ids[rank]), 4), arrived.handle)
            sent[name, rank] = exchange.take_traffic().num_bytes[2] // (4 * width)

    run_threads(hub, work)
    assert [sent["hierarchical", rank] for rank in range(4)] == [1, 0, 1, 0]
    assert [sent["all_to_all", rank] for rank in range(4)] == [2, 0, 2, 2]


@pytest.mark.parametrize("name", ["all_to_all", "hierarchical", "padded"])
def test_an_id_that_names_no_slot_is_a_hard_error(name: str) -> None:
    shape = GroupShape(slot_ranges=((0, 8),))
    hub = ThreadHub(shape.slot_ranges)
    exchange = join_over_links(name, shape, 0, lambda ranks: hub.link(ranks, 0))
    with pytest.raises(RuntimeError, match="physical id 9 names no expert slot; there are 8"):
        exchange.dispatch(torch.ones(1, 4), torch.tensor([[0, 9]], dtype=torch.int32))


def test_a_slow_link_changes_no_bit() -> None:
    case = next(case for case in ROUTING_CASES if case.name == "uneven_slots")
    shape = replace(shape_of(case, (2, 2)), slow=SlowRate(megabytes_per_second=1000, delay_us=50))
    check(case, shape, ["hierarchical", "all_to_all", "padded"], torch.bfloat16)
