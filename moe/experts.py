"""The gated FFNs of the experts of one rank, over rows sorted by slot.

Not routing and no weights of tokens: rows come out unweighted, in the activation dtype, in the order they came in.
Letters: M rows, S slots of this rank, D width, F expert width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(kw_only=True)
class ExpertWeights:
    """The experts of one layer that a rank holds, in slot order.

    Attributes:
        w13: [S, 2F, D], gate rows first, then up rows.
        w2: [S, D, F].
    """

    w13: torch.Tensor
    w2: torch.Tensor

    @property
    def bytes_per_slot(self) -> int:
        """Exact bytes of one expert."""
        return sum(t.shape[1] * t.shape[2] * t.element_size() for t in (self.w13, self.w2))
