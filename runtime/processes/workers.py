"""`Workers`: the ranks of a group as the engine sees them: plans go out, results come back in order, losses are named.

Not their start (launch.py) and not their watch (supervision.py): this holds one channel a rank.
Units: seconds; a step is answered when all ranks answered.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from ..messages import Message, MovesPrepared, RankCounted, RunStep, StepDone, StopWorker, WorkerFailed
from ..plan import RankResult, StepPlan, StepResult, result_of_ranks
from ..worker_main import PEERS_LOST
from .channel import ChannelClosed
from .launch import Member

# After the first sign of trouble, how long to wait for what the others have to say before one rank is blamed.
GRACE_S = 1.0


class RankLost(RuntimeError):
    """A rank is dead, failed or stuck; the group cannot go on. `rank` is -1 when no single one is to blame."""

    def __init__(self, rank: int, reason: str, user_error: bool = False) -> None:
        super().__init__(reason)
        self.rank = rank
        self.reason = reason
        self.user_error = user_error


class RankListener(Protocol):
    """What is told of counters and moves (runtime/rebalancing/balancer.py)."""

    def counted(self, step: int, counters: Sequence[bytes]) -> None:
        """All ranks have sent their counters with the result of one step, those of rank r at [r]."""
        ...

    def prepared(self, message: MovesPrepared) -> None:
        """A rank has prepared moves, or failed to."""
        ...

    def close(self) -> None:
        """The ranks are gone."""
        ...


class Workers:
    """A group of ranks.

    One thread sends and collects; any thread may call `fail`.

    Args:
        members: index = rank; this object ends them.
        atp: ranks of an attention replica, which get one plan.

    Attributes:
        counters: per rank, the newest counters that came (`stats.encode_counters`); empty before.
        on_result: shown what every rank says of every step, if set.
        balancer: is told what ranks have counted and prepared; None: nobody is.
    """

    def __init__(self, members: Sequence[Member], *, atp: int = 1) -> None:
        self.members = list(members)
        self.atp = atp
        self.counters = [b""] * len(self.members)
        self.on_result: Callable[[int, RankResult], None] | None = None
        self.balancer: RankListener | None = None
        self._results: list[deque[RankResult]] = [deque() for _ in self.members]
        self._reports: dict[int, WorkerFailed] = {}
        self._steps: deque[int] = deque()
        self._failure: RankLost | None = None
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._wake, select.POLLIN)
        self._rank_of = {member.channel.fileno(): rank for rank, member in enumerate(self.members)}
        for fd in self._rank_of:
            self._poll.register(fd, select.POLLIN)

    @property
    def num_ranks(self) -> int:
        """W."""
        return len(self.members)

    @property
    def in_flight(self) -> int:
        """Steps submitted and not yet collected."""
        return len(self._steps)

    def filenos(self) -> list[int]:
        """Return descriptors that turn readable when `receive` has something to do."""
        return [self._wake, *self._rank_of]

    # --- plans and results -----------------------------------------------------------------------------------------
    def submit(self, plan: StepPlan) -> None:
        """Send each rank its part of `plan`. Raises RankLost."""
        self._steps.append(plan.header.step)
        for rank, rank_plan in enumerate(plan.of_ranks(self.atp)):
            self.send(rank, RunStep(header=plan.header, plan=rank_plan))

    def collect(self, timeout: float | None = None) -> StepResult | None:
        """Return the result of the oldest step in flight, or None when some rank did not answer within `timeout`.

        Raises:
            RankLost: the group cannot go on.
        """
        assert self._steps, "nothing is in flight"
        deadline = None if timeout is None else time.monotonic() + timeout
        while not all(self._results):
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            others = self.receive(left)
            assert not others, f"unexpected in a step: {others}"
            if left == 0.0 and not all(self._results):
                return None
        step = self._steps.popleft()
        results = [results.popleft() for results in self._results]
        if self.balancer is not None and all(result.counters for result in results):
            self.balancer.counted(step, [result.counters for result in results])
        return result_of_ranks(step, results, self.atp)

    # --- messages --------------------------------------------------------------------------------------------------
    def send(self, rank: int, message: Message) -> None:
        """Send `message` to `rank`. Raises RankLost."""
        try:
            self.members[rank].channel.send(message)
        except ChannelClosed:
            self._lose()

    def broadcast(self, message: Message) -> None:
        """Send `message` to every rank. Raises RankLost."""
        for rank in range(self.num_ranks):
            self.send(rank, message)

    def receive(self, timeout: float | None) -> list[Message]:
        """Wait for messages, book results of steps, and return all others (start-up). Raises RankLost."""
        ready = self._poll.poll(None if timeout is None else timeout * 1000)
        if self._failure is not None:
            self._lose()
        others: list[Message] = []
        for fd, _ in ready:
            if fd in self._rank_of:
                others += self._read(self._rank_of[fd])
        return others

    def _read(self, rank: int) -> list[Message]:
        others: list[Message] = []
        try:
            for message in self.members[rank].channel.receive_ready():
                if isinstance(message, StepDone):
                    self._results[rank].append(message.result)
                    self.counters[rank] = message.result.counters or self.counters[rank]
                    if self.on_result is not None:
                        self.on_result(rank, message.result)
                elif isinstance(message, RankCounted):
                    self.counters[rank] = message.counters
                elif isinstance(message, MovesPrepared):
                    assert self.balancer is not None, "nobody asked for moves"
                    self.balancer.prepared(message)
                elif isinstance(message, WorkerFailed):
                    self._reports[rank] = message
                else:
                    others.append(message)
        except ChannelClosed:
            self._lose()
        if rank in self._reports:
            self._lose()
        return others

    # --- losses ----------------------------------------------------------------------------------------------------
    def fail(self, rank: int, reason: str) -> None:
        """Declare `rank` lost (any thread): whoever waits for the group gets RankLost."""
        if self._failure is None:
            self._failure = RankLost(rank, reason)
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wake, 1)
        for member in self.members:
            member.channel.shutdown()

    def _lose(self) -> None:
        """Find out who is to blame and raise it."""
        deadline = time.monotonic() + GRACE_S
        while self._failure is None:
            reasons = [member.exit_reason() for member in self.members]
            self._gather_reports()
            self._failure = blame(self._reports, reasons, final=time.monotonic() > deadline)
            if self._failure is None:
                time.sleep(0.02)
        raise self._failure

    def _gather_reports(self) -> None:
        for rank, member in enumerate(self.members):
            with contextlib.suppress(ChannelClosed):
                for message in member.channel.receive_ready():
                    if isinstance(message, WorkerFailed):
                        self._reports[rank] = message

    def stop(self, timeout: float) -> None:
        """End all ranks in order; those that have not ended after `timeout` seconds are killed."""
        for member in self.members:
            with contextlib.suppress(ChannelClosed, TimeoutError):
                member.channel.send(StopWorker(), timeout=timeout)
        deadline = time.monotonic() + timeout
        if not all([member.join(max(0.0, deadline - time.monotonic())) for member in self.members]):
            self.kill()
        self._close()

    def kill(self, timeout: float = 5.0) -> None:
        """End all ranks at once and wait until they are gone."""
        for member in self.members:
            member.kill()
        for member in self.members:
            member.join(timeout)
        self._close()

    def _close(self) -> None:
        if self.balancer is not None:
            self.balancer.close()
        if self._wake >= 0:
            os.close(self._wake)
            self._wake = -1


def blame(reports: dict[int, WorkerFailed], reasons: Sequence[str | None], *, final: bool) -> RankLost | None:
    """Return which rank is to blame, or None when it pays to wait for more evidence.

    When one rank ends, collectives break on all others, whose reports may come first. So: a user's mistake, then a rank
    that ended without a word, then a report about the rank itself; a report about others only when nothing else comes.

    Args:
        reports: what ranks said of their failure.
        reasons: per rank, how its process ended; None while it runs.
        final: no more evidence is to be expected.
    """
    for rank, report in sorted(reports.items()):
        if report.user_error:
            return RankLost(rank, report.reason, user_error=True)
    for rank, reason in enumerate(reasons):
        if reason is not None and rank not in reports:
            return RankLost(rank, f"rank {rank} is lost: {reason}")
    own = [rank for rank in sorted(reports) if not reports[rank].reason.startswith(PEERS_LOST)]
    if own:
        return RankLost(own[0], f"rank {own[0]} failed: {reports[own[0]].reason}")
    if not final:
        return None
    for rank, report in sorted(reports.items()):
        return RankLost(rank, f"rank {rank} failed: {report.reason}")
    return RankLost(-1, "the connection to a rank broke")
