"""The exchange between ranks that are threads of one process: rows are read where their owners left them.

Not for speed: it lets tests run any topology in one process. One meeting a collective; each thread reads all inputs.
Letters: T tokens, D width, K top-k, M rows, P slots of the group, W ranks. Units: bytes that a link would have carried.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ....topologies.meeting import Meeting
from .contract import Dispatched
from .group_shape import GroupShape
from .links import Link
from .pairs import SortedPairs, add_pairs, sort_pairs
from .parts import parts_of, rows_by_part
from .thread_links import ThreadMeetings
from .traffic import Traffic, TrafficMeter


@dataclass(frozen=True, kw_only=True)
class _Handle:
    """`pairs.positions` count over the rows of all ranks in rank order; `returned` [W] rows go back to each rank."""

    pairs: SortedPairs
    returned: list[int]


class ThreadHub:
    """The meeting place of the W ranks of one group.

    Args:
        slot_ranges: (start, stop) of each rank, as in `ExpertPlacement`.
        timeout_s: how long a rank waits for the others in one collective; None waits for ever.
        shape: of the group, where it has more to say than `slot_ranges`.
    """

    def __init__(
        self,
        slot_ranges: Sequence[tuple[int, int]],
        *,
        timeout_s: float | None = None,
        shape: GroupShape | None = None,
    ) -> None:
        self.shape = shape or GroupShape(slot_ranges=tuple(slot_ranges))
        self._meetings = ThreadMeetings(timeout_s)
        self.meeting = self._meetings.of(range(self.num_ranks))

    @property
    def slot_ranges(self) -> tuple[tuple[int, int], ...]:
        """(start, stop) of each rank."""
        return self.shape.slot_ranges

    @property
    def num_ranks(self) -> int:
        """W."""
        return self.shape.num_ranks

    def rank(self, rank: int) -> ThreadExchange:
        """Return the exchange that the thread of `rank` uses."""
        return ThreadExchange(self.meeting, self.shape, rank)

    def link(self, ranks: Sequence[int], rank: int) -> Link:
        """Return what joins some of the ranks, seen from `rank`, for exchanges over links."""
        return self._meetings.link(ranks, rank)

    def abort(self, reason: str) -> None:
        """Make every rank that waits, or comes to wait, raise RuntimeError with `reason`."""
        self._meetings.abort(reason)


class ThreadExchange:
    """`Exchange` of one rank of a `ThreadHub`.

    Args:
        meeting: of all ranks.
        shape: of the group.
        rank: of this thread.
    """

    name = "threads"

    def __init__(self, meeting: Meeting, shape: GroupShape, rank: int) -> None:
        self._meeting, self._shape, self._rank = meeting, shape, rank
        self._start, self._stop = shape.slot_ranges[rank]
        self._scopes = shape.scopes(rank)
        self._boundaries = torch.arange(shape.num_slots + 1, dtype=torch.int32)
        self._stops = torch.tensor([stop for _, stop in shape.slot_ranges], dtype=torch.int32)
        self._meter = TrafficMeter()

    def dispatch(self, x: torch.Tensor, physical_ids: torch.Tensor) -> Dispatched:
        """Take copies of all rows that chose a slot of this rank; see `Exchange.dispatch`."""
        inputs: list[tuple[torch.Tensor, torch.Tensor]] = self._meeting.swap(self._rank, (x, physical_ids))
        pairs = sort_pairs(torch.cat([ids for _, ids in inputs]), self._boundaries.to(x.device))
        offsets = pairs.offsets
        mine = pairs.tokens[offsets[self._start] : offsets[self._stop]]  # [M] row of the stacked inputs
        rows = torch.cat([rows for rows, _ in inputs]).index_select(0, mine)
        counts = pairs.counts[self._start : self._stop]  # [P_local] i64
        first = sum(ids.shape[0] for _, ids in inputs[: self._rank])
        home = slice(first, first + x.shape[0])
        own = SortedPairs(
            tokens=pairs.tokens,
            offsets=offsets,
            counts=pairs.counts,
            positions=pairs.positions[:, home],
            dropped=None if pairs.dropped is None else pairs.dropped[:, home],
        )
        _, readers = rows_by_part(parts_of(physical_ids, self._stops.to(x.device)), self._shape.num_ranks)
        self._count(readers, x)
        returned = [int(((ids >= self._start) & (ids < self._stop)).sum()) for _, ids in inputs]
        return Dispatched(source=rows, tokens_per_slot=counts, handle=_Handle(pairs=own, returned=returned))

    def output(self, num_rows: int) -> None:
        """Return None: outputs may stand anywhere."""

    def combine(self, rows: torch.Tensor, topk_weights: torch.Tensor, handle: _Handle) -> torch.Tensor:
        """Fetch the outputs of this rank's pairs and add them; see `Exchange.combine`."""
        outputs: list[torch.Tensor] = self._meeting.swap(self._rank, rows)
        self._count(handle.returned, rows)
        return add_pairs(torch.cat(outputs), topk_weights, handle.pairs)

    @property
    def buffer_bytes(self) -> int:
        """None: rows are read where they lie."""
        return 0

    def take_traffic(self) -> Traffic:
        """Return what a link would have carried away from this rank since the last call: a row once a rank."""
        return self._meter.take()

    def _count(self, num_rows: Sequence[int], rows: torch.Tensor) -> None:
        row_bytes = rows.shape[1] * rows.element_size()
        for scope, number in zip(self._scopes, num_rows, strict=True):
            self._meter.count(scope, number * row_bytes)
