"""Rounds of moves: what ranks are told and when, one switch for all or none, and what is shown of it."""

from __future__ import annotations

from concurrent.futures import Executor, Future
from typing import Any

import numpy as np
import pytest

from moewe.moe.wide_ep.balancing import Decision, Move, Planner, logical_load
from moewe.moe.wide_ep.balancing.expected import expected_slot_rows
from moewe.moe.wide_ep.placement import first_placement
from moewe.runtime.messages import DropMoves, Message, MovesPrepared, PrepareMoves
from moewe.runtime.metrics.stats import encode_counters
from moewe.runtime.plan import RankPlan, StepHeader, StepPlan, unpack
from moewe.runtime.rebalancing.balancer import COUNT_EVERY_S, RETRY_S, Balancer
from moewe.telemetry import RankCounters
from tests.support.harness import Inline
from tests.support.layer_models import Bold

START = first_placement(2, 6, num_redundant=2, domains=(0, 0))  # slots 0-3 on rank 0, 4-7 on rank 1


class FullestSlot(Bold):
    """A layer takes a second for each row of its fullest slot."""

    def seconds(self, rows: np.ndarray, slots: np.ndarray) -> float:
        return float(np.bincount(slots.ravel(), rows.ravel()).max())


class Ranks:
    num_ranks = 2

    def __init__(self) -> None:
        self.sent: list[tuple[int, Message]] = []

    def send(self, rank: int, message: Message) -> None:
        self.sent.append((rank, message))


class Later(Executor):
    """Runs nothing by itself."""

    def __init__(self) -> None:
        self.futures: list[Future[Any]] = []  # of decisions that were asked for

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if args[-1] is None:  # news only
            future.set_result(None)
        else:
            self.futures.append(future)
        return future


class Stage:
    """A balancer with a clock, ranks that only listen, and steps."""

    def __init__(self, least_tokens: int = 10**9, decider: Executor | None = None) -> None:
        self.now, self.step = 100.0, 0
        self.ranks, self.decider = Ranks(), decider or Later()
        planner = Planner(start=START, model=FullestSlot(START.slot_ranges))
        self.balancer = Balancer(
            self.ranks, planner, top_k=1, expert_bytes=100, least_tokens=least_tokens, decider=self.decider,
            clock=lambda: self.now,
        )  # fmt: skip
        self.counters = [RankCounters(2, 4) for _ in range(2)]

    def mark(self) -> StepHeader:
        header = StepHeader(step=self.step, epoch=0, kind="decode", bucket=1, exchange="threads")
        self.step += 1
        return self.balancer.mark(StepPlan(header=header, ranks=(RankPlan(), RankPlan()))).header

    def count(self, step: int, tokens: int = 1) -> None:
        for counters in self.counters:
            counters.begin_step("decode", tokens)
            counters.add_expert_tokens(np.full((2, 4), tokens))
            counters.end_step(0.5)
        self.balancer.counted(step, [encode_counters(counters) for counters in self.counters])

    def report(self, *errors: str, placement: int = 1) -> None:
        for rank, error in enumerate(errors):
            self.balancer.prepared(MovesPrepared(rank=rank, placement=placement, error=error, seconds=0.5 + rank))


def swap(layer: int = 1, a: int = 1, b: int = 6) -> Decision:
    slots = START.physical_to_logical.copy()
    slots[layer, [a, b]] = slots[layer, [b, a]]
    moves = tuple(Move(layer=layer, slot=slot, expert=int(slots[layer, slot])) for slot in (a, b))
    return Decision(
        moves=moves, placement=START.with_layers(slots, np.ones((2, 6)), [layer]), transfer_s=1.0, saved_s=0.25
    )


def test_counters_are_asked_for_now_and_then() -> None:
    stage = Stage()
    assert [stage.mark().counts for _ in range(3)] == [True, False, False]
    stage.now += COUNT_EVERY_S
    assert [stage.mark().counts for _ in range(2)] == [True, False]


def test_every_rank_is_told_its_own_slots_and_table() -> None:
    stage, decision = Stage(), swap()
    stage.balancer.begin(decision)
    assert [rank for rank, _ in stage.ranks.sent] == [0, 1]
    moved = START.physical_to_logical[1]
    for rank, message in stage.ranks.sent:
        assert isinstance(message, PrepareMoves) and message.placement == 1 and message.layers == (1,)
        own = {0: [1, 1, moved[6]], 1: [1, 2, moved[1]]}[rank]  # MoE layer, slot of the rank, expert
        assert unpack(message.moves).tolist() == own
        assert unpack(message.tables).tolist() == decision.placement.slot_of[1, rank].tolist()


def test_all_switch_at_one_step_behind_a_step_that_counts() -> None:
    stage, decision = Stage(), swap()
    stage.mark()
    stage.balancer.begin(decision)
    assert [(header.placement, header.counts) for header in (stage.mark(), stage.mark())] == [(0, False)] * 2
    stage.report("", "")
    headers = [stage.mark() for _ in range(3)]
    assert [header.placement for header in headers] == [0, 1, 1]
    assert [header.counts for header in headers] == [True, True, False]
    assert stage.balancer.stats().placement == 1 and stage.balancer.stats().rounds == 0
    stage.count(headers[0].step)
    assert not stage.balancer.is_open, "what was counted is of the old placement"
    stage.count(headers[1].step)
    stats = stage.balancer.stats()
    assert stage.balancer.is_open and (stats.rounds, stats.moves, stats.failures, stats.move_seconds) == (1, 2, 0, 1.5)
    assert unpack(stats.slots).tolist() == START.physical_to_logical[0].tolist(), "the first layer has not changed"


def test_one_rank_that_fails_keeps_all_where_they_are(caplog: pytest.LogCaptureFixture) -> None:
    stage = Stage()
    stage.balancer.begin(swap())
    stage.ranks.sent.clear()
    stage.report("", "OSError: the disk is gone")
    assert stage.ranks.sent == [(0, DropMoves(placement=1)), (1, DropMoves(placement=1))]
    assert "rank 1 cannot prepare" in caplog.text and "the disk is gone" in caplog.text
    assert stage.balancer.is_open and stage.balancer.stats().failures == 1
    assert [stage.mark().placement for _ in range(3)] == [0, 0, 0]
    stage.balancer.begin(swap())
    stage.report("", "", placement=2)
    assert [stage.mark().placement for _ in range(2)] == [0, 2], "numbers are not used again"


def test_windows_are_decided_on_in_a_thread_and_tries_wait_after_failures() -> None:
    stage = Stage(least_tokens=8)
    for step in range(3):
        stage.count(step)
    assert len(stage.decider.futures) == 1, "one decision at a time"
    stage.now += 1.0
    stage.decider.futures[0].set_result(None)
    stage.count(3)
    assert len(stage.decider.futures) == 1, "deciding took a second, so the next one waits"
    stage.now += 60.0
    stage.count(4)
    stage.decider.futures[1].set_result(swap())
    stage.mark()
    assert isinstance(stage.ranks.sent[-1][1], PrepareMoves)
    stage.report("", "broken")
    for wait in (RETRY_S, 2 * RETRY_S):
        number = len(stage.decider.futures)
        stage.now += wait - 1.0
        stage.count(stage.step)
        assert len(stage.decider.futures) == number
        stage.now += 1.0
        stage.count(stage.step)
        assert len(stage.decider.futures) == number + 1
        stage.decider.futures[-1].set_exception(ValueError("a bug"))
        stage.mark()
    assert stage.balancer.stats().failures == 3, "a decision that fails ends nothing but itself"


def test_what_was_promised_and_what_came_of_it() -> None:
    """The model of time here is rows of the fullest slot: one move, then a window of 4 steps."""
    stage, decision = Stage(least_tokens=32, decider=Inline()), swap()
    stage.balancer.begin(decision)
    stage.report("", "")
    stage.mark()
    stage.count(stage.mark().step)
    for step in range(2, 5):
        stage.count(step)
    stats = stage.balancer.stats()
    assert stats.predicted_seconds == pytest.approx(0.25 * 4)
    load = logical_load(np.ones((2, 8), np.int64), decision.placement.physical_to_logical, 6)
    fullest = [4 * expected_slot_rows(one, load).max(1).sum() for one in (START, decision.placement)]
    assert stats.realised_seconds == pytest.approx(fullest[0] - fullest[1])


def test_a_clock_compares_steps_from_the_first_of_the_new_placement_on() -> None:
    stage = Stage()
    for step in range(3):
        stage.mark()
        stage.count(step)
    stage.balancer.begin(swap())
    stage.report("", "")
    assert stage.mark().counts, "the last step of the old placement"
    stage.count(3)
    assert stage.mark().placement == 1
    assert stage.balancer.stats().clocked_seconds == 0.0
    for counters in stage.counters:
        counters.begin_step("decode", 1)
        counters.end_step(0.125)
    stage.balancer.counted(4, [encode_counters(counters) for counters in stage.counters])
    assert stage.balancer.stats().clocked_seconds == pytest.approx(0.5 - 0.125)
