"""What all exchanges over links have in common: each method whole or stage by stage, and the books of what travelled.

Not a way of rows: all_to_all.py, hierarchical.py and padded.py say by `_dispatch` and `_combine` what their stages are.
Letters: T tokens of this rank, D width, K top-k, M rows received. Units: as in traffic.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from .contract import Dispatched
from .links import Link
from .rehearsed_link import RehearsedLink
from .stages import Stages, finish
from .traffic import Traffic, TrafficMeter
from .wire import Payload, PlainPayload


class ExchangeOverLinks(ABC):
    """`StagedExchange` of one rank, but for its stages and its name.

    Args:
        links: all that it uses.
        payload: how rows are written on their way out; None: as they are.
    """

    def __init__(self, links: Sequence[Link], payload: Payload | None) -> None:
        self._links = tuple(links)
        self._payload = payload or PlainPayload()
        self._meter = TrafficMeter()

    def dispatch(self, x: torch.Tensor, physical_ids: torch.Tensor) -> Dispatched:
        """Send rows of `x` [T, D] towards the ranks of their slots; see `Exchange.dispatch`."""
        return finish(self.dispatching(x, physical_ids))

    def dispatching(
        self, x: torch.Tensor, physical_ids: torch.Tensor, topk_weights: torch.Tensor | None = None
    ) -> Stages[Dispatched]:
        """Take the stages of `dispatch`; see `StagedExchange.dispatching`."""
        return self._meter.stages(self._dispatch(x, physical_ids, topk_weights), x.device)

    def output(self, num_rows: int) -> None:
        """Return None: outputs may stand anywhere."""
        return None

    def combine(self, rows: torch.Tensor, topk_weights: torch.Tensor, handle: Any) -> torch.Tensor:
        """Send rows [M, D] back where they came from and add those of this rank; see `Exchange.combine`."""
        return finish(self.combining(rows, topk_weights, handle))

    def combining(self, rows: torch.Tensor, topk_weights: torch.Tensor, handle: Any) -> Stages[torch.Tensor]:
        """Take the stages of `combine`; see `StagedExchange.combining`."""
        return self._meter.stages(self._combine(rows, topk_weights, handle), rows.device)

    @property
    def buffer_bytes(self) -> int:
        """The most bytes of rows that a collective over one of the links has sent and received at a time."""
        return max(link.held_bytes for link in self._links)

    def take_traffic(self) -> Traffic:
        """Return what this rank has put on links since the last call."""
        return self._meter.take()

    def repeat(self, traffic: Traffic) -> None:
        """Book once more what a replayed graph has moved, see `StagedExchange.repeat`."""
        self._meter.add(traffic)

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Begin no collective while the body runs, see `StagedExchange.rehearsing`."""
        links = [link for link in self._links if isinstance(link, RehearsedLink)]
        for link in links:
            link.rehearses = True
        try:
            yield
        finally:
            for link in links:
                link.rehearses = False
            self._meter.take()  # nothing has travelled

    @abstractmethod
    def _dispatch(
        self, x: torch.Tensor, physical_ids: torch.Tensor, topk_weights: torch.Tensor | None
    ) -> Stages[Dispatched]:
        """Run the stages of `dispatch`; given weights may travel with the rows."""

    @abstractmethod
    def _combine(self, rows: torch.Tensor, topk_weights: torch.Tensor, handle: Any) -> Stages[torch.Tensor]:
        """Run the stages of `combine`."""
