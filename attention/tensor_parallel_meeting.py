"""The collectives of an attention replica, as soon as its ranks can show each other rows: base of all implementations.

Not a way to meet: `tensor_parallel_threads`, `tensor_parallel_shm` and `tensor_parallel_distributed` are.
Letters: W ranks of the replica, T rows of the replica, t rows of this rank, D width. Units: bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from ..topologies.grid import slot_ranges
from .tensor_parallel import HeadShare, add_in_order


class MeetingTensorParallelGroup(ABC):
    """`TensorParallelGroup` whose ranks see in one meeting what all of them brought.

    Args:
        share: of this rank.
    """

    def __init__(self, share: HeadShare) -> None:
        self.share = share
        self._bytes_sent = 0

    def gather(self, rows: torch.Tensor, num_rows: int) -> torch.Tensor:
        """Put the rows of all ranks one below the other; see `TensorParallelGroup.gather`."""
        sizes = [stop - start for start, stop in slot_ranges(num_rows, self.share.size)]
        self._count_to_all(rows)
        return torch.cat(self._meet(rows, sizes))

    def reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """Add up this rank's rows of all partial results; see `TensorParallelGroup.reduce`."""
        own = self.share.own_rows(partial)
        self._bytes_sent += partial.nbytes - own.nbytes
        return add_in_order([self.share.own_rows(part) for part in self._meet_alike(partial)])

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Return the mean over the ranks; see `TensorParallelGroup.mean`."""
        self._count_to_all(values)
        return add_in_order(self._meet_alike(values)) / self.share.size

    def first(self, values: torch.Tensor) -> torch.Tensor:
        """Return what the first rank has; see `TensorParallelGroup.first`."""
        if self.share.is_first:
            self._count_to_all(values)
        return self._meet_alike(values)[0].clone()

    def bytes_sent(self) -> int:
        """Return the bytes that a link carries away from this rank, or would carry, since the last call."""
        sent, self._bytes_sent = self._bytes_sent, 0
        return sent

    @abstractmethod
    def _meet(self, values: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Offer `values` and return those of all ranks, by rank; that of rank r has `sizes[r]` rows.

        They are not to be written to and may change at the next collective but one.
        """

    def _meet_alike(self, values: torch.Tensor) -> list[torch.Tensor]:
        return self._meet(values, [values.shape[0]] * self.share.size)

    def _count_to_all(self, values: torch.Tensor) -> None:
        self._bytes_sent += (self.share.size - 1) * values.nbytes
