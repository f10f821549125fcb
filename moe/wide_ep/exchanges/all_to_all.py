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
from .links import Link, Pending, start_counts
from .over_links import ExchangeOverLinks
from .pairs import SortedPairs, add_pairs, sort_pairs
from .parts import local_ids, pairs_from_each, parts_of, rows_by_part
from .stages import ANSWERS, COUNTS, ROWS, Stages
from .wire import Payload, pack, unpack

_COUNT_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class _Handle:
    """`home` has the pairs of this rank in the order in which they come back: by rank, then token, then k.

    `leaving` [M] i64 takes outputs from slot order into the order in which they go back; `num_leaving` to each rank.
    """

    home: SortedPairs
    leaving: torch.Tensor
    num_leaving: list[int]


class AllToAllExchange(ExchangeOverLinks):
    """`Exchange` of one rank over a link that joins all ranks in their order.

    Traffic counts what the rank sends, counts included.

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
        super().__init__((link,), payload)
        self._link, self._progress = link, progress
        self._range = shape.slot_ranges[rank]
        self._scopes = shape.scopes(rank)
        self._widest = max(self._scopes)
        self._num_ranks = shape.num_ranks
        self._stops = torch.tensor([stop for _, stop in shape.slot_ranges], dtype=torch.int32)
        self._of_ranks = torch.arange(shape.num_ranks + 1, dtype=torch.int32)
        self._of_slots = torch.arange(self._range[1] - self._range[0] + 1, dtype=torch.int32)

    def _dispatch(
        self, x: torch.Tensor, physical_ids: torch.Tensor, topk_weights: torch.Tensor | None
    ) -> Stages[Dispatched]:
        """Weights do not travel: they are of use at home only."""
        device, top_k = x.device, physical_ids.shape[1]
        if self._stops.device != device:
            self._stops, self._of_ranks = self._stops.to(device), self._of_ranks.to(device)
            self._of_slots = self._of_slots.to(device)
        owners = parts_of(physical_ids, self._stops)
        tokens, sent = rows_by_part(owners, self._num_ranks)
        self._count_counts()
        with self._meter.collective(self._widest, device):
            counts_come = start_counts(self._link, sent, device)
        home = sort_pairs(owners, self._of_ranks)
        rows = pack(physical_ids, self._payload.encode(x)).index_select(0, tokens)
        yield COUNTS
        with self._meter.collective(self._widest, device):
            received: list[int] = counts_come().tolist()
        if self._progress is not None:
            self._progress.tick()
        rows_come = self._start(rows, sent, received)
        yield ROWS
        ids, body = unpack(rows_come(), top_k)
        ids = local_ids(ids, *self._range)  # [R, K], by source rank, then token
        pairs = sort_pairs(ids, self._of_slots)
        return Dispatched(
            source=self._payload.decode(body, x.dtype, x.shape[1]),
            row_tokens=pairs.tokens.to(torch.int32),
            tokens_per_slot=pairs.counts,
            handle=_Handle(
                home=home,
                leaving=pairs.positions.t()[ids >= 0],
                num_leaving=pairs_from_each(ids, received),
            ),
        )

    def _combine(self, rows: torch.Tensor, topk_weights: torch.Tensor, handle: _Handle) -> Stages[torch.Tensor]:
        expected = [stop - start for start, stop in pairwise(handle.home.offsets)]
        leaving = rows.index_select(0, handle.leaving).view(torch.uint8)
        home_come = self._start(leaving, handle.num_leaving, expected)
        yield ANSWERS
        return add_pairs(home_come().view(rows.dtype), topk_weights, handle.home)

    def _start(self, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> Pending:
        for scope, number in zip(self._scopes, sent, strict=True):
            self._meter.count(scope, number * rows.shape[1])
        with self._meter.collective(self._widest, rows.device):
            pending = self._link.start(rows, sent, received)
        return self._meter.waiting(pending, self._widest, rows.device)

    def _count_counts(self) -> None:
        for scope in self._scopes:
            if scope:
                self._meter.count(scope, _COUNT_BYTES)
