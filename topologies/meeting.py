"""What ranks that wait for each other share: the error of a collective that others broke, and a place for threads.

Not a collective: what travels, and what becomes of it, is for those that meet (moe.wide_ep, attention). Ranks that are
processes meet over torch.distributed (groups.py) or in memory of the host (host_memory.py). Units: seconds.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class PeersLostError(RuntimeError):
    """A collective broke because of other ranks: who raises this only noticed, and is not the one to blame."""


@contextmanager
def blaming_peers() -> Iterator[None]:
    """Turn what a library raises inside a collective, when a connection ends or a wait is over, into `PeersLostError`.

    Only `RuntimeError`, which is what torch.distributed and its back ends raise for both; wrong arguments stay what
    they are.
    """
    try:
        yield
    except PeersLostError:
        raise
    except RuntimeError as error:
        raise PeersLostError(str(error)) from error


class Meeting:
    """A place for `size` threads to swap values, over and over; one that fails breaks it for all.

    Args:
        size: of the round.
        timeout_s: how long one waits for the others; None waits for ever.
        purpose: what they meet for, as an error says it.
    """

    def __init__(self, size: int, timeout_s: float | None, purpose: str) -> None:
        self._timeout_s, self._purpose = timeout_s, purpose
        self._barrier = threading.Barrier(size)
        self._rounds = [0] * size
        # Nobody can come to round n + 2 before all have left round n (round n + 1 lies between): two places are enough.
        self._places: list[list[Any]] = [[None] * size, [None] * size]
        self._reason: str | None = None

    def swap(self, index: int, value: Any) -> list[Any]:
        """Give `value` and return what all have given in this round, by index; nobody may write to it.

        Raises:
            PeersLostError: somebody did not come in time, or `abort` was called.
        """
        places = self._places[self._rounds[index] % 2]
        self._rounds[index] += 1
        places[index] = value
        try:
            self._barrier.wait(self._timeout_s)
        except threading.BrokenBarrierError:
            reason = self._reason or f"a rank did not come within {self._timeout_s} s"
            raise PeersLostError(f"{self._purpose} between threads broken: {reason}") from None
        return list(places)

    def abort(self, reason: str) -> None:
        """Make everybody who waits, or comes to wait, raise `PeersLostError` with `reason`."""
        if self._reason is None:
            self._reason = reason
        self._barrier.abort()
