"""The exchange over torch.distributed: gloo between processes on CPUs, NCCL between GPUs.

Not a process group (topologies/groups.py makes it). Three collectives a layer: counts per slot, rows out, rows back.
Letters: T tokens, D width, K top-k, M rows received, P slots of the group, P_local of this rank, W ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ....telemetry import RankProgress
from .contract import Dispatched
from .pairs import SortedPairs, add_pairs, sort_pairs


@dataclass(frozen=True, kw_only=True)
class _Handle:
    """`order` [M] i64 takes rows from arrival order (by source rank, then slot) to slot order."""

    pairs: SortedPairs
    order: torch.Tensor
    sent: list[int]  # rows to each rank
    received: list[int]  # rows from each rank


class AllToAllExchange:
    """`Exchange` of one rank of a torch.distributed group.

    Rows travel as raw bytes, so that every number format works with every back end.

    Args:
        process_group: of the W ranks, in rank order; None is the default group.
        slot_ranges: (start, stop) of each rank, as in `ExpertPlacement`.
        rank: of this process in the group.
        progress: ticked between the collectives of a dispatch.
    """

    name = "all_to_all"

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        slot_ranges: Sequence[tuple[int, int]],
        rank: int,
        progress: RankProgress | None = None,
    ) -> None:
        self._group = process_group
        self._rank = rank
        self._progress = progress
        self._starts = [start for start, _ in slot_ranges]
        self._stops = [stop for _, stop in slot_ranges]
        self._slots_per_rank = [stop - start for start, stop in slot_ranges]
        self._num_local = self._slots_per_rank[rank]
        num_ranks = len(slot_ranges)
        self._boundaries = torch.arange(self._stops[-1] + 1, dtype=torch.int32)
        self._slot_of_count = torch.arange(self._num_local).repeat(num_ranks)  # [W * P_local]
        self._bytes_sent = 0

    def dispatch(self, x: torch.Tensor, physical_ids: torch.Tensor) -> Dispatched:
        """Send rows of `x` [T, D] to the ranks of their slots; see `Exchange.dispatch`."""
        device, num_ranks = x.device, len(self._starts)
        if self._boundaries.device != device:
            self._boundaries = self._boundaries.to(device)
        pairs = sort_pairs(physical_ids, self._boundaries)
        offsets = pairs.offsets
        sent = [offsets[stop] - offsets[start] for start, stop in zip(self._starts, self._stops)]
        counts = self._exchange_counts(pairs.counts.to(device))  # [W, P_local] i64, on the CPU
        if self._progress is not None:
            self._progress.tick()
        received: list[int] = counts.sum(1).tolist()
        arrived = self._exchange_rows(x.index_select(0, pairs.tokens), sent, received)  # [M, D] by source, then slot
        order = torch.repeat_interleave(self._slot_of_count, counts.view(-1)).sort(stable=True)[1].to(device)  # [M]
        self._bytes_sent += 8 * sum(self._slots_per_rank) - 8 * self._num_local if num_ranks > 1 else 0
        return Dispatched(
            source=arrived.index_select(0, order),
            tokens_per_slot=counts.sum(0),
            handle=_Handle(pairs=pairs, order=order, sent=sent, received=received),
        )

    def output(self, num_rows: int) -> None:
        """Return None: outputs may stand anywhere."""

    def combine(self, rows: torch.Tensor, topk_weights: torch.Tensor, handle: _Handle) -> torch.Tensor:
        """Send rows [M, D] back where they came from and add those of this rank; see `Exchange.combine`."""
        leaving = torch.empty_like(rows).index_copy_(0, handle.order, rows)  # [M, D] by source, then slot
        home = self._exchange_rows(leaving, handle.received, handle.sent)  # in the order of `pairs`
        return add_pairs(home, topk_weights, handle.pairs)

    def bytes_sent(self) -> int:
        """Return the bytes sent to other ranks since the last call, counts included."""
        sent, self._bytes_sent = self._bytes_sent, 0
        return sent

    def _exchange_counts(self, counts: torch.Tensor) -> torch.Tensor:
        """Give every rank its part of `counts` [P]; return [W, P_local]."""
        num_ranks = len(self._starts)
        arrived = counts.new_empty(num_ranks * self._num_local)
        dist.all_to_all_single(arrived, counts, [self._num_local] * num_ranks, self._slots_per_rank, group=self._group)
        return arrived.view(num_ranks, self._num_local).cpu()

    def _exchange_rows(self, rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        """Send `sent[r]` consecutive rows to each rank r; return what arrived in rank order."""
        arrived = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(arrived.view(torch.uint8), rows.view(torch.uint8), received, sent, group=self._group)
        row_bytes = rows.shape[1] * rows.element_size()
        self._bytes_sent += (sum(sent) - sent[self._rank]) * row_bytes
        return arrived
