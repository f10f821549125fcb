"""The exchange of a group of one rank: rows are sorted by slot and never leave.

Not a shortcut around the contract: the same order of rows and of additions as every other exchange.
Letters: T tokens, D width, K top-k, M rows, P slots.
"""

from __future__ import annotations

import torch

from .contract import Dispatched
from .pairs import SortedPairs, add_pairs, sort_pairs
from .traffic import Traffic


class LocalExchange:
    """`Exchange` for EP1.

    Args:
        num_slots: P, all of them here.
    """

    name = "local"

    def __init__(self, num_slots: int) -> None:
        self._boundaries = torch.arange(num_slots + 1, dtype=torch.int32)

    def dispatch(self, x: torch.Tensor, physical_ids: torch.Tensor) -> Dispatched:
        """Sort copies of the rows of `x` [T, D] by slot; see `Exchange.dispatch`."""
        if self._boundaries.device != x.device:
            self._boundaries = self._boundaries.to(x.device)
        pairs = sort_pairs(physical_ids, self._boundaries)
        return Dispatched(source=x, row_tokens=pairs.tokens.to(torch.int32), tokens_per_slot=pairs.counts, handle=pairs)

    def output(self, num_rows: int) -> None:
        """Return None: outputs may stand anywhere."""

    def combine(self, rows: torch.Tensor, topk_weights: torch.Tensor, handle: SortedPairs) -> torch.Tensor:
        """Add rows [M, D] back to their tokens; see `Exchange.combine`."""
        return add_pairs(rows, topk_weights, handle)

    @property
    def buffer_bytes(self) -> int:
        """None: rows are read where they lie."""
        return 0

    def take_traffic(self) -> Traffic:
        """Return nothing: rows are read where they lie."""
        return Traffic()
