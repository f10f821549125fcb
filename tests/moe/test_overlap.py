"""The MoE layer while rows travel: the answers of one thing after another, and weights counted as often as read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from moewe.moe.layer import MoELayer
from moewe.moe.layer_counts import PassCounts
from moewe.moe.wide_ep import Exchange, ThreadHub, linear_placement
from moewe.moe.wide_ep.exchanges import GroupShape, SlowRate, StepwiseExchange
from moewe.moe.wide_ep.exchanges.joining import join_over_links
from moewe.moe.wide_ep.exchanges.links import Link, Pending
from moewe.telemetry import COMPONENTS, RankCounters
from moewe.topologies.exchange_choice import OVER_LINKS
from moewe.topologies.overlap_choice import HALVES, NOTHING, SHARED
from tests.moe.test_layer import (
    FFN_WIDTH,
    NUM_EXPERTS,
    ONE_EXPERT,
    WIDTH,
    Switches,
    all_weights,
    expected,
    layer,
)
from tests.support.numerics import assert_near
from tests.support.ranks import run_threads

PLAIN = Switches()
LENGTHS = [(9, 4), (1, 0), (0, 0), (5, 0, 1, 2), (0, 1, 0, 0), (7, 8, 3, 12)]


def run(
    name: str, inputs: list[torch.Tensor], overlaps: tuple[str, ...], *, switches: Switches = PLAIN,
    slow: SlowRate | None = None, shared: bool = True,
) -> list[list[tuple[torch.Tensor, MoELayer, RankCounters]]]:  # fmt: skip
    """The layer of every rank under each of `overlaps` in turn, ranks in two domains."""
    weights, num_ranks = all_weights(shared=shared), len(inputs)
    placement = linear_placement(2, NUM_EXPERTS, num_ranks)
    sizes = (num_ranks - num_ranks // 2, num_ranks // 2)
    shape = GroupShape(slot_ranges=placement.slot_ranges, domain_sizes=sizes, slow=slow)
    hub = ThreadHub(shape.slot_ranges, shape=shape, timeout_s=30)

    def work(rank: int, _: Exchange) -> list[tuple[torch.Tensor, MoELayer, RankCounters]]:
        exchange = StepwiseExchange([join_over_links(name, shape, rank, lambda ranks: hub.link(ranks, rank))])
        bucket = max(map(len, inputs))
        results = []
        for overlap in overlaps:
            made, counters = layer(weights, placement, rank, exchange, switches=switches)
            exchange.begin_step(name, -(-bucket // 2) if overlap == HALVES else bucket)
            output = made(inputs[rank], overlap)
            counts = PassCounts([made])
            counts.add(counters, counts.left(), num_rows=len(inputs[rank]))
            results.append((output, made, counters))
        return results

    return run_threads(hub, work)


@pytest.mark.parametrize("shared", [False, True], ids=["routed", "shared"])
@pytest.mark.parametrize("name", OVER_LINKS)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_every_overlap_equals_the_global_view(lengths: tuple[int, ...], name: str, shared: bool) -> None:
    torch.manual_seed(3)
    inputs = [torch.randn(length, WIDTH) for length in lengths]
    wanted = expected(all_weights(shared=shared), inputs)
    for ranks, want in zip(run(name, inputs, (NOTHING, SHARED, HALVES), shared=shared), wanted, strict=True):
        for output, _, _ in ranks:
            assert_near(output, want, format="float32")
        counts = [made.tokens_per_slot.tolist() for _, made, _ in ranks]
        assert counts[0] == counts[1] == counts[2]


@pytest.mark.parametrize("name", OVER_LINKS)
def test_a_slow_link_and_a_row_that_is_weighed_first(name: str) -> None:
    torch.manual_seed(4)
    inputs = [torch.randn(length, WIDTH) for length in (6, 0, 1, 9)]
    slow, switches = SlowRate(megabytes_per_second=50, delay_us=100), Switches(ONE_EXPERT, weigh_input=True)
    wanted = expected(all_weights(shared=True), inputs, switches)
    for ranks, want in zip(run(name, inputs, (SHARED, HALVES), switches=switches, slow=slow), wanted, strict=True):
        for output, _, _ in ranks:
            assert_near(output, want, format="float32")


class LoggedLink:
    """A link that notes what is under way: `sent` when rows leave, `there` when somebody has waited for others'."""

    def __init__(self, link: Link, log: list[str]) -> None:
        self._link, self._log = link, log

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)

    def start(self, *rows: Any, **how: Any) -> Pending:
        return self._noted(self._link.start(*rows, **how))

    def gather(self, rows: torch.Tensor) -> Pending:
        return self._noted(self._link.gather(rows))

    def _noted(self, pending: Pending) -> Pending:
        self._log.append("sent")

        def wait() -> torch.Tensor:
            arrived = pending()
            self._log.append("there")
            return arrived

        return wait


@pytest.mark.parametrize("name", OVER_LINKS)
def test_shared_experts_run_while_rows_travel(name: str) -> None:
    weights, inputs = all_weights(shared=True), [torch.randn(length, WIDTH) for length in (4, 3)]
    placement = linear_placement(2, NUM_EXPERTS, 2)
    shape = GroupShape(slot_ranges=placement.slot_ranges, domain_sizes=(1, 1))
    hub = ThreadHub(shape.slot_ranges, shape=shape, timeout_s=30)

    def work(rank: int, _: Exchange) -> list[list[str]]:
        logs: list[list[str]] = []
        log: list[str] = []

        def link(ranks: Sequence[int]) -> Any:
            return LoggedLink(hub.link(ranks, rank), log)

        exchange = StepwiseExchange([join_over_links(name, shape, rank, link)])
        for overlap in (NOTHING, SHARED):
            made, _ = layer(weights, placement, rank, exchange)
            run_shared = made._shared_experts
            made._shared_experts = lambda x, run=run_shared: log.append("shared") or run(x)  # type: ignore[method-assign]
            exchange.begin_step(name, 4)
            log.clear()
            made(inputs[rank], overlap)
            logs.append(list(log))
        return logs

    for one_after_another, meanwhile in run_threads(hub, work):
        assert one_after_another.count("shared") == meanwhile.count("shared") == 1
        assert one_after_another[one_after_another.index("shared") - 1] == "there", "all rows had arrived"
        before, after = meanwhile[: meanwhile.index("shared")], meanwhile[meanwhile.index("shared") + 1 :]
        assert before[-1] == "sent" and after[0] == "there", meanwhile
        assert before.count("sent") > before.count("there"), "rows were on their way, and nobody had waited for them"


@pytest.mark.parametrize("name", OVER_LINKS)
def test_experts_of_one_half_run_while_the_other_travels(name: str) -> None:
    weights, inputs = all_weights(), [torch.randn(length, WIDTH) for length in (4, 3)]
    placement = linear_placement(2, NUM_EXPERTS, 2)
    shape = GroupShape(slot_ranges=placement.slot_ranges, domain_sizes=(1, 1))
    hub = ThreadHub(shape.slot_ranges, shape=shape, timeout_s=30)

    def work(rank: int, _: Exchange) -> list[str]:
        log: list[str] = []
        exchange = StepwiseExchange(
            [join_over_links(name, shape, rank, lambda ranks: LoggedLink(hub.link(ranks, rank), log))]  # type: ignore[arg-type, return-value]
        )
        made, _ = layer(weights, placement, rank, exchange)
        run_experts = made._run_experts
        made._run_experts = lambda rows: log.append("experts") or run_experts(rows)  # type: ignore[method-assign]
        exchange.begin_step(name, 2)
        made(inputs[rank], HALVES)
        return log

    for log in run_threads(hub, work):
        first, second = (i for i, what in enumerate(log) if what == "experts")
        for at in (first, second):
            under_way = log[:at].count("sent") - log[:at].count("there")
            assert under_way > 0, f"rows of the other half, or answers to it, were on their way: {log}"


def test_weights_that_both_halves_hit_are_read_twice() -> None:
    """The same row over and over hits the same experts in both halves; a row alone has no second half."""
    torch.manual_seed(5)
    row = torch.randn(1, WIDTH)
    for length, times in ((8, 2), (1, 1)):
        ranks = run("all_to_all", [row.expand(length, -1).contiguous(), row[:0]], (SHARED, HALVES))
        found = [
            [dict(zip(COMPONENTS, counters.bytes_moved.sum(0).tolist())) for _, _, counters in results]
            for results in ranks
        ]
        routed = [sum(rank[i]["routed"] for rank in found) for i in (0, 1)]
        assert routed == [3 * 3 * WIDTH * FFN_WIDTH * 4, times * 3 * 3 * WIDTH * FFN_WIDTH * 4]  # top-3
        assert found[0][1]["shared"] == found[0][0]["shared"] and found[0][1]["dense"] == found[0][0]["dense"]


def test_an_exchange_without_stages_cannot_overlap() -> None:
    placement = linear_placement(2, NUM_EXPERTS, 1)
    hub = ThreadHub(placement.slot_ranges)
    made, _ = layer(all_weights(), placement, 0, hub.rank(0))
    with pytest.raises(AssertionError, match="threads has no stages"):
        made(torch.randn(2, WIDTH), SHARED)
