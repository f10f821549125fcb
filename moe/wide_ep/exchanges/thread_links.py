"""Where ranks that are threads of one process meet: `Link` between any of them, one failure breaks all.

Not an exchange (threads.py is one) and not for speed: it lets tests run every exchange and topology in one process.
Units: seconds.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from ....topologies.meeting import Meeting
from .links import Link, LoneLink, Pending


class ThreadMeetings:
    """The meetings of the threads of one group, one for each list of ranks.

    Args:
        timeout_s: see `Meeting`.
    """

    def __init__(self, timeout_s: float | None = None) -> None:
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._meetings: dict[tuple[int, ...], Meeting] = {}
        self._reason: str | None = None

    def of(self, ranks: Sequence[int]) -> Meeting:
        """Return the meeting of `ranks`, the same for all of them."""
        with self._lock:
            meeting = self._meetings.setdefault(tuple(ranks), Meeting(len(ranks), self._timeout_s, "exchange"))
            if self._reason is not None:
                meeting.abort(self._reason)
            return meeting

    def link(self, ranks: Sequence[int], rank: int) -> Link:
        """Return what joins `ranks`, seen from `rank`."""
        return ThreadLink(self.of(ranks), len(ranks), list(ranks).index(rank)) if len(ranks) > 1 else LoneLink()

    def abort(self, reason: str) -> None:
        """Break all meetings, those to come included."""
        with self._lock:
            if self._reason is None:
                self._reason = reason
            for meeting in self._meetings.values():
                meeting.abort(self._reason)


class ThreadLink:
    """`Link` of one thread to others.

    Args:
        meeting: of its members.
        size, index: how many there are, and which this one is.
    """

    def __init__(self, meeting: Meeting, size: int, index: int) -> None:
        self._meeting, self.size, self.index = meeting, size, index
        self.held_bytes = 0

    def start(
        self, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], *, evenly: bool = False
    ) -> Pending:
        """Take the rows of all members for this one at once; see `Link.start`."""
        parts = [parts[self.index] for parts in self._meeting.swap(self.index, torch.split(rows, list(sent)))]
        assert [len(part) for part in parts] == list(received), (received, self.index)
        arrived = torch.cat(parts)
        self.held_bytes = max(self.held_bytes, rows.nbytes + arrived.nbytes)
        return lambda: arrived

    def gather(self, rows: torch.Tensor) -> Pending:
        """Take the rows of all members at once; see `Link.gather`."""
        arrived = torch.cat(self._meeting.swap(self.index, rows))
        self.held_bytes = max(self.held_bytes, rows.nbytes + arrived.nbytes)
        return lambda: arrived
