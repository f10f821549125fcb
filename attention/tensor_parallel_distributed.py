"""Ranks of an attention replica that are processes: torch.distributed, with gloo between CPUs and NCCL between GPUs.

Not a process group (topologies/groups.py makes it). Sums are not left to the library, whose order may depend on the
number of rows: parts travel, and each rank adds those of its own rows in the order of the ranks.
Letters: W ranks of the replica, T rows of the replica, t rows of this rank, D width.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from ..telemetry import RankProgress
from ..topologies.grid import slot_ranges
from .tensor_parallel import HeadShare, add_in_order


class DistributedTensorParallelGroup:
    """`TensorParallelGroup` of one rank of a torch.distributed group.

    Rows travel as raw bytes, so that every number format works with every back end.

    Args:
        process_group: of the W ranks, in order.
        share: of this rank.
        progress: ticked before and after each collective; None in tests.
    """

    def __init__(
        self, process_group: dist.ProcessGroup, share: HeadShare, progress: RankProgress | None = None
    ) -> None:
        self._group, self._share, self._progress = process_group, share, progress
        self._bytes_sent = 0

    @property
    def share(self) -> HeadShare:
        """See `TensorParallelGroup.share`."""
        return self._share

    def gather(self, rows: torch.Tensor, num_rows: int) -> torch.Tensor:
        """Send this rank's rows to all others; see `TensorParallelGroup.gather`."""
        size = self._share.size
        sizes = [stop - start for start, stop in slot_ranges(num_rows, size)]
        return self._swap(torch.cat([rows] * size), [rows.shape[0]] * size, sizes)

    def reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """Send every rank what concerns its rows, and add; see `TensorParallelGroup.reduce`."""
        size = self._share.size
        sizes = [stop - start for start, stop in slot_ranges(partial.shape[0], size)]
        own = sizes[self._share.rank]
        parts = self._swap(partial.contiguous(), sizes, [own] * size)
        return add_in_order(parts.view(size, own, *partial.shape[1:]).unbind())

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Return the mean over the ranks; see `TensorParallelGroup.mean`."""
        size, num_rows = self._share.size, values.shape[0]
        parts = self._swap(torch.cat([values] * size), [num_rows] * size, [num_rows] * size)
        return add_in_order(parts.view(size, *values.shape).unbind()) / size

    def first(self, values: torch.Tensor) -> torch.Tensor:
        """Receive what the first rank has; see `TensorParallelGroup.first`."""
        self._tick()
        dist.broadcast(values, group_src=0, group=self._group)
        self._tick()
        if self._share.is_first:
            self._bytes_sent += (self._share.size - 1) * values.nbytes
        return values

    def bytes_sent(self) -> int:
        """Return the bytes sent to other ranks since the last call."""
        sent, self._bytes_sent = self._bytes_sent, 0
        return sent

    def _swap(self, leaving: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        """Send `sent[r]` consecutive rows to each rank r; return what arrived, in the order of the ranks."""
        arrived = leaving.new_empty(sum(received), *leaving.shape[1:])
        self._tick()
        dist.all_to_all_single(arrived.view(torch.uint8), leaving.view(torch.uint8), received, sent, group=self._group)
        self._tick()
        row_bytes = leaving.nbytes // max(1, leaving.shape[0])
        self._bytes_sent += (sum(sent) - sent[self._share.rank]) * row_bytes
        return arrived

    def _tick(self) -> None:
        if self._progress is not None:
            self._progress.tick()
