"""The exchange over a link between all ranks: torch.distributed (gloo between processes on CPUs, NCCL between GPUs).

Not a link (links.py). Three collectives a layer: counts, rows out, rows back. A row goes once to a rank, with its
choices in front, and is read there by every expert that wants it; a row comes back for every choice, so that they are
added at home in the order of k.
Letters: T tokens, D width, K top-k, R rows received, M pairs of a row and a slot here, W ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from ....telemetry import RankProgress
from .contract import Dispatched
from .group_shape import GroupShape
from .links import Link, swap, swap_counts
from .pairs import SortedPairs, add_pairs, sort_pairs
from .parts import local_ids, pairs_from_each, parts_of, rows_by_part
from .traffic import Traffic, TrafficMeter
from .wire import Payload, PlainPayload, pack, unpack

_COUNT_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class _Handle:
    """`home` has the pairs of this rank in the order in which they come back: by rank, then token, then k.

    `leaving` [M] i64 takes outputs from slot order into the order in which they go back; `num_leaving` to each rank.
    """

    home: SortedPairs
    leaving: torch.Tensor
    num_leaving: list[int]


class AllToAllExchange:
    """`Exchange` of one rank over a link that joins all ranks in their order.

    Args:
        link: of the W ranks.
        shape: of the group.
        payload: how rows are written on their way out; None: as they are.
        progress: ticked between the collectives of a dispatch.
    """

    name = "all_to_all"

    def __init__(
        self,
        link: Link,
        shape: GroupShape,
        *,
        payload: Payload | None = None,
        progress: RankProgress | None = None,
    ) -> None:
        rank = link.index
        self._link, self._payload, self._progress = link, payload or PlainPayload(), progress
        self._range = shape.slot_ranges[rank]
        self._scopes = shape.scopes(rank)
        self._widest = max(self._scopes)
        self._num_ranks = shape.num_ranks
        self._stops = torch.tensor([stop for _, stop in shape.slot_ranges], dtype=torch.int32)
        self._of_ranks = torch.arange(shape.num_ranks + 1, dtype=torch.int32)
        self._of_slots = torch.arange(self._range[1] - self._range[0] + 1, dtype=torch.int32)
        self._meter = TrafficMeter()

    def dispatch(self, x: torch.Tensor, physical_ids: torch.Tensor) -> Dispatched:
        """Send rows of `x` [T, D] to the ranks of their slots; see `Exchange.dispatch`."""
        device, top_k = x.device, physical_ids.shape[1]
        if self._stops.device != device:
            self._stops, self._of_ranks = self._stops.to(device), self._of_ranks.to(device)
            self._of_slots = self._of_slots.to(device)
        with self._meter.own_work(device):
            owners = parts_of(physical_ids, self._stops)
            home = sort_pairs(owners, self._of_ranks)
            tokens, sent = rows_by_part(owners, self._num_ranks)
            rows = pack(physical_ids, self._payload.encode(x)).index_select(0, tokens)
            with self._meter.collective(self._widest, device):
                received = swap_counts(self._link, sent, device)
            if self._progress is not None:
                self._progress.tick()
            arrived = self._swap(rows, sent, received)
            ids, body = unpack(arrived, top_k)
            ids = local_ids(ids, *self._range)  # [R, K], by source rank, then token
            pairs = sort_pairs(ids, self._of_slots)
            handle = _Handle(
                home=home,
                leaving=pairs.positions.t()[ids >= 0],
                num_leaving=pairs_from_each(ids, received),
            )
            source = self._payload.decode(body, x.dtype, x.shape[1])
            self._count_counts()
        return Dispatched(
            source=source, row_tokens=pairs.tokens.to(torch.int32), tokens_per_slot=pairs.counts, handle=handle
        )

    def output(self, num_rows: int) -> None:
        """Return None: outputs may stand anywhere."""

    def combine(self, rows: torch.Tensor, topk_weights: torch.Tensor, handle: _Handle) -> torch.Tensor:
        """Send rows [M, D] back where they came from and add those of this rank; see `Exchange.combine`."""
        with self._meter.own_work(rows.device):
            expected = [stop - start for start, stop in pairwise(handle.home.offsets)]
            leaving = rows.index_select(0, handle.leaving).view(torch.uint8)
            home = self._swap(leaving, handle.num_leaving, expected).view(rows.dtype)
            return add_pairs(home, topk_weights, handle.home)

    def take_traffic(self) -> Traffic:
        """Return what this rank has sent since the last call, counts included."""
        return self._meter.take()

    def _swap(self, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        for scope, number in zip(self._scopes, sent, strict=True):
            self._meter.count(scope, number * rows.shape[1])
        with self._meter.collective(self._widest, rows.device):
            return swap(self._link, rows, sent, received)

    def _count_counts(self) -> None:
        for scope in self._scopes:
            if scope:
                self._meter.count(scope, _COUNT_BYTES)
