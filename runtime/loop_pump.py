"""`LoopPump`: lets an event loop do the waiting for the engines of a replica set.

Not the engines (runtime/replicas.py). Units: seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from .messages import Delta, Failed
from .replica import Replica

CHECK_EVERY_S = 0.5
OnDeltas = Callable[[Sequence[Delta]], None]
OnFailure = Callable[[Failed], None]


class Pumped(Protocol):
    """What the pump needs of a replica set."""

    @property
    def is_ready(self) -> bool:
        """True when every replica can take requests."""
        ...

    def collect(self) -> list[Delta]:
        """Take in, without waiting, whatever has come."""
        ...

    def new_failures(self) -> list[Failed]:
        """Return losses that were not returned yet."""
        ...


class LoopPump:
    """Turns readable channels into callbacks of an event loop; `members` may change while it runs."""

    def __init__(
        self,
        replicas: Pumped,
        members: Sequence[Replica],
        loop: asyncio.AbstractEventLoop,
        callbacks: tuple[OnDeltas, OnFailure, Callable[[], None] | None],
    ) -> None:
        self._set = replicas
        self._members = members
        self._event_loop = loop
        self._on_deltas, self._on_failure, self._on_ready = callbacks
        self._reading: set[int] = set()
        self._writing: set[int] = set()
        self._timer = loop.call_later(CHECK_EVERY_S, self._tick)

    def turn(self) -> None:
        """Deliver what has come."""
        deltas = self._set.collect()
        if deltas:
            self._on_deltas(deltas)
        for failure in self._set.new_failures():
            self._on_failure(failure)
        if self._on_ready is not None and self._set.is_ready:
            on_ready, self._on_ready = self._on_ready, None
            on_ready()
        self.watch()

    def watch(self) -> None:
        """Ask the loop for exactly those channels that can bring something."""
        living = [replica.member.channel for replica in self._members if replica.lives]
        readable = {channel.fileno() for channel in living}
        writable = {channel.fileno() for channel in living if channel.pending_bytes}
        for fd in self._reading - readable:
            self._event_loop.remove_reader(fd)
        for fd in readable - self._reading:
            self._event_loop.add_reader(fd, self.turn)
        for fd in self._writing - writable:
            self._event_loop.remove_writer(fd)
        for fd in writable - self._writing:
            self._event_loop.add_writer(fd, self.turn)
        self._reading, self._writing = readable, writable

    def detach(self) -> None:
        """Leave the loop alone from now on."""
        self._timer.cancel()
        for fd in self._reading:
            self._event_loop.remove_reader(fd)
        for fd in self._writing:
            self._event_loop.remove_writer(fd)
        self._reading, self._writing = set(), set()

    def _tick(self) -> None:
        self._timer = self._event_loop.call_later(CHECK_EVERY_S, self._tick)
        self.turn()
