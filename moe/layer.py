"""The MoE layer of one rank: route, assign replicas, dispatch, experts, combine, and add the shared experts.

Not an exchange and not a router: four boxes that know nothing of each other are joined here, and what went through them
is counted. A collective: every rank calls it once per layer per step, with T = 0 too.
Suffixes: T tokens of this rank, D width, E logical experts, K top-k, M rows received, S slots of this rank.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from ..telemetry import RankCounters, RankProgress
from .experts import ExpertWeights, grouped_ffn, swiglu
from .routing import RoutingConfig, route
from .wide_ep import Exchange, ExpertPlacement, assign_replicas, replica_table


class GatedFFN(Protocol):
    """down(silu(gate(x)) * up(x)) with w13 [2F, D] and w2 [D, F]; `models.weights.DenseFFN` is one."""

    @property
    def w13(self) -> torch.Tensor:
        """[2F, D], gate rows first."""
        ...

    @property
    def w2(self) -> torch.Tensor:
        """[D, F]."""
        ...


class LayerExperts(Protocol):
    """What a MoE layer holds on this rank; `models.weights.MoEWeights` is one and says the shapes."""

    @property
    def router(self) -> torch.Tensor:
        """[E, D]."""
        ...

    @property
    def experts(self) -> ExpertWeights:
        """Of the local slots, in slot order."""
        ...

    @property
    def selection_bias(self) -> torch.Tensor | None:
        """[E] f32."""
        ...

    @property
    def shared(self) -> GatedFFN | None:
        """The shared experts as one FFN."""
        ...

    @property
    def shared_gate(self) -> torch.Tensor | None:
        """[1, D]."""
        ...


def num_bytes(*tensors: torch.Tensor | None) -> int:
    """Return what `tensors` take in memory, None for those that do not exist."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


class MoELayer:
    """One MoE layer on one rank.

    Args:
        routing: how logits become experts.
        weights: router, experts of this rank's slots, shared experts.
        placement: of all experts of the group.
        moe_layer: number of this layer among MoE layers.
        rank: this rank in the group.
        exchange: joins the ranks.
        counters: where bytes and tokens are counted.
        progress: ticked before and after each collective; None in tests.
    """

    def __init__(
        self,
        routing: RoutingConfig,
        weights: LayerExperts,
        *,
        placement: ExpertPlacement,
        moe_layer: int,
        rank: int,
        exchange: Exchange,
        counters: RankCounters,
        progress: RankProgress | None = None,
    ) -> None:
        assert weights.experts.w13.shape[0] == placement.num_local_slots(rank), (weights.experts.w13.shape, rank)
        device = weights.router.device
        self._routing, self._moe_layer, self._exchange = routing, moe_layer, exchange
        self._counters, self._progress = counters, progress
        self._router = weights.router.float()  # [E, D]: logits are computed in fp32
        self._selection_bias = weights.selection_bias
        self._experts, self._shared, self._shared_gate = weights.experts, weights.shared, weights.shared_gate
        self._placement, self._rank = placement, rank
        # Valid ids cannot lack an owner when every expert has one, so the check costs nothing in a sound placement.
        self._all_owned = bool((replica_table(placement, moe_layer, rank)[:-1] >= 0).all())
        self._no_ids = torch.empty(0, routing.top_k, dtype=torch.int32, device=device)
        self._no_weights = torch.empty(0, routing.top_k, device=device)
        self._bytes_per_slot = weights.experts.bytes_per_slot
        self._router_bytes = num_bytes(self._router, weights.selection_bias)
        shared = weights.shared
        self._shared_bytes = num_bytes(shared.w13, shared.w2, weights.shared_gate) if shared is not None else 0

    def __call__(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Return what the experts add to the residual: [T, D] -> [T, D]."""
        num_tokens = x_TD.shape[0]
        physical_ids_TK, topk_weights_TK = self._choose(x_TD) if num_tokens else (self._no_ids, self._no_weights)
        self._tick()
        dispatched = self._exchange.dispatch(x_TD, physical_ids_TK)
        self._tick()
        tokens_per_slot = dispatched.tokens_per_slot
        rows_MD = grouped_ffn(dispatched.rows, tokens_per_slot, self._experts)
        self._count(tokens_per_slot.numpy(), num_tokens)
        shared_TD = self._shared_experts(x_TD) if num_tokens and self._shared is not None else None
        self._tick()
        combined_TD = self._exchange.combine(rows_MD, topk_weights_TK, dispatched.handle)
        self._tick()
        self._counters.add_bytes("exchange", self._exchange.bytes_sent())
        return combined_TD if shared_TD is None else combined_TD + shared_TD

    def _choose(self, x_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        topk_ids_TK, topk_weights_TK = route(F.linear(x_TD.float(), self._router), self._routing, self._selection_bias)
        physical_ids_TK = assign_replicas(topk_ids_TK, self._placement, self._moe_layer, self._rank)
        if not self._all_owned:
            self._report_unowned(topk_ids_TK, physical_ids_TK)
        return physical_ids_TK, topk_weights_TK

    def _report_unowned(self, topk_ids_TK: torch.Tensor, physical_ids_TK: torch.Tensor) -> None:
        unowned = topk_ids_TK[(physical_ids_TK < 0) & (topk_ids_TK >= 0)]
        if not unowned.numel():
            return
        if __debug__:
            ids = sorted(set(unowned.tolist()))
            raise RuntimeError(f"MoE layer {self._moe_layer}: experts {ids} were chosen, but no rank holds them")
        self._counters.unowned_ids += unowned.numel()

    def _shared_experts(self, x_TD: torch.Tensor) -> torch.Tensor:
        assert self._shared is not None
        output_TD = F.linear(swiglu(F.linear(x_TD, self._shared.w13)), self._shared.w2)
        if self._shared_gate is not None:
            output_TD = output_TD * F.linear(x_TD, self._shared_gate).sigmoid()
        return output_TD

    def _count(self, tokens_per_slot: np.ndarray, num_tokens: int) -> None:
        counters = self._counters
        counters.add_expert_tokens(self._moe_layer, tokens_per_slot)
        counters.add_bytes("routed", int(np.count_nonzero(tokens_per_slot)) * self._bytes_per_slot)
        if num_tokens:
            counters.add_bytes("dense", self._router_bytes)
            if self._shared_bytes:
                counters.add_bytes("shared", self._shared_bytes)

    def _tick(self) -> None:
        if self._progress is not None:
            self._progress.tick()
