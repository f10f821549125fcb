"""The MoE layer of one rank: route, assign replicas, dispatch, experts, combine, and add the shared experts.

Not an exchange and not a router: four boxes that know nothing of each other are joined here, and what went through them
is counted. A collective: every rank calls it once per layer per step, with T = 0 too.
Suffixes: T tokens of this rank, D width, E logical experts, K top-k, M rows received, S slots of this rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from ..quant import PackedTensor, num_bytes
from ..telemetry import RankCounters, RankProgress
from .experts import gated_ffn, grouped_ffn
from .gated import SILU, Activation, ExpertWeights, GatedFFN
from .native_experts import ExpertFfnArgs, ffn_args, native_ffn, native_ffn_combine
from .native_route import NativeRouter, RouteArgs
from .routing import RoutingConfig, route
from .wide_ep import Dispatched, Exchange, ExpertPlacement, assign_replicas, replica_table

# Sees what was chosen: MoE layer number, and expert ids [T, K] in memory that the next call may write to.
RoutingObserver = Callable[[int, torch.Tensor], None]


class ExpertSwitches(Protocol):
    """What differs between the MoE layers of one model and of another; `models.config.MoEConfig` has it."""

    @property
    def routing(self) -> RoutingConfig:
        """How logits become experts."""
        ...

    @property
    def activation(self) -> Activation:
        """Of routed experts."""
        ...

    @property
    def weigh_input(self) -> bool:
        """A token's weight multiplies what goes into its only expert, not what comes out."""
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
    def router_bias(self) -> torch.Tensor | None:
        """[E]."""
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


@dataclass(frozen=True, kw_only=True)
class NativeMoE:
    """Arguments of native calls that are fixed for a layer; they point into what the layer holds.

    Attributes:
        route: of the router.
        experts: of the local slots.
        shared: of the shared experts.
        shared_gate: [1, D].
    """

    route: RouteArgs
    experts: ExpertFfnArgs
    shared: ExpertFfnArgs | None
    shared_gate: torch.Tensor | None


class MoELayer:
    """One MoE layer on one rank.

    Args:
        switches: routing, activation, and where weights multiply.
        weights: router, experts of this rank's slots, shared experts.
        placement: of all experts of the group.
        moe_layer: number of this layer among MoE layers.
        rank: this rank in the group.
        exchange: joins the ranks.
        counters: where experts without an owner are counted.
        progress: ticked before and after each collective; None in tests.

    Attributes:
        tokens_per_slot: [S] i64, rows that reached each slot in the last call (`PassCounts` adds them up).
        observer: shown every choice of the router; None: nobody looks.
        bytes_per_slot, router_bytes, shared_bytes: weights that a call reads: one slot's, the router's in the form that
            is multiplied, the shared experts'.
        flops_per_row, router_flops, shared_flops: operations of products: of a row with its expert, of a token with the
            router and with the shared experts.
    """

    def __init__(
        self,
        switches: ExpertSwitches,
        weights: LayerExperts,
        *,
        placement: ExpertPlacement,
        moe_layer: int,
        rank: int,
        exchange: Exchange,
        counters: RankCounters,
        progress: RankProgress | None = None,
    ) -> None:
        num_slots, routing = placement.num_local_slots(rank), switches.routing
        assert weights.experts.w13.shape[0] == num_slots, (weights.experts.w13.shape, rank)
        assert not switches.weigh_input or routing.top_k == 1, "a row that is weighed first goes to one expert"
        device = weights.router.device
        self._routing, self._moe_layer, self._exchange = routing, moe_layer, exchange
        self._activation, self._weigh_input = switches.activation, switches.weigh_input
        self._counters, self._progress = counters, progress
        router = weights.router.float()  # [E, D]: logits are computed in fp32
        self._router: torch.Tensor | None = router
        self._router_bias = None if weights.router_bias is None else weights.router_bias.float()
        self._selection_bias = weights.selection_bias
        self._experts, self._shared, self._shared_gate = weights.experts, weights.shared, weights.shared_gate
        self._placement, self._rank = placement, rank
        # Valid ids cannot lack an owner when every expert has one, so the check costs nothing in a sound placement.
        self._all_owned = bool((replica_table(placement, moe_layer, rank)[:-1] >= 0).all())
        self._is_alone = exchange.name == "local" and self._all_owned and not switches.weigh_input
        self._router_native: NativeRouter | None = None
        if isinstance(weights.experts.w13, PackedTensor):
            self._router = None  # the native router has its own form of it
            self._router_native = NativeRouter(
                routing,
                router,
                num_slots=placement.num_slots,
                bias=weights.router_bias,
                selection_bias=weights.selection_bias,
                slot_of=placement.table(moe_layer, rank, device),
            )
        self._no_ids = torch.empty(0, routing.top_k, dtype=torch.int32, device=device)
        self._no_weights = torch.empty(0, routing.top_k, device=device)
        self.observer: RoutingObserver | None = None
        self.tokens_per_slot = torch.zeros(num_slots, dtype=torch.int64)
        self.bytes_per_slot = weights.experts.bytes_per_slot
        self.flops_per_row = 2 * sum(math.prod(part.shape[1:]) for part in (weights.experts.w13, weights.experts.w2))
        multiplied = router if self._router_native is None else self._router_native.packed
        self.router_bytes = num_bytes(multiplied, self._router_bias, weights.selection_bias)
        self.router_flops = 2 * router.numel()
        self.shared_bytes, self.shared_flops = num_bytes(weights.shared_gate), 0
        if weights.shared_gate is not None:
            self.shared_flops += 2 * weights.shared_gate.numel()
        if weights.shared is not None:
            shared = weights.shared
            self.shared_bytes += num_bytes(shared.w13, shared.w2, shared.b13, shared.b2)
            self.shared_flops += 2 * sum(math.prod(part.shape) for part in (shared.w13, shared.w2))

    def __call__(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Return what the experts add to the residual: [T, D] -> [T, D]."""
        if self._router_native is not None and self._is_alone:
            return self._run_alone(x_TD)
        num_tokens = x_TD.shape[0]
        physical_ids_TK, topk_weights_TK = self._choose(x_TD) if num_tokens else (self._no_ids, self._no_weights)
        sent_TD = x_TD
        if self._weigh_input:
            sent_TD = x_TD * topk_weights_TK.to(x_TD.dtype)
            topk_weights_TK = torch.ones_like(topk_weights_TK)
        self._tick()
        dispatched = self._exchange.dispatch(sent_TD, physical_ids_TK)
        self._tick()
        self.tokens_per_slot = dispatched.tokens_per_slot.cpu()
        rows_MD = self._run_experts(dispatched)
        shared_TD = self._shared_experts(x_TD) if num_tokens and self._shared is not None else None
        self._tick()
        combined_TD = self._exchange.combine(rows_MD, topk_weights_TK, dispatched.handle)
        self._tick()
        return combined_TD if shared_TD is None else combined_TD + shared_TD

    @property
    def native(self) -> NativeMoE | None:
        """What a call for a whole layer needs of this one; None where it has to be run by itself."""
        shared_is_packed = self._shared is None or isinstance(self._shared.w13, PackedTensor)
        if self._router_native is None or self._weigh_input or not self._all_owned or not shared_is_packed:
            return None
        return NativeMoE(
            route=self._router_native.args,
            experts=ffn_args(self._experts, self._activation),
            shared=None if self._shared is None else ffn_args(self._shared, SILU),
            shared_gate=self._shared_gate,
        )

    def _run_alone(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Do all of it in two native calls where no row leaves this rank; the same bits as through an exchange."""
        assert self._router_native is not None
        routed = self._router_native(x_TD)
        if self.observer is not None:
            self.observer(self._moe_layer, routed.expert_ids)
        self._tick()
        self.tokens_per_slot = routed.tokens_per_slot
        shared_TD = self._shared_experts(x_TD) if x_TD.shape[0] and self._shared is not None else None
        self._tick()
        return native_ffn_combine(x_TD, self._experts, self._activation, routed, shared=shared_TD)

    def _run_experts(self, dispatched: Dispatched) -> torch.Tensor:
        if dispatched.is_padded:
            return self._run_filled(dispatched)
        if not isinstance(self._experts.w13, PackedTensor):
            return grouped_ffn(dispatched.rows, dispatched.tokens_per_slot, self._experts, self._activation)
        return native_ffn(
            dispatched.source,
            self._experts,
            self._activation,
            tokens_per_slot=dispatched.tokens_per_slot,
            row_tokens=dispatched.row_tokens,
            out=self._exchange.output(dispatched.num_rows),
        )

    def _run_filled(self, dispatched: Dispatched) -> torch.Tensor:
        """Run the rows that stand for something; what comes of the others is never read."""
        counts = dispatched.tokens_per_slot.cpu()
        num_rows = int(counts.sum())
        rows_MD = dispatched.source.new_empty(dispatched.num_rows, dispatched.source.shape[1])
        rows_MD[:num_rows] = grouped_ffn(dispatched.rows[:num_rows], counts, self._experts, self._activation)
        return rows_MD

    def _choose(self, x_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self._router_native is not None:
            routed = self._router_native(x_TD)
            if self.observer is not None:
                self.observer(self._moe_layer, routed.expert_ids)
            if not self._all_owned:
                self._report_unowned(routed.expert_ids, routed.slot_ids)
            return routed.slot_ids, routed.weights
        assert self._router is not None
        logits_TE = F.linear(x_TD.float(), self._router, self._router_bias)
        topk_ids_TK, topk_weights_TK = route(logits_TE, self._routing, self._selection_bias)
        if self.observer is not None:
            self.observer(self._moe_layer, topk_ids_TK)
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
        output_TD = gated_ffn(x_TD, self._shared)
        if self._shared_gate is not None:
            output_TD = output_TD * F.linear(x_TD, self._shared_gate).sigmoid()
        return output_TD

    def _tick(self) -> None:
        if self._progress is not None:
            self._progress.tick()


class PassCounts:
    """Counts what a pass over all MoE layers of a rank reads and multiplies: rows per slot, and weights.

    Args:
        layers: all MoE layers of the rank, in order.
    """

    def __init__(self, layers: Sequence[MoELayer]) -> None:
        self._layers = layers
        self._bytes_per_slot = np.array([layer.bytes_per_slot for layer in layers])
        self._flops_per_row = np.array([float(layer.flops_per_row) for layer in layers])
        self._router_bytes = sum(layer.router_bytes for layer in layers)
        self._shared_bytes = sum(layer.shared_bytes for layer in layers)
        self._router_flops = sum(layer.router_flops for layer in layers)
        self._shared_flops = sum(layer.shared_flops for layer in layers)

    def add(self, counters: RankCounters, *, num_rows: int, tokens_per_slot: np.ndarray | None = None) -> None:
        """Count one pass.

        Args:
            counters: of the rank.
            num_rows: this rank's own, which went through routers and shared experts.
            tokens_per_slot: [L_moe, S] i64, rows that reached each slot; None takes what the last call of each layer
                left.
        """
        if tokens_per_slot is None:
            tokens_per_slot = torch.stack([layer.tokens_per_slot for layer in self._layers]).numpy()
        counters.add_expert_tokens(tokens_per_slot)
        slots_hit = np.add.reduce(tokens_per_slot != 0, axis=1)
        counters.add_bytes("routed", int(slots_hit @ self._bytes_per_slot))
        counters.add_flops("routed", float(tokens_per_slot.sum(axis=1) @ self._flops_per_row))
        if num_rows:
            counters.add_bytes("dense", self._router_bytes)
            counters.add_bytes("shared", self._shared_bytes)
            counters.add_flops("dense", num_rows * self._router_flops)
            counters.add_flops("shared", num_rows * self._shared_flops)
