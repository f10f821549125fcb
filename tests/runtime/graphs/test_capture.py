"""Capturing and replaying over a step of a few operations, on a device that records."""

from __future__ import annotations

import threading

import pytest
import torch

from moewe.moe.wide_ep.exchanges import Exchange, GroupShape, PaddedExchange, StagedExchange
from moewe.moe.wide_ep.exchanges.joining import join_over_links
from moewe.moe.wide_ep.exchanges.links import LoneLink
from moewe.moe.wide_ep.exchanges.rehearsed_link import RehearsedLink
from moewe.moe.wide_ep.exchanges.stages import ROWS, Stages, in_turns
from moewe.moe.wide_ep.exchanges.thread_links import ThreadMeetings
from moewe.runtime.graphs.capture import DecodeGraphs, StepTensors
from moewe.runtime.graphs.ladder import GraphLadder, GraphShape
from tests.support.numerics import assert_same
from tests.support.rank_calls import call_ranks
from tests.support.recorded_graphs import RecordedLink, RecordingDevice

WIDTH, VOCAB, SLOTS = 4, 6, 4
LADDER = GraphLadder(rows=(2, 4), tokens=(8, 16), exchange="padded")
GROUP = GroupShape(slot_ranges=((0, 2), (2, 4)))


class Step:
    """Rows of static numbers, sent to experts that double them; twice themselves and their negative come on top."""

    def __init__(self, exchange: Exchange, log: list[str]) -> None:
        self.numbers = torch.zeros(4)
        self.slots = torch.full((4, 1), -1, dtype=torch.int32)
        self._exchange, self._log = exchange, log

    def empty(self) -> None:
        self.slots.fill_(-1)

    def __call__(self, shape: GraphShape) -> StepTensors:
        self._log.append(f"{shape.rows}x{shape.tokens}")
        x, slots = self.numbers[: shape.rows, None].expand(-1, WIDTH).contiguous(), self.slots[: shape.rows]
        if hasattr(self._exchange, "begin_step"):
            self._exchange.begin_step(shape.rows)
        shared: list[torch.Tensor] = []

        def meanwhile(travelling: str) -> None:
            if travelling == ROWS:
                shared.append(x.neg())

        assert isinstance(self._exchange, StagedExchange)
        (routed,) = in_turns([_layer(self._exchange, x, slots)], meanwhile)
        hidden = 2 * x + routed + shared[0]
        logits = hidden @ torch.arange(WIDTH * VOCAB, dtype=torch.float32).view(WIDTH, VOCAB)
        finite = torch.isfinite(hidden).all(-1)
        return StepTensors(hidden=hidden, logits=logits, best=logits.argmax(-1), finite=finite, well=finite)


def _layer(exchange: StagedExchange, x: torch.Tensor, slots: torch.Tensor) -> Stages[torch.Tensor]:
    arrived = yield from exchange.dispatching(x, slots)
    return (yield from exchange.combining(2 * arrived.rows, torch.ones(len(x), 1), arrived.handle))


def graphs(exchange: Exchange, device: RecordingDevice | None = None) -> tuple[DecodeGraphs, Step, list[str]]:
    log: list[str] = []
    step = Step(exchange, log)
    times = iter([10.0, 12.5])
    made = DecodeGraphs(LADDER, device or RecordingDevice(), step, exchange, clock=lambda: next(times))
    return made, step, log


@pytest.fixture(autouse=True)
def _on_a_gpu_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PaddedExchange, "_check", lambda *_: None)


def alone() -> Exchange:
    return join_over_links("padded", GroupShape(slot_ranges=((0, SLOTS),)), 0, lambda ranks: LoneLink())


def test_each_shape_runs_before_it_is_captured_and_the_largest_comes_first() -> None:
    made, _, log = graphs(alone())
    seen: list[int] = []
    report = made.capture(lambda: seen.append(len(log)))
    assert log == ["4x16", "4x16", "4x8", "4x8", "2x16", "2x16", "2x8", "2x8"]
    assert seen == [2, 4, 6, 8]
    assert report.num_graphs == 4 and report.num_bytes == made.num_bytes == 4000 and not report.failed
    assert report.lines(1 << 20) == ["CUDA graphs: 4 captured in 2.5 s, 0 MiB (1 MiB were set aside)"]


def test_a_replay_is_the_step_over_what_its_inputs_hold_by_then() -> None:
    made, step, log = graphs(alone())
    made.capture(lambda: None)
    shape, launched = GraphShape(2, 8), len(log)
    found = made.replay(shape)
    for numbers, slots in (([1.0, 2.0], [3, 0]), ([5.0, torch.inf], [1, -1]), ([-7.0, 0.5], [-1, 2])):
        step.numbers[:2], step.slots[:2] = torch.tensor(numbers), torch.tensor(slots, dtype=torch.int32)[:, None]
        assert made.replay(shape) is found  # in the same memory
        expected = step(shape)
        for name in ("hidden", "best", "finite", "well"):
            assert_same(getattr(found, name), getattr(expected, name))
        assert_same(found.logits[0], expected.logits[0])
    assert len(log) == launched + 3, "a replay is none of Python's business"
    assert made.holds(shape) and not made.holds(GraphShape(3, 8))


def test_what_a_replay_sends_is_counted() -> None:
    exchange = alone()
    made, _, _ = graphs(exchange)
    made.capture(lambda: None)
    assert sum(exchange.take_traffic().num_bytes) == 0, "nobody was served"
    made.replay(GraphShape(2, 8))
    small = sum(exchange.take_traffic().num_bytes)
    made.replay(GraphShape(4, 8))
    made.replay(GraphShape(4, 16))
    assert small > 0 and sum(exchange.take_traffic().num_bytes) == 2 * 2 * small


def test_a_shape_that_cannot_be_captured_runs_eagerly_and_says_why() -> None:
    def fails(number: int) -> None:
        if number in (1, 2):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nand more")

    made, _, log = graphs(alone(), RecordingDevice(fails))
    report = made.capture(lambda: None)
    assert not made.holds(GraphShape(4, 16)) and made.holds(GraphShape(2, 16))
    assert len(log) == 4 + 2, "all ranks run all shapes, whatever becomes of them"
    assert report.lines(0)[1] == (
        "CUDA graphs: 4 rows of up to 16 tokens and 1 more cannot be captured and run eagerly: CUDA out of memory. "
        "Tried to allocate 2 GiB"
    )


@pytest.mark.parametrize("verb", ["rehearse", "capture"])
def test_a_step_that_does_not_run_at_all_is_one_error(verb: str) -> None:
    made, step, _ = graphs(alone())
    step.numbers = torch.zeros(3)
    with pytest.raises(RuntimeError, match=r"^a decode step of 4 rows of up to 16 tokens does not run: "):
        getattr(made, verb)(lambda: None)


@pytest.mark.parametrize("late", [False, True])
def test_ranks_replay_together_and_one_of_them_without_rows_or_a_graph(late: bool) -> None:
    """Rank 1 has nothing to do in one step and runs another eagerly beside a replay: what they exchange is the same."""
    meetings = ThreadMeetings(10.0)
    shape, all_ready = GraphShape(2, 8), threading.Barrier(2, timeout=10.0)

    def work(rank: int) -> list[torch.Tensor]:
        exchange = join_over_links(
            "padded", GROUP, rank, lambda ranks: RehearsedLink(RecordedLink(meetings.link(ranks, rank), late=late))
        )
        device = RecordingDevice()
        made, step, _ = graphs(exchange, device)
        if rank == 1:
            all_ready.wait()  # rank 0 has compiled all it needs by now, alone
        made.rehearse(lambda: None)
        if rank == 0:
            all_ready.wait()
        made.capture(lambda: None)
        for graph in device.graphs:
            dispatch, answers = graph.meanwhile()
            assert "neg" in dispatch and "neg" not in answers, "what needs no rows runs while they travel"
        found = []
        for number, graphed in ((1.0, True), (3.0, rank == 0), (5.0, True)):
            rows = 0 if rank == 1 and number == 1.0 else 2
            step.empty()
            step.numbers[:2] = number + rank
            step.slots[:rows, 0] = torch.tensor([0, 3][:rows], dtype=torch.int32)
            found.append((made.replay(shape) if graphed else step(shape)).first(rows).hidden.clone())
        return found

    first, second = call_ranks(2, work, meetings.abort)
    for index, number in enumerate((1.0, 3.0, 5.0)):
        assert_same(first[index], torch.full((2, WIDTH), 3 * number))
        rows = 0 if index == 0 else 2
        assert_same(second[index], torch.full((rows, WIDTH), 3 * (number + 1)))
