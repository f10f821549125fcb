"""Ranks of an attention replica that are processes: torch.distributed, with gloo between CPUs and NCCL between GPUs.

Not a process group (topologies/groups.py makes it). Sums are not left to the library, whose order may depend on the
number of rows: parts travel, and each rank adds those of its own rows in the order of the ranks.
Letters: W ranks of the replica, T rows of the replica, t rows of this rank, D width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ..telemetry import RankProgress
from ..topologies.grid import slot_ranges
from ..topologies.meeting import blaming_peers
from .tensor_parallel import HeadShare, add_in_order
from .tensor_parallel_meeting import MeetingTensorParallelGroup


class DistributedTensorParallelGroup(MeetingTensorParallelGroup):
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
        super().__init__(share)
        self._group, self._progress = process_group, progress

    def reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """Send every rank only what concerns its rows, and add; see `TensorParallelGroup.reduce`."""
        size = self.share.size
        sizes = [stop - start for start, stop in slot_ranges(partial.shape[0], size)]
        own = sizes[self.share.rank]
        self._bytes_sent += partial.nbytes - self.share.own_rows(partial).nbytes
        parts = self._swap(partial.contiguous(), sizes, [own] * size)
        return add_in_order(parts.view(size, own, *partial.shape[1:]).unbind())

    def first(self, values: torch.Tensor) -> torch.Tensor:
        """Receive what the first rank has; see `TensorParallelGroup.first`."""
        if self.share.is_first:
            self._count_to_all(values)
        self._tick()
        with blaming_peers():
            dist.broadcast(values, group_src=0, group=self._group)
        self._tick()
        return values

    def _meet(self, values: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
        size = self.share.size
        arrived = self._swap(torch.cat([values] * size), [values.shape[0]] * size, sizes)
        return list(torch.split(arrived, list(sizes)))

    def _swap(self, leaving: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        """Send `sent[r]` consecutive rows to each rank r; return what arrived, in the order of the ranks."""
        arrived = leaving.new_empty(sum(received), *leaving.shape[1:])
        as_bytes = arrived.view(torch.uint8), leaving.view(torch.uint8)
        self._tick()
        with blaming_peers():
            dist.all_to_all_single(*as_bytes, list(received), list(sent), group=self._group)
        self._tick()
        return arrived

    def _tick(self) -> None:
        if self._progress is not None:
            self._progress.tick()
