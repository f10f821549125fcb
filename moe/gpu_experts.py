"""The part of a MoE layer behind its router's product that a GPU does in Triton kernels: choice, sorting and experts.

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
from .kernels.expert_tiles import rows_of_tile
from .kernels.experts import triton_ffn
from .kernels.permute import Permuted, triton_permute
from .kernels.route import triton_route
from .kernels.route_permute import RoutedRows, fits_one_program, route_permute_launch
from .kernels.row_tiles import RowTiles, empty_tiles
from .routing import RoutingConfig
from .wide_ep.exchanges.contract import Dispatched


class GpuExperts:
    """Kernels of one MoE layer on one rank.

    Args:
        experts: of the local slots, in formats that `can_multiply` knows.
        activation: of experts.
        kernels: how they are launched.
    """

    def __init__(self, experts: ExpertWeights, activation: Activation, kernels: GpuKernels) -> None:
        self._experts, self._activation, self._kernels = experts, activation, kernels

    def route(
        self,
        logits: torch.Tensor,
        routing: RoutingConfig,
        selection_bias: torch.Tensor | None,
        table: torch.Tensor,
        counts: torch.Tensor,
        num_filled: torch.Tensor | None,
    ) -> tuple[RoutedRows, RowTiles]:
        """Choose experts for rows that stay on this rank, sort choices by slot, and cut them into tiles.

        Args:
            logits: [T, E] f32.
            routing: see `RoutingConfig`.
            selection_bias: [E] f32.
            table: [E + 1] i32, the slot of each expert, -1 for one without: its choices are dropped.
            counts: [S] i64, where the rows of each slot are counted.
            num_filled: [1] i64; rows from there on stand for nothing. None: all do.
        """
        num_tokens, num_rows = len(logits), len(logits) * routing.top_k
        block_m = rows_of_tile(num_rows, len(counts), batch_invariant=self._kernels.batch_invariant)
        cut = empty_tiles(num_rows, len(counts), block_m, logits.device)
        # One program adds up a softmax in another order than the program of one token.
        if fits_one_program(num_tokens, routing) and not self._kernels.batch_invariant:
            launch, routed = route_permute_launch(
                logits, routing, selection_bias, table, counts=counts, cut=cut, num_filled=num_filled
            )
            launch.run()
            return routed, cut
        chosen, slot_ids = triton_route(logits, routing, selection_bias, table, num_filled)
        return RoutedRows(chosen, triton_permute(slot_ids, len(counts), counts, cut)), cut

    def run(self, x: torch.Tensor, permuted: Permuted, cut: RowTiles) -> torch.Tensor:
        """Run rows that stay on this rank: x [T, D] -> [M, D], unweighted."""
        return triton_ffn(
            x,
            permuted.tokens_per_slot,
            self._experts,
            self._activation,
            kernels=self._kernels,
            row_tokens=permuted.row_tokens,
            cut=cut,
        )

    def run_arrived(self, arrived: Dispatched) -> torch.Tensor:
        """Run rows that an exchange brought -> [M, D], unweighted; behind the last slot's rows nothing is written."""
        return triton_ffn(
            arrived.source,
            arrived.tokens_per_slot.to(arrived.source.device, non_blocking=True),
            self._experts,
            self._activation,
            kernels=self._kernels,
            row_tokens=arrived.row_tokens,
            expected_rows=arrived.expected_rows,
        )


class GpuPairs:
    """`PairKernels` of exchanges."""

    def sort(self, slot_ids: torch.Tensor, num_slots: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `PairKernels.sort`."""
        return triton_permute(slot_ids, num_slots)

    def add(self, rows: torch.Tensor, topk_weights: torch.Tensor, row_of: torch.Tensor) -> torch.Tensor:
        """See `PairKernels.add`."""
        return triton_combine(rows, topk_weights.contiguous(), row_of)
