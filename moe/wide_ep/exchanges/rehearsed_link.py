"""A link that can stay silent for a while, so that what stands around its collectives can be tried by one rank alone.

Not a link of its own. Kernels are compiled when they are first launched, which takes one rank longer than another; a
rank that rehearses a step first begins its first collective with nothing left to compile, and nobody waits in one, with
a clock running, for a compiler. Shapes: as in links.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .links import Link, Pending


class RehearsedLink:
    """`Link` over another one.

    Args:
        link: what really joins the members.

    Attributes:
        rehearses: no collective is begun; what "arrives" has the right shape and came from this rank.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self.size, self.index = link.size, link.index
        self.rehearses = False

    @property
    def held_bytes(self) -> int:
        """See `Link.held_bytes`."""
        return self._link.held_bytes

    def start(
        self, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], *, evenly: bool = False
    ) -> Pending:
        """Begin an all-to-all; a rehearsal hands back what was sent, where as many rows are to arrive."""
        if not self.rehearses:
            return self._link.start(rows, sent, received, evenly=evenly)
        num_rows = sum(received)
        arrived = rows.clone() if num_rows == len(rows) else rows.new_zeros(num_rows, rows.shape[1])
        return lambda: arrived

    def gather(self, rows: torch.Tensor) -> Pending:
        """Begin an all-gather; a rehearsal hands back what was sent, once for each member."""
        if not self.rehearses:
            return self._link.gather(rows)
        arrived = rows.repeat(self.size, 1)
        return lambda: arrived
