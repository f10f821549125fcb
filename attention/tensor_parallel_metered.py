"""What the collectives of an attention replica move, and how long they take, for the counters of a rank.

Not a way to meet: it hands every call on to a group that is one. Units: bytes put on links, seconds of the host's
clock, waiting for slower ranks and adding up included. On a GPU that clock says nothing, so only bytes are counted.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..telemetry import SCOPES
from .tensor_parallel import HeadShare, TensorParallelGroup


class MeteredGroup:
    """`TensorParallelGroup` that books what another one does.

    Args:
        group: does it.
        scope: one of SCOPES: how far the ranks of the replica are from each other at most.
    """

    def __init__(self, group: TensorParallelGroup, scope: str) -> None:
        self._group, self._scope, self._seconds = group, SCOPES.index(scope), 0.0
        self._largest = 0

    @property
    def share(self) -> HeadShare:
        """Which share of the heads is this rank's."""
        return self._group.share

    def gather(self, rows: torch.Tensor, num_rows: int) -> torch.Tensor:
        """See `TensorParallelGroup.gather`."""
        with self._timed(rows):
            return self._group.gather(rows, num_rows)

    def reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """See `TensorParallelGroup.reduce`."""
        with self._timed(partial):
            return self._group.reduce(partial)

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """See `TensorParallelGroup.mean`."""
        with self._timed(values):
            return self._group.mean(values)

    def first(self, values: torch.Tensor) -> torch.Tensor:
        """See `TensorParallelGroup.first`."""
        with self._timed(values):
            return self._group.first(values)

    def bytes_sent(self) -> int:
        """See `TensorParallelGroup.bytes_sent`."""
        return self._group.bytes_sent()

    @property
    def buffer_bytes(self) -> int:
        """What this rank has held for a collective at most: its rows, and as many of each other rank."""
        return self._largest * self.share.size

    def take(self) -> tuple[list[int], list[float]]:
        """Return bytes and seconds since the last call, an entry a scope."""
        num_bytes, seconds = [0] * len(SCOPES), [0.0] * len(SCOPES)
        num_bytes[self._scope], seconds[self._scope] = self._group.bytes_sent(), self._seconds
        self._seconds = 0.0
        return num_bytes, seconds

    @contextmanager
    def _timed(self, rows: torch.Tensor) -> Iterator[None]:
        self._largest = max(self._largest, rows.nbytes)
        began = time.perf_counter()
        yield
        if rows.device.type != "cuda":
            self._seconds += time.perf_counter() - began
