"""Ranks of an attention replica that are threads of one process: each reads what the others left.

Not for speed: it lets tests run any attention layout in one process. One barrier a collective.
Letters: W ranks of the replica, T rows of the replica, t rows of this rank, D width.
"""

from __future__ import annotations

import threading

import torch

from .tensor_parallel import HeadShare, add_in_order


class ThreadTensorParallelHub:
    """The meeting place of the W ranks of one attention replica.

    Args:
        size: W.
        timeout_s: how long a rank waits for the others in one collective; None waits for ever.
    """

    def __init__(self, size: int, *, timeout_s: float | None = None) -> None:
        self.size = size
        self._timeout_s = timeout_s
        self._barrier = threading.Barrier(size)
        self._reason: str | None = None
        # Two places each, used in turns: a rank may be at its next collective while others still read this one, but
        # not further, since nobody passes a meeting before all have come to it.
        self._places = [[torch.empty(0)] * size for _ in range(2)]

    def rank(self, rank: int) -> ThreadTensorParallelGroup:
        """Return the group as the thread of `rank`, counted within the replica, sees it."""
        return ThreadTensorParallelGroup(self, rank)

    def abort(self, reason: str) -> None:
        """Make every rank that waits, or comes to wait, raise RuntimeError with `reason`."""
        if self._reason is None:
            self._reason = reason
        self._barrier.abort()

    def meet(self, rank: int, turn: int, value: torch.Tensor) -> list[torch.Tensor]:
        """Offer `value` and return those of all ranks, in their order; nobody writes to them."""
        places = self._places[turn % 2]
        places[rank] = value
        try:
            self._barrier.wait(self._timeout_s)
        except threading.BrokenBarrierError:
            reason = self._reason or f"a rank did not come to the collective within {self._timeout_s} s"
            raise RuntimeError(f"attention between threads broken: {reason}") from None
        return list(places)


class ThreadTensorParallelGroup:
    """`TensorParallelGroup` of one rank of a `ThreadTensorParallelHub`."""

    def __init__(self, hub: ThreadTensorParallelHub, rank: int) -> None:
        self._hub = hub
        self._share = HeadShare(rank, hub.size)
        self._turn = 0
        self._bytes_sent = 0

    @property
    def share(self) -> HeadShare:
        """See `TensorParallelGroup.share`."""
        return self._share

    def gather(self, rows: torch.Tensor, num_rows: int) -> torch.Tensor:
        """Put the rows of all ranks one below the other; see `TensorParallelGroup.gather`."""
        gathered = torch.cat(self._meet(rows))
        assert gathered.shape[0] == num_rows, (gathered.shape, num_rows)
        self._bytes_sent += (self._share.size - 1) * rows.nbytes
        return gathered

    def reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """Add up this rank's rows of all partial results; see `TensorParallelGroup.reduce`."""
        own = self._share.own_rows(partial)
        self._bytes_sent += partial.nbytes - own.nbytes
        return add_in_order([self._share.own_rows(part) for part in self._meet(partial)])

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Return the mean over the ranks; see `TensorParallelGroup.mean`."""
        self._bytes_sent += (self._share.size - 1) * values.nbytes
        return add_in_order(self._meet(values)) / self._share.size

    def first(self, values: torch.Tensor) -> torch.Tensor:
        """Return what the first rank has; see `TensorParallelGroup.first`."""
        if self._share.is_first:
            self._bytes_sent += (self._share.size - 1) * values.nbytes
        return self._meet(values)[0]

    def bytes_sent(self) -> int:
        """Return the bytes that a link would have carried away from this rank since the last call."""
        sent, self._bytes_sent = self._bytes_sent, 0
        return sent

    def _meet(self, value: torch.Tensor) -> list[torch.Tensor]:
        self._turn += 1
        return self._hub.meet(self._share.rank, self._turn, value)
