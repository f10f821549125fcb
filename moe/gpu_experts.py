"""The part of a MoE layer behind its router that a GPU does in Triton kernels: sorting, products and sum.

Not the layer (layer.py, which decides what rows go where) and no kernel (moe/kernels/). Counts of rows stay on the
device: the host never looks at them.
Letters: T tokens, D width, K top-k, R rows of a source, M of them sorted by slot, S slots.
"""

from __future__ import annotations

import torch

from ..native.gpu import GpuKernels
from .activation import Activation
from .gated import ExpertWeights
from .kernels.combine import triton_combine
from .kernels.experts import triton_ffn
from .kernels.permute import triton_permute


class GpuExperts:
    """Kernels of one MoE layer on one rank.

    Args:
        experts: of the local slots, in formats that `can_multiply` knows.
        activation: of experts.
        kernels: how they are launched.
    """

    def __init__(self, experts: ExpertWeights, activation: Activation, kernels: GpuKernels) -> None:
        self._experts, self._activation, self._kernels = experts, activation, kernels

    def run(
        self,
        x: torch.Tensor,
        slot_ids: torch.Tensor,
        weights: torch.Tensor,
        counts: torch.Tensor,
        shared: torch.Tensor | None,
    ) -> torch.Tensor:
        """Do all of it for rows that stay on this rank.

        Args:
            x: [T, D].
            slot_ids: [T, K] i32, -1 for a choice that is dropped.
            weights: [T, K] f32.
            counts: [S] i64, where the rows of each slot are counted.
            shared: [T, D], what shared experts add.

        Returns:
            [T, D], the same bits as through any exchange.
        """
        sorted_by_slot = triton_permute(slot_ids, len(counts), counts)
        rows = self.multiply(x, counts, sorted_by_slot.row_tokens)
        return triton_combine(rows, weights, sorted_by_slot.rows, shared=shared)

    def multiply(self, source: torch.Tensor, counts: torch.Tensor, row_tokens: torch.Tensor | None) -> torch.Tensor:
        """Run rows sorted by slot through their experts.

        Args:
            source: [R, D] where rows lie.
            counts: [S] i64 on their device, sums to M at most.
            row_tokens: [M] i32, which row of `source` each sorted one is; None: `source` holds just them, in order.

        Returns:
            [M, D], unweighted; what stands behind the last slot's rows means nothing.
        """
        return triton_ffn(
            source,
            counts,
            self._experts,
            self._activation,
            target=self._kernels.target,
            row_tokens=row_tokens,
            batch_invariant=self._kernels.batch_invariant,
        )


class GpuPairs:
    """`PairKernels` of exchanges."""

    def sort(self, slot_ids: torch.Tensor, num_slots: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `PairKernels.sort`."""
        return triton_permute(slot_ids, num_slots)

    def add(self, rows: torch.Tensor, topk_weights: torch.Tensor, row_of: torch.Tensor) -> torch.Tensor:
        """See `PairKernels.add`."""
        return triton_combine(rows, topk_weights.contiguous(), row_of)
