"""Exchanges taken stage by stage: two halves in turns give the bits of the whole, and ranks agree about every turn."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moewe.moe.wide_ep.exchanges import Exchange, SlowRate, ThreadHub
from moewe.moe.wide_ep.exchanges.group_shape import GroupShape
from moewe.moe.wide_ep.exchanges.joining import join_over_links
from moewe.moe.wide_ep.exchanges.stages import ANSWERS, COUNTS, ROWS, finish, in_turns
from moewe.moe.wide_ep.exchanges.traffic import TrafficMeter
from moewe.topologies.exchange_choice import OVER_LINKS
from tests.support.cases import ROUTING_CASES, RoutingCase, drawn_cases
from tests.support.exchanges import check_in_halves, partitions, shape_of
from tests.support.pairwise import each_pair
from tests.support.ranks import run_threads

TURNS = {"all_to_all": [COUNTS, ROWS, ANSWERS], "hierarchical": [COUNTS, ROWS, ANSWERS], "padded": [ROWS, ANSWERS]}


def check(case: RoutingCase, shape: GroupShape, name: str, *, cuts: Sequence[int], early: bool) -> None:
    """Cut the rows of each rank at `cuts[rank]`, let both halves take turns, and compare with the whole in one."""
    hub = ThreadHub(shape.slot_ranges, shape=shape, timeout_s=30)

    def work(rank: int, _: Exchange) -> None:
        exchange = join_over_links(name, shape, rank, lambda ranks: hub.link(ranks, rank))
        assert check_in_halves(case, exchange, rank, shape, cuts=cuts, early=early) == TURNS[name]

    run_threads(hub, work)


def halved(case: RoutingCase) -> list[int]:
    return [(len(ids) + 1) // 2 for ids in case.ids]


@each_pair(
    case={case.name: case for case in ROUTING_CASES},
    name=OVER_LINKS,
    early={"weights behind": False, "weights with rows": True},
)
def test_halves_in_turns_give_the_bits_of_the_whole(case: RoutingCase, name: str, early: bool) -> None:
    sizes = (case.num_ranks - case.num_ranks // 2, case.num_ranks // 2) if case.num_ranks > 1 else ()
    check(case, shape_of(case, sizes), name, cuts=halved(case), early=early)


@settings(max_examples=40, deadline=None)
@given(case=drawn_cases(), data=st.data(), name=st.sampled_from(OVER_LINKS), early=st.booleans())
def test_any_cut_gives_the_bits_of_the_whole(case: RoutingCase, data: st.DataObject, name: str, early: bool) -> None:
    """Also where one rank has nothing in a half, or nothing at all, and the others have."""
    cuts = [data.draw(st.integers(0, len(ids))) for ids in case.ids]
    check(case, shape_of(case, data.draw(st.sampled_from(partitions(case.num_ranks)))), name, cuts=cuts, early=early)


def test_a_slow_link_changes_no_bit() -> None:
    case = next(case for case in ROUTING_CASES if case.name == "uneven_slots")
    shape = replace(shape_of(case, (2, 2)), slow=SlowRate(megabytes_per_second=1000, delay_us=50))
    for name in OVER_LINKS:
        check(case, shape, name, cuts=halved(case), early=True)


def test_turns_run_a_stage_of_each_and_then_what_is_to_be_done_meanwhile() -> None:
    log: list[str] = []

    def stages(name: str) -> Iterator[str]:
        for travelling in (ROWS, ANSWERS):
            log.append(f"{name} starts {travelling}")
            yield travelling
        log.append(f"{name} ends")
        return name

    assert in_turns([stages("a"), stages("b")], lambda what: log.append(f"while {what}")) == ["a", "b"]
    assert log == [
        "a starts rows", "b starts rows", "while rows",
        "a starts answers", "b starts answers", "while answers",
        "a ends", "b ends",
    ]  # fmt: skip
    assert finish(stages("c")) == "c" and log[-1] == "c ends"


def test_what_others_do_between_stages_is_not_booked(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    meter, cpu = TrafficMeter(), torch.device("cpu")

    def pending() -> torch.Tensor:
        now[0] += 8.0
        return torch.zeros(1)

    def stages() -> Iterator[str]:
        now[0] += 1.0
        yield ROWS
        now[0] += 2.0
        meter.waiting(pending, 2, cpu)()
        return "done"

    walked = meter.stages(stages(), cpu)
    assert next(walked) == ROWS
    now[0] += 100.0
    assert finish(walked) == "done"
    assert meter.take().seconds == (3.0, 0.0, 8.0)
