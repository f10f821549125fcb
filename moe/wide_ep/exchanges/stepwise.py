"""Several exchanges of one group of which each step uses one, as its plan says.

Not a choice (topologies/exchange_choice.py makes it, the plan carries it): it does as it is told.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from .contract import Dispatched, StagedExchange
from .padded import PaddedExchange
from .stages import Stages
from .traffic import Traffic


class StepwiseExchange:
    """`StagedExchange` that is another one in every step.

    Args:
        exchanges: all of one group, with different names.
    """

    def __init__(self, exchanges: Sequence[StagedExchange]) -> None:
        self._exchanges = {exchange.name: exchange for exchange in exchanges}
        assert len(self._exchanges) == len(exchanges), [exchange.name for exchange in exchanges]
        self._now = exchanges[0]

    @property
    def name(self) -> str:
        """Of the one that the last step used."""
        return self._now.name

    @property
    def names(self) -> tuple[str, ...]:
        """Of all."""
        return tuple(self._exchanges)

    @property
    def each(self) -> tuple[StagedExchange, ...]:
        """All of them."""
        return tuple(self._exchanges.values())

    @property
    def buffer_bytes(self) -> int:
        """Of the one that holds most: they take turns."""
        return max(exchange.buffer_bytes for exchange in self._exchanges.values())

    def begin_step(self, name: str, bucket: int) -> None:
        """Use the exchange `name` for a step in which no rank dispatches more than `bucket` rows at a time."""
        self._now = self._exchanges[name]
        if isinstance(self._now, PaddedExchange):
            self._now.begin_step(bucket)

    def dispatch(self, x: torch.Tensor, physical_ids: torch.Tensor) -> Dispatched:
        """See `Exchange.dispatch`."""
        return self._now.dispatch(x, physical_ids)

    def dispatching(
        self, x: torch.Tensor, physical_ids: torch.Tensor, topk_weights: torch.Tensor | None = None
    ) -> Stages[Dispatched]:
        """See `StagedExchange.dispatching`."""
        return self._now.dispatching(x, physical_ids, topk_weights)

    def output(self, num_rows: int) -> torch.Tensor | None:
        """See `Exchange.output`."""
        return self._now.output(num_rows)

    def combine(self, rows: torch.Tensor, topk_weights: torch.Tensor, handle: Any) -> torch.Tensor:
        """See `Exchange.combine`."""
        return self._now.combine(rows, topk_weights, handle)

    def combining(self, rows: torch.Tensor, topk_weights: torch.Tensor, handle: Any) -> Stages[torch.Tensor]:
        """See `StagedExchange.combining`."""
        return self._now.combining(rows, topk_weights, handle)

    def repeat(self, traffic: Traffic) -> None:
        """See `StagedExchange.repeat`."""
        self._now.repeat(traffic)

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """See `StagedExchange.rehearsing`."""
        with ExitStack() as stack:
            for exchange in self._exchanges.values():
                stack.enter_context(exchange.rehearsing())
            yield

    def take_traffic(self) -> Traffic:
        """Return what all of them have moved since the last call."""
        return sum((exchange.take_traffic() for exchange in self._exchanges.values()), Traffic())
