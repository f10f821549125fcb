"""Checks one rank of any exchange against the reference, bit for bit, bytes included.

Not a runner of ranks (ranks.py). Every rank computes the whole reference for itself.
Shapes: as in `RoutingCase`; rows are [T, width].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from moewe.moe.wide_ep.exchanges import Exchange, StagedExchange, StepwiseExchange
from moewe.moe.wide_ep.exchanges.group_shape import GroupShape
from moewe.moe.wide_ep.exchanges.padded import PaddedExchange
from moewe.moe.wide_ep.exchanges.reference import exchange_reference, legs_reference
from moewe.moe.wide_ep.exchanges.stages import Stages, in_turns
from moewe.moe.wide_ep.exchanges.traffic import IN_DOMAIN, SAME_RANK
from moewe.moe.wide_ep.exchanges.wire import make_payload
from moewe.moe.wide_ep.placement import linear_placement
from moewe.topologies.exchange_cost import capacity_of
from tests.support.cases import RoutingCase
from tests.support.numerics import assert_same

COUNT_BYTES = 8


def shape_of(case: RoutingCase, domain_sizes: Sequence[int] = ()) -> GroupShape:
    """The group of a case, experts placed in order."""
    ranges = linear_placement(1, case.num_experts, case.num_ranks).slot_ranges
    return GroupShape(slot_ranges=ranges, domain_sizes=tuple(domain_sizes))


def fake_expert(slot: int, rows: torch.Tensor) -> torch.Tensor:
    """Something cheap that depends on the slot and on every element, in the rows' dtype."""
    return rows * (1 + slot / 8) + 0.25


def fake_experts(rows: torch.Tensor, tokens_per_slot: torch.Tensor, first_slot: int) -> torch.Tensor:
    """`fake_expert` of the rows of all slots of a rank."""
    parts = rows.split(tokens_per_slot.tolist()) if len(tokens_per_slot) else ()
    computed = [fake_expert(first_slot + slot, part) for slot, part in enumerate(parts)]
    return torch.cat(computed) if computed else rows


def check_rank(
    case: RoutingCase,
    exchange: Exchange,
    rank: int,
    dtype: torch.dtype,
    width: int = 24,
    *,
    shape: GroupShape | None = None,
    payload: str = "auto",
) -> None:
    """Dispatch, compute and combine on one rank twice; compare with the reference bit for bit."""
    shape = shape or shape_of(case)
    for seed in (0, 5):
        inputs, weights = case.inputs(width, dtype, seed), case.weights(seed + 1)
        written = make_payload(payload)
        seen = [written.decode(written.encode(x), dtype, width) for x in inputs]
        domains = shape.domains if exchange.name == "hierarchical" else ()
        expected = exchange_reference(seen, case.ids, weights, shape.slot_ranges, fake_expert, domains=domains)[rank]
        bucket = max(len(ids) for ids in case.ids)
        if isinstance(exchange, StepwiseExchange):
            exchange.begin_step(exchange.name, bucket)
        dispatched = exchange.dispatch(inputs[rank], case.ids[rank])
        counts = dispatched.tokens_per_slot
        assert_same(counts, expected.arrived.tokens_per_slot)
        num_rows = int(counts.sum())
        assert dispatched.is_padded or dispatched.num_rows == num_rows
        assert_same(dispatched.rows[:num_rows], expected.arrived.rows_MD)
        rows = dispatched.rows.new_full((dispatched.num_rows, width), torch.nan)  # nobody may read what is void
        rows[:num_rows] = fake_experts(dispatched.rows[:num_rows], counts, shape.slot_ranges[rank][0])
        assert_same(exchange.combine(rows, weights[rank], dispatched.handle), expected.combined_TD)
        row_bytes = width * dtype.itemsize
        sent_bytes = written.encode(inputs[0]).shape[1]
        traffic = exchange.take_traffic()
        assert list(traffic.num_bytes) == expected_bytes(
            exchange.name, case, shape, rank, row_bytes=row_bytes, sent_bytes=sent_bytes
        )
        assert all(seconds >= 0 for seconds in traffic.seconds)
        assert sum(exchange.take_traffic().num_bytes) == 0


def staged_layer(
    exchange: StagedExchange, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, *, slots: Sequence[int],
    early: bool,
) -> Stages[torch.Tensor]:  # fmt: skip
    """A layer of some rows; `early` lets weights travel with them."""
    arrived = yield from exchange.dispatching(x, ids, weights if early else None)
    num_rows = int(arrived.tokens_per_slot.sum())
    rows = arrived.rows.new_full(arrived.rows.shape, torch.nan)
    rows[:num_rows] = fake_experts(arrived.rows[:num_rows], arrived.tokens_per_slot, slots[0])
    return (yield from exchange.combining(rows, weights, arrived.handle))


def check_in_halves(
    case: RoutingCase, exchange: StagedExchange, rank: int, shape: GroupShape, *, cuts: Sequence[int], early: bool
) -> list[str]:
    """Cut the rows of each rank at `cuts[rank]`, let both halves take turns, and compare with the whole in one.

    Returns what travelled after each turn.
    """
    width = 24
    inputs, weights = case.inputs(width, torch.bfloat16, 3), case.weights(4)
    domains = shape.domains if exchange.name == "hierarchical" else ()
    expected = exchange_reference(inputs, case.ids, weights, shape.slot_ranges, fake_expert, domains=domains)
    if isinstance(exchange, PaddedExchange):
        exchange.begin_step(max(max(cut, len(ids) - cut) for cut, ids in zip(cuts, case.ids, strict=True)))
    seen: list[str] = []
    flows = [
        staged_layer(
            exchange,
            inputs[rank][half],
            case.ids[rank][half],
            weights[rank][half],
            slots=shape.slot_ranges[rank],
            early=early,
        )
        for half in (slice(0, cuts[rank]), slice(cuts[rank], None))
    ]
    combined = in_turns(flows, seen.append)
    assert_same(torch.cat(combined), expected[rank].combined_TD)
    found = list(exchange.take_traffic().num_bytes)
    if exchange.name != "padded":  # its room depends on where rows are cut
        nothing = replace(case, ids=[ids[:0] for ids in case.ids])
        whole, counts = (
            expected_bytes(exchange.name, one, shape, rank, row_bytes=2 * width, sent_bytes=2 * width)
            for one in (case, nothing)
        )
        assert found == [a + b for a, b in zip(whole, counts, strict=True)]
    return seen


def expected_bytes(
    name: str, case: RoutingCase, shape: GroupShape, rank: int, *, row_bytes: int, sent_bytes: int
) -> list[int]:
    """Return what `rank` sends in one layer, by scope: rows with their choices, answers, counts."""
    found = [0, 0, 0]
    scopes, ids_bytes = shape.scopes(rank), 4 * case.top_k
    if name == "local":
        return found
    if name == "padded":
        room = capacity_of(max(len(ids) for ids in case.ids))
        for scope in scopes:
            found[scope] += room * (ids_bytes + sent_bytes) + room * case.top_k * row_bytes
        return found
    legs = legs_reference(case.ids, shape, hierarchical=name == "hierarchical")
    header = {"threads": 0, "shm": 0, "all_to_all": ids_bytes, "hierarchical": 4 + ids_bytes}[name]
    for source, target in legs.inside:
        found[scopes[target]] += header + sent_bytes if source == rank else 0
    for owner, target in legs.answers:
        found[scopes[target]] += row_bytes if owner == rank else 0
    for source, relay in legs.crossing:
        found[scopes[relay]] += ids_bytes + sent_bytes + ids_bytes if source == rank else 0  # its weights, too
        found[scopes[source]] += row_bytes if relay == rank else 0
    if name == "all_to_all":
        partners = [scope for scope in scopes if scope != SAME_RANK]
    elif name == "hierarchical":
        members = [*shape.rails[shape.rail_of(rank)], *shape.domains[shape.domain_of[rank]]]
        partners = [scopes[other] for other in members if other != rank]
    else:
        partners = []
    for scope in partners:
        found[scope] += COUNT_BYTES
    if name == "shm" and case.num_ranks > 1:
        found[IN_DOMAIN] += ids_bytes * len(case.ids[rank])
    return found


def partitions(num_ranks: int) -> list[tuple[int, ...]]:
    """Return all ways to cut consecutive ranks into domains."""
    if num_ranks == 0:
        return [()]
    return [(first, *rest) for first in range(1, num_ranks + 1) for rest in partitions(num_ranks - first)]
