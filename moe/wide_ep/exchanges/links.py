"""Collectives among a few ranks, as exchanges need them: rows of bytes to everybody, counts, and the same to all.

Not an exchange: nothing here knows of experts. Processes meet over torch.distributed (topologies/groups.py makes the
groups), threads of one process in thread_links.py; `SlowLink` makes either as slow as a link between domains.
Shapes: rows are u8 [N, B]; `sent[i]` consecutive ones go to member i. Units: bytes, seconds.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from ....telemetry import RankProgress
from ....topologies.meeting import blaming_peers
from .group_shape import SlowRate
from .registered_room import RegisteredRoom

# Waits for rows that are under way and returns them; called once.
Pending = Callable[[], torch.Tensor]


class Link(Protocol):
    """What joins the members of one list of ranks, seen from one of them. Every method is a collective.

    Several may be under way at a time, if all members begin them in the same order.
    """

    @property
    def size(self) -> int:
        """How many members there are."""
        ...

    @property
    def index(self) -> int:
        """Which of them this one is."""
        ...

    @property
    def held_bytes(self) -> int:
        """The most bytes of rows that one collective has sent and received at a time."""
        ...

    def start(
        self, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], *, evenly: bool = False
    ) -> Pending:
        """Begin to send `sent[i]` rows to each member i; what comes back waits for those that arrive, in their order.

        Args:
            rows: [sum(sent), B] u8, not changed until all have arrived.
            sent: rows to each member.
            received: rows from each member.
            evenly: every member sends every other as many rows, and all say so; some links are faster then.

        Returns:
            A function that returns [sum(received), B] u8.
        """
        ...

    def gather(self, rows: torch.Tensor) -> Pending:
        """Begin to send `rows` [N, B] to all; what comes back waits for those of all members, [size * N, B].

        N is the same for all.
        """
        ...


def swap(link: Link, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
    """Send rows and wait for those that arrive; see `Link.start`."""
    return link.start(rows, sent, received)()


def start_counts(link: Link, sent: Sequence[int], device: torch.device) -> Pending:
    """Begin to tell each member i the number `sent[i]`; what comes back waits for what they told, [size] i64."""
    told = torch.tensor(sent, dtype=torch.int64, device=device)
    if link.size == 1:
        return lambda: told
    ones = [1] * link.size
    pending = link.start(told.view(-1, 1).view(torch.uint8), ones, ones)
    return lambda: pending().view(torch.int64).view(-1)


def swap_counts(link: Link, sent: Sequence[int], device: torch.device) -> list[int]:
    """Tell each member i the number `sent[i]`; return what they told."""
    arrived: list[int] = start_counts(link, sent, device)().tolist()
    return arrived


class LoneLink:
    """`Link` of a member that is alone."""

    size, index, held_bytes = 1, 0, 0

    def start(
        self, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], *, evenly: bool = False
    ) -> Pending:
        """Hand back what was sent."""
        return lambda: rows

    def gather(self, rows: torch.Tensor) -> Pending:
        """Hand back `rows`."""
        return lambda: rows


class DistributedLink:
    """`Link` over torch.distributed. Rows are bytes, so that every number format works with every back end.

    A collective of NCCL runs on a stream of its communicator: it begins when the stream that computes has got to where
    it was called, and that one waits for it, not the host, where rows are asked for. Both ends are events, which a CUDA
    graph keeps as the fork and the join of two branches.

    Args:
        process_group: of the members, in their order; None is the default group.
        room: registered memory, for collectives of the same shapes on all members; None: there is none.
    """

    def __init__(self, process_group: dist.ProcessGroup | None, room: RegisteredRoom | None = None) -> None:
        self._group, self._room = process_group, room
        self.size, self.index = dist.get_world_size(process_group), dist.get_rank(process_group)
        self.held_bytes = 0
        self._under_way: dict[str, set[int]] = {"start": set(), "gather": set()}  # in registered memory

    def start(
        self, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], *, evenly: bool = False
    ) -> Pending:
        """Begin an all-to-all; see `Link.start`."""
        turn = self._turn("start") if evenly else None
        rows, arrived = self._ends("start", rows, sum(received), turn)
        with blaming_peers():
            work = dist.all_to_all_single(arrived, rows, list(received), list(sent), group=self._group, async_op=True)
        return self._waiting("start", work, rows, arrived, turn)

    def gather(self, rows: torch.Tensor) -> Pending:
        """Begin an all-gather; see `Link.gather`."""
        turn = self._turn("gather")
        rows, arrived = self._ends("gather", rows, self.size * rows.shape[0], turn)
        with blaming_peers():
            work = dist.all_gather_into_tensor(arrived, rows, group=self._group, async_op=True)
        return self._waiting("gather", work, rows, arrived, turn)

    def _turn(self, kind: str) -> int | None:
        """Return a place in registered memory that nothing under way has, the same on all ranks; None without any."""
        if self._room is None:
            return None
        taken = self._under_way[kind]
        turn = next(number for number in itertools.count() if number not in taken)
        taken.add(turn)
        return turn

    def _ends(
        self, kind: str, rows: torch.Tensor, num_arriving: int, turn: int | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what is sent, and where as many rows will arrive; with a turn both are in registered memory."""
        if self._room is None or turn is None:
            return rows, rows.new_empty(num_arriving, rows.shape[1])
        sent = self._room.take(f"{kind} sent", turn, *rows.shape)
        sent.copy_(rows)
        return sent, self._room.take(f"{kind} arrived", turn, num_arriving, rows.shape[1])

    def _waiting(
        self, kind: str, work: dist.Work | None, rows: torch.Tensor, arrived: torch.Tensor, turn: int | None
    ) -> Pending:
        self.held_bytes = max(self.held_bytes, rows.nbytes + arrived.nbytes)

        def wait() -> torch.Tensor:
            assert work is not None
            with blaming_peers():
                work.wait()
            if turn is not None:
                self._under_way[kind].remove(turn)
            return arrived

        return wait


class SlowLink:
    """`Link` whose collectives take as long as if some members were behind a slow link.

    Those that are under way at a time share its rate: bytes leave one collective after another.

    Args:
        link: what really joins the members.
        is_far: which of them are behind it.
        rate: how slow it is.
        progress: ticked while time passes.
    """

    def __init__(
        self, link: Link, is_far: Sequence[bool], rate: SlowRate, progress: RankProgress | None = None
    ) -> None:
        self._link, self._is_far, self._rate, self._progress = link, list(is_far), rate, progress
        self.size, self.index = link.size, link.index
        self._free_at = 0.0  # when the last byte will have left

    @property
    def held_bytes(self) -> int:
        """See `Link.held_bytes`."""
        return self._link.held_bytes

    def start(
        self, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], *, evenly: bool = False
    ) -> Pending:
        """Begin an all-to-all whose rows arrive no sooner than the link can bring them."""
        far = max(self._far(sent), self._far(received)) * rows.shape[1]
        due = self._due(far)
        return self._late(self._link.start(rows, sent, received, evenly=evenly), due)

    def gather(self, rows: torch.Tensor) -> Pending:
        """Begin an all-gather whose rows arrive no sooner than the link can bring them."""
        due = self._due(sum(self._is_far) * rows.numel())
        return self._late(self._link.gather(rows), due)

    def _due(self, num_bytes: int) -> float:
        """Put `num_bytes` on the link, behind what is there already; return when they will have arrived."""
        self._free_at = max(time.perf_counter(), self._free_at) + self._rate.transfer_seconds(num_bytes)
        return self._free_at + 1e-6 * self._rate.delay_us

    def _late(self, pending: Pending, due: float) -> Pending:
        def wait() -> torch.Tensor:
            arrived = pending()
            self._sleep_until(due)
            return arrived

        return wait

    def _far(self, counts: Sequence[int]) -> int:
        return sum(count for count, is_far in zip(counts, self._is_far, strict=True) if is_far)

    def _sleep_until(self, due: float) -> None:
        while any(self._is_far) and (left := due - time.perf_counter()) > 0:
            time.sleep(min(left, 0.5))
            if self._progress is not None:
                self._progress.tick()
