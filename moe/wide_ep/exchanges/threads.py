"""The exchange between ranks that are threads of one process: rows are read where their owners left them.

Not for speed: it lets tests run any topology in one process. One barrier a collective; each thread reads all inputs.
Letters: T tokens, D width, K top-k, M rows, P slots of the group, W ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .contract import Dispatched
from .pairs import SortedPairs, add_pairs, sort_pairs


@dataclass(frozen=True, kw_only=True)
class _Handle:
    """`pairs.positions` count over the rows of all ranks in rank order; `returned_bytes` of others' rows go back."""

    pairs: SortedPairs
    returned_bytes: int


class ThreadHub:
    """The meeting place of the W ranks of one group.

    Args:
        slot_ranges: (start, stop) of each rank, as in `ExpertPlacement`.
        timeout_s: how long a rank waits for the others in one collective; None waits for ever.
    """

    def __init__(self, slot_ranges: Sequence[tuple[int, int]], *, timeout_s: float | None = None) -> None:
        self.slot_ranges = tuple(slot_ranges)
        self.num_ranks = len(self.slot_ranges)
        self._timeout_s = timeout_s
        self._barrier = threading.Barrier(self.num_ranks)
        self._reason: str | None = None
        # A rank cannot enter its next dispatch before all have left this one (combine lies between), nor the other way
        # round: so one place each is enough.
        self.inputs: list[tuple[torch.Tensor, torch.Tensor]] = [(torch.empty(0), torch.empty(0))] * self.num_ranks
        self.outputs: list[torch.Tensor] = [torch.empty(0)] * self.num_ranks

    def rank(self, rank: int) -> ThreadExchange:
        """Return the exchange that the thread of `rank` uses."""
        return ThreadExchange(self, rank)

    def abort(self, reason: str) -> None:
        """Make every rank that waits, or comes to wait, raise RuntimeError with `reason`."""
        if self._reason is None:
            self._reason = reason
        self._barrier.abort()

    def meet(self) -> None:
        """Wait until every rank is here."""
        try:
            self._barrier.wait(self._timeout_s)
        except threading.BrokenBarrierError:
            reason = self._reason or f"a rank did not come to the exchange within {self._timeout_s} s"
            raise RuntimeError(f"exchange between threads broken: {reason}") from None


class ThreadExchange:
    """`Exchange` of one rank of a `ThreadHub`."""

    name = "threads"

    def __init__(self, hub: ThreadHub, rank: int) -> None:
        self._hub = hub
        self._rank = rank
        self._start, self._stop = hub.slot_ranges[rank]
        self._boundaries = torch.arange(hub.slot_ranges[-1][1] + 1, dtype=torch.int32)
        self._bytes_sent = 0

    def dispatch(self, x: torch.Tensor, physical_ids: torch.Tensor) -> Dispatched:
        """Take copies of all rows that chose a slot of this rank; see `Exchange.dispatch`."""
        hub = self._hub
        hub.inputs[self._rank] = (x, physical_ids)
        hub.meet()
        inputs = list(hub.inputs)
        pairs = sort_pairs(torch.cat([ids for _, ids in inputs]), self._boundaries.to(x.device))
        offsets = pairs.offsets
        mine = pairs.tokens[offsets[self._start] : offsets[self._stop]]  # [M] row of the stacked inputs
        rows = torch.cat([rows for rows, _ in inputs]).index_select(0, mine)
        counts = pairs.counts[self._start : self._stop]  # [P_local] i64
        row_bytes = x.shape[1] * x.element_size()
        local = int(((physical_ids >= self._start) & (physical_ids < self._stop)).sum())
        self._bytes_sent += (int((physical_ids >= 0).sum()) - local) * row_bytes
        first = sum(ids.shape[0] for _, ids in inputs[: self._rank])
        home = slice(first, first + x.shape[0])
        own = SortedPairs(
            tokens=pairs.tokens,
            offsets=offsets,
            counts=pairs.counts,
            positions=pairs.positions[:, home],
            dropped=None if pairs.dropped is None else pairs.dropped[:, home],
        )
        handle = _Handle(pairs=own, returned_bytes=(rows.shape[0] - local) * row_bytes)
        return Dispatched(source=rows, tokens_per_slot=counts, handle=handle)

    def output(self, num_rows: int) -> None:
        """Return None: outputs may stand anywhere."""

    def combine(self, rows: torch.Tensor, topk_weights: torch.Tensor, handle: _Handle) -> torch.Tensor:
        """Fetch the outputs of this rank's pairs and add them; see `Exchange.combine`."""
        hub = self._hub
        hub.outputs[self._rank] = rows
        hub.meet()
        self._bytes_sent += handle.returned_bytes
        return add_pairs(torch.cat(hub.outputs), topk_weights, handle.pairs)

    def bytes_sent(self) -> int:
        """Return the bytes that a link would have carried away from this rank since the last call."""
        sent, self._bytes_sent = self._bytes_sent, 0
        return sent
