"""Every launch that a MoE layer of a model makes, from shapes alone: to compile them before they are needed.

Tensors are of device `meta`, which has no memory. Not a model's config (models/) and nothing that runs.
Letters: T tokens, D width, K top-k.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ...native.gpu import GpuTarget, Launch
from .combine import combine_launch


@dataclass(frozen=True, kw_only=True)
class MoEShapes:
    """What of a model its MoE kernels depend on.

    Attributes:
        width: D.
        top_k: K.
        dtype: of activations.
    """

    width: int
    top_k: int
    dtype: torch.dtype = torch.bfloat16

    def rows(self, number: int) -> torch.Tensor:
        """Return [number, D] activations."""
        return torch.empty(number, self.width, dtype=self.dtype, device="meta")


def moe_launches(shapes: MoEShapes, num_tokens: int, target: GpuTarget) -> Iterator[Launch]:
    """Yield the launches of one layer with `num_tokens` rows on one rank."""
    choices = torch.empty(num_tokens, shapes.top_k, dtype=torch.int32, device="meta")
    rows, residual = shapes.rows(choices.numel()), shapes.rows(num_tokens)
    yield combine_launch(rows, choices.float(), choices, residual=residual)[0]
    yield combine_launch(rows, choices.float(), choices)[0]
