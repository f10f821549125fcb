"""Rehearsals, in which nobody is waited for, and memory that a back end has registered."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moewe.moe.wide_ep.exchanges import GroupShape, links
from moewe.moe.wide_ep.exchanges.joining import join_all_over_links
from moewe.moe.wide_ep.exchanges.registered_room import RegisteredRoom, open_room
from moewe.moe.wide_ep.exchanges.rehearsed_link import RehearsedLink
from moewe.moe.wide_ep.exchanges.thread_links import ThreadMeetings

SHAPE = GroupShape(slot_ranges=((0, 2), (2, 3)))


@pytest.mark.parametrize("name", ["padded", "all_to_all"])
def test_a_rehearsal_needs_no_other_rank(name: str) -> None:
    meetings = ThreadMeetings(0.05)  # whoever waits for rank 0 waits in vain
    exchange = join_all_over_links(
        ["all_to_all", "padded"], SHAPE, 1, lambda ranks: RehearsedLink(meetings.link(ranks, 1))
    )
    exchange.begin_step(name, 3)  # type: ignore[attr-defined]
    ids = torch.tensor([[2, 0], [1, 2], [2, -1]], dtype=torch.int32)
    with exchange.rehearsing():
        arrived = exchange.dispatch(torch.ones(3, 8), ids)
        assert arrived.tokens_per_slot.sum() > 0, "experts are rehearsed, too"
        combined = exchange.combine(torch.ones(arrived.num_rows, 8), torch.ones(3, 2), arrived.handle)
    assert combined.shape == (3, 8) and sum(exchange.take_traffic().num_bytes) == 0
    with pytest.raises(Exception, match="exchange"):
        exchange.dispatch(torch.ones(3, 8), ids)


def test_a_room_keeps_every_buffer_where_it_is() -> None:
    sizes: list[int] = []

    def allocate(num_bytes: int) -> torch.Tensor:
        sizes.append(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8)

    room = RegisteredRoom(allocate)
    first, second, third = (room.take("gather sent", turn, 4, 200) for turn in (0, 1, 0))
    assert first.shape == (4, 200) and first.data_ptr() == third.data_ptr() != second.data_ptr()
    assert sizes == [1024, 1024]
    larger, smaller = room.take("gather sent", 0, 8, 200), room.take("gather sent", 0, 1, 1)
    assert sizes[2:] == [2048, 512] and len({t.data_ptr() for t in (first, second, larger, smaller)}) == 4
    assert room.take("gather sent", 0, 4, 200).data_ptr() == first.data_ptr(), "a graph may know it"
    assert room.take("start sent", 0, 4, 200).data_ptr() != first.data_ptr()
    assert room.num_bytes == sum(sizes)


class Collectives:
    """torch.distributed for a rank whose only peer sends what it sends; keeps what was handed over.

    Rows travel as late as they may: when they are waited for.
    """

    def __init__(self) -> None:
        self.ends: list[tuple[int, int]] = []
        self.log: list[str] = []

    def get_world_size(self, group: object) -> int:
        return 2

    def get_rank(self, group: object) -> int:
        return 0

    def all_gather_into_tensor(
        self, arrived: torch.Tensor, rows: torch.Tensor, *, group: object, async_op: bool
    ) -> SimpleNamespace:
        assert async_op, "else torch takes the stream that computes, and nothing runs meanwhile"
        return self._work(arrived, rows, lambda: arrived.copy_(rows.repeat(2, 1)))

    def all_to_all_single(
        self, arrived: torch.Tensor, rows: torch.Tensor, *counts: Any, group: object, async_op: bool
    ) -> SimpleNamespace:
        assert async_op, "see there"
        return self._work(arrived, rows, lambda: arrived.copy_(rows))

    def _work(self, arrived: torch.Tensor, rows: torch.Tensor, done: Callable[[], Any]) -> SimpleNamespace:
        self.ends.append((rows.data_ptr(), arrived.data_ptr()))
        self.log.append("begun")

        def wait() -> None:
            self.log.append("waited")
            done()

        return SimpleNamespace(wait=wait)


@pytest.mark.parametrize("registered", [False, True])
def test_a_collective_is_begun_at_once_and_waited_for_where_rows_are_asked_for(
    registered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    collectives = Collectives()
    monkeypatch.setattr(links, "dist", collectives)
    room = RegisteredRoom(lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8)) if registered else None
    link = links.DistributedLink(None, room)
    rows = torch.arange(8, dtype=torch.uint8).view(4, 2)
    gathered, sent = link.gather(rows), link.start(rows, [2, 2], [2, 2], evenly=True)
    assert collectives.log == ["begun"] * 2
    assert sent().tolist() == rows.tolist() and collectives.log == ["begun", "begun", "waited"]
    assert gathered().tolist() == rows.repeat(2, 1).tolist() and collectives.log[-1] == "waited"


def test_both_ends_of_fixed_shapes_are_registered_and_of_others_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    collectives, registered = Collectives(), []
    monkeypatch.setattr(links, "dist", collectives)

    def allocate(num_bytes: int) -> torch.Tensor:
        made = torch.empty(num_bytes, dtype=torch.uint8)
        registered.append(made)
        return made

    link = links.DistributedLink(None, RegisteredRoom(allocate))  # type: ignore[arg-type]
    rows = torch.arange(8, dtype=torch.uint8).view(4, 2)
    halves = [link.gather(rows), link.gather(rows + 8)]
    assert [half().tolist() for half in halves] == [rows.repeat(2, 1).tolist(), (rows + 8).repeat(2, 1).tolist()]
    assert link.gather(rows)().tolist() == rows.repeat(2, 1).tolist()
    assert link.start(rows, [2, 2], [2, 2], evenly=True)().tolist() == rows.tolist()
    assert link.start(rows, [3, 1], [3, 1])().tolist() == rows.tolist()
    known = {buffer.data_ptr() for buffer in registered}
    assert [{sent, arrived} <= known for sent, arrived in collectives.ends] == [True] * 4 + [False]
    assert collectives.ends[0] == collectives.ends[2] != collectives.ends[1], "a graph may know them"
    assert not known & set(collectives.ends[4])
    first, second = link.gather(rows), link.gather(rows + 8)
    first()
    third = link.gather(rows + 16)  # while the second is under way, which keeps its place
    assert [second().tolist(), third().tolist()] == [(rows + add).repeat(2, 1).tolist() for add in (8, 16)]


class Backend:
    """Registers pools as torch does: once its communicator is there, which the first collective makes."""

    mem_allocator = "allocator"

    def __init__(self, error: Exception | None = None) -> None:
        self.pools: list[Any] = []
        self.has_communicator, self._error = False, error

    def register_mem_pool(self, pool: Any) -> None:
        if not self.has_communicator:
            raise RuntimeError("NCCL communicator has not been initialized before mem pool creation")
        if self._error is not None:
            raise self._error
        self.pools.append(pool)


@pytest.mark.parametrize(
    ("backend", "others", "reason"),
    [
        (Backend(), True, None),
        (Backend(), False, "another rank cannot"),
        (Backend(RuntimeError("NCCL is too old\nsee")), True, "NCCL is too old"),
        (SimpleNamespace(), True, "mem_allocator"),
    ],
)
def test_ranks_agree_on_registering(
    backend: Any, others: bool, reason: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")

    def agree(could: bool) -> bool:
        backend.has_communicator = True
        return could and others

    room = open_room(
        backend, torch.device("cpu"), agree,
        make_pool=lambda allocator: (allocator,), use_pool=lambda pool: nullcontext(),
    )  # fmt: skip
    assert (room is None) == (reason is not None) and (reason or "") in caplog.text
    if room is not None:
        room.take("gather sent", 0, 1, 1)
        assert backend.pools == [("allocator",)] * 2
