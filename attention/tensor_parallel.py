"""The contract by which the ranks of one attention replica divide its heads: who holds which, and how results join.

Not an exchange of experts (moe.wide_ep) and not attention: each rank attends with its own heads and KV over all rows of
the replica; what lies between two attentions is done by each rank for its own rows only. Implementations are
`tensor_parallel_threads`, `tensor_parallel_shm` and `tensor_parallel_distributed`.
Letters: W ranks of the replica (`atp`), T rows of the replica, t rows of this rank, D width. Units: bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ..topologies.grid import slot_ranges

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class HeadShare:
    """Share number `rank` of `size` equal shares of the heads; the only one by default."""

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size, (self.rank, self.size)

    @property
    def is_first(self) -> bool:
        """True on the rank that samples for the replica."""
        return self.rank == 0

    def row_range(self, num_rows: int) -> tuple[int, int]:
        """Return [start, stop) of the rows that are this rank's own between attentions.

        Example:
            >>> HeadShare(0, 2).row_range(5), HeadShare(1, 2).row_range(5)
            ((0, 3), (3, 5))
        """
        return slot_ranges(num_rows, self.size)[self.rank]

    def num_own(self, num_rows: int) -> int:
        """Return how many of the rows of the replica are this rank's own."""
        start, stop = self.row_range(num_rows)
        return stop - start

    def own_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Return this rank's own of the rows of the replica: [T, ...] -> [t, ...], a view."""
        start, stop = self.row_range(rows.shape[0])
        return rows[start:stop]


ALL_HEADS = HeadShare()


class TensorParallelGroup(Protocol):
    """Joins the ranks of one attention replica.

    All methods are collectives: every rank of the replica calls the same ones in the same order, which follows from
    their plans being the same. Nothing is called for a step without rows.
    """

    @property
    def share(self) -> HeadShare:
        """Which share of the heads is this rank's."""
        ...

    def gather(self, rows: torch.Tensor, num_rows: int) -> torch.Tensor:
        """Return the rows of all ranks, in order.

        Args:
            rows: [t, D], this rank's own.
            num_rows: T.

        Returns:
            [T, D], not to be written to.
        """
        ...

    def reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """Add up what the heads of all ranks give, for this rank's own rows.

        Args:
            partial: [T, D], of this rank's heads.

        Returns:
            [t, D]: the sum in fp32 in the order of the ranks, rounded once to the dtype of `partial`.
        """
        ...

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Return the mean over the ranks of `values` [T, n] f32, added in their order: the same bits on all."""
        ...

    def first(self, values: torch.Tensor) -> torch.Tensor:
        """Return the `values` of the first rank; the others give a tensor of the same shape and dtype."""
        ...

    def bytes_sent(self) -> int:
        """Bytes put on a link to other ranks since the last call."""
        ...


def add_in_order(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of `parts` in fp32, in their order, rounded once to their dtype."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)
