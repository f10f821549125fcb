"""The MoE layer of one rank: route, assign replicas, dispatch, experts, combine, and add the shared experts.

Not an exchange and not a router: four boxes that know nothing of each other are joined here, and what went through them
is counted. A collective: every rank calls it once per layer per step, with T = 0 too.
Suffixes: T tokens of this rank, D width, E logical experts, K top-k, M rows received, S slots of this rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from ..native.gpu import GpuKernels
from ..quant import PackedTensor, num_bytes
from ..telemetry import RankCounters, RankProgress, StepMarks
from ..telemetry.step_marks import COMBINE, DISPATCH, EXPERTS, ROUTING, SHARED
from ..topologies.overlap_choice import HALVES, NOTHING
from .activation import SILU
from .experts import filled_ffn, gated_ffn, grouped_ffn
from .gpu_experts import GpuExperts
from .kernels.combine import ExpertRows
from .kernels.experts import can_multiply
from .kernels.linear import linear
from .kernels.route import triton_route
from .kernels.router import MOST_ROWS, triton_router
from .layer_parts import ExpertSwitches, LayerExperts, NativeMoE
from .native_experts import ffn_args, native_ffn, native_ffn_combine
from .native_route import NativeRouter
from .routing import route
from .wide_ep import Dispatched, Exchange, ExpertPlacement, StagedExchange, replica_table, slots_of
from .wide_ep.exchanges.stages import ROWS, Stages, in_turns

# Sees what was chosen: MoE layer number, and expert ids [T, K] in memory that the next call may write to.
RoutingObserver = Callable[[int, torch.Tensor], None]


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
        kernels: of a GPU; None runs with torch or natively.

    Attributes:
        tokens_per_slot: [S] i64, rows that reached each slot in the last call (`layer_counts.PassCounts` adds them up).
            With `kernels` it is on the device and stays where it is.
        read_again: [] i64, slots whose weights the last call read twice, because both halves of its rows hit them.
        progress: ticked before and after each collective; None: nobody watches.
        observer: shown every choice of the router; None: nobody looks.
        top_k: K.
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
        kernels: GpuKernels | None = None,
    ) -> None:
        num_slots, routing = placement.num_local_slots(rank), switches.routing
        assert weights.experts.w13.shape[0] == num_slots, (weights.experts.w13.shape, rank)
        assert not switches.weigh_input or routing.top_k == 1, "a row that is weighed first goes to one expert"
        device = weights.router.device
        self._routing, self._moe_layer, self._exchange = routing, moe_layer, exchange
        self.top_k = routing.top_k
        self._staged = exchange if isinstance(exchange, StagedExchange) else None
        self._activation, self._weigh_input = switches.activation, switches.weigh_input
        self._counters = counters
        self.progress: RankProgress | None = None
        router = weights.router.float()  # [E, D]: logits are computed in fp32
        self._router: torch.Tensor | None = router
        self._router_bias = None if weights.router_bias is None else weights.router_bias.float()
        self._selection_bias = weights.selection_bias
        self._experts, self._shared, self._shared_gate = weights.experts, weights.shared, weights.shared_gate
        own_table = replica_table(placement, moe_layer, rank)
        # One of its own, which never moves, where a graph may hold its address.
        self._table = placement.table(moe_layer, rank, device) if kernels is None else own_table.to(device)
        # Valid ids cannot lack an owner when every expert has one, so the check costs nothing in a sound placement.
        self._all_owned = bool((own_table[:-1] >= 0).all())
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
                slot_of=self._table,
            )
        self._gpu: GpuExperts | None = None
        if kernels is not None and can_multiply(weights.experts, kernels.target):
            self._gpu = GpuExperts(weights.experts, switches.activation, kernels)
        self._no_ids = torch.empty(0, routing.top_k, dtype=torch.int32, device=device)
        self._no_weights = torch.empty(0, routing.top_k, device=device)
        self.observer: RoutingObserver | None = None
        self.tokens_per_slot = torch.zeros(num_slots, dtype=torch.int64, device=None if kernels is None else device)
        self._kernels, self._counts_stay = kernels, kernels is not None
        self._never_again = torch.zeros((), dtype=torch.int64, device=device)
        self.read_again = self._never_again
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

    def __call__(
        self,
        x_TD: torch.Tensor,
        overlap: str = NOTHING,
        marks: StepMarks | None = None,
        num_filled: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return what the experts add to the residual, see `unsummed`."""
        added = self.unsummed(x_TD, overlap, marks, num_filled)
        return added.sum() if isinstance(added, ExpertRows) else added

    def unsummed(
        self,
        x_TD: torch.Tensor,
        overlap: str = NOTHING,
        marks: StepMarks | None = None,
        num_filled: torch.Tensor | None = None,
    ) -> torch.Tensor | ExpertRows:
        """Return what the experts add to the residual; with kernels of a GPU it may be left to add up.

        Args:
            x_TD: [T, D].
            overlap: what runs while rows travel, see `topologies.overlap_choice`; the same on all ranks. Only exchanges
                over links leave anything to run.
            marks: get the parts of a traced step.
            num_filled: [1] i64 on the device; rows from there on stand for nothing and reach no expert. None: all do.

        Returns:
            [T, D], the same bits for every `overlap` where a row's bits depend on that row alone.
        """
        if self._router_native is not None and self._is_alone:
            return self._run_alone(x_TD, marks)
        if self._gpu is not None and self._exchange.name == "local":
            return self._run_on_gpu(self._gpu, x_TD, marks, num_filled)
        num_tokens = x_TD.shape[0]
        physical_ids_TK, topk_weights_TK = (
            self._choose(x_TD, num_filled) if num_tokens else (self._no_ids, self._no_weights)
        )
        sent_TD = x_TD
        if self._weigh_input:
            sent_TD = x_TD * topk_weights_TK.to(x_TD.dtype)
            topk_weights_TK = torch.ones_like(topk_weights_TK)
        self._tick(marks, ROUTING)
        if overlap != NOTHING:
            parts = _halves(num_tokens) if overlap == HALVES else (slice(0, num_tokens),)
            sent = [(sent_TD[part], physical_ids_TK[part], topk_weights_TK[part]) for part in parts]
            return self._run_in_turns(x_TD, sent, marks)
        dispatched = self._exchange.dispatch(sent_TD, physical_ids_TK)
        self._tick(marks, DISPATCH)
        self._keep_counts([dispatched])
        rows_MD = self._run_experts(dispatched)
        if marks is not None:
            marks.mark(EXPERTS)
        shared_TD = self._shared_experts(x_TD) if num_tokens and self._shared is not None else None
        self._tick(marks if shared_TD is not None else None, SHARED)
        combined_TD = self._exchange.combine(rows_MD, topk_weights_TK, dispatched.handle)
        self._tick(marks, COMBINE)
        return combined_TD if shared_TD is None else combined_TD + shared_TD

    def place(self, table: torch.Tensor) -> None:
        """Find experts elsewhere from now on; `native` is to be asked again.

        Args:
            table: as `replica_table` makes one, [E + 1] i32 on the device of the weights; every expert has a slot.
        """
        if self._kernels is not None and self._table is not None:
            self._table.copy_(table)
        else:
            self._table = table
        if self._router_native is not None:
            self._router_native.place(table)

    @property
    def runs_in_kernels(self) -> bool:
        """Whether kernels of a GPU multiply the experts."""
        return self._gpu is not None

    @property
    def why_not_captured(self) -> str | None:
        """Why a call needs a look from the host; None where it is work of the device alone."""
        if self._gpu is None:
            return f"experts of MoE layer {self._moe_layer} are in a format that kernels do not read"
        return None if self._all_owned else f"experts of MoE layer {self._moe_layer} have no owner"

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

    def _run_alone(self, x_TD: torch.Tensor, marks: StepMarks | None) -> torch.Tensor:
        """Do all of it in two native calls where no row leaves this rank; the same bits as through an exchange."""
        assert self._router_native is not None
        routed = self._router_native(x_TD)
        if self.observer is not None:
            self.observer(self._moe_layer, routed.expert_ids)
        self._tick(marks, ROUTING)
        self.tokens_per_slot = routed.tokens_per_slot
        shared_TD = self._shared_experts(x_TD) if x_TD.shape[0] and self._shared is not None else None
        self._tick(marks if shared_TD is not None else None, SHARED)
        combined_TD = native_ffn_combine(x_TD, self._experts, self._activation, routed, shared=shared_TD)
        if marks is not None:
            marks.mark(EXPERTS)
        return combined_TD

    def _run_on_gpu(
        self, gpu: GpuExperts, x_TD: torch.Tensor, marks: StepMarks | None, num_filled: torch.Tensor | None
    ) -> ExpertRows:
        """Run rows that stay on this rank; their sum has the same bits as through an exchange."""
        assert self._table is not None
        logits_TE, bias, counts = self._router_logits(x_TD), self._selection_bias, self.tokens_per_slot
        (routing, permuted), cut = gpu.route(logits_TE, self._routing, bias, self._table, counts, num_filled)
        self._look_at(routing.topk_ids, permuted.rows, num_filled)
        sent_TD, weights_TK = x_TD, routing.topk_weights
        if self._weigh_input:
            sent_TD = x_TD * weights_TK.to(x_TD.dtype)
            weights_TK = torch.ones_like(weights_TK)
        self._tick(marks, ROUTING)
        shared_TD = self._shared_experts(x_TD) if x_TD.shape[0] and self._shared is not None else None
        self._tick(marks if shared_TD is not None else None, SHARED)
        rows_MD = gpu.run(sent_TD, permuted, cut)
        self._tick(marks, EXPERTS)
        return ExpertRows(rows_MD, weights_TK, permuted.rows, shared_TD)

    def _run_in_turns(
        self,
        x_TD: torch.Tensor,
        sent: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
        marks: StepMarks | None,
    ) -> torch.Tensor:
        """Run the parts `sent` (rows, physical ids and weights of each), and shared experts while their rows travel."""
        arrived: list[Dispatched] = []
        shared: list[torch.Tensor] = []

        def meanwhile(travelling: str) -> None:
            if travelling == ROWS and x_TD.shape[0] and self._shared is not None:
                if marks is not None:
                    marks.mark(DISPATCH)
                shared.append(self._shared_experts(x_TD))
                if marks is not None:
                    marks.mark(SHARED)

        combined = in_turns([self._stages(*part, arrived, marks) for part in sent], meanwhile)
        self._keep_counts(arrived)
        combined_TD = combined[0] if len(combined) == 1 else torch.cat(combined)
        return combined_TD + shared[0] if shared else combined_TD

    def _stages(
        self,
        rows_TD: torch.Tensor,
        ids_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        arrived: list[Dispatched],
        marks: StepMarks | None,
    ) -> Stages[torch.Tensor]:
        """Dispatch some rows, run experts, combine; what was dispatched here is appended to `arrived`."""
        staged = self._staged
        assert staged is not None, f"the exchange {self._exchange.name} has no stages"
        dispatched = yield from staged.dispatching(rows_TD, ids_TK, weights_TK)
        self._tick(marks, DISPATCH)
        arrived.append(dispatched)
        rows_MD = self._run_experts(dispatched)
        self._tick(marks, EXPERTS)
        combined_TD = yield from staged.combining(rows_MD, weights_TK, dispatched.handle)
        self._tick(marks, COMBINE)
        return combined_TD

    def _keep_counts(self, arrived: Sequence[Dispatched]) -> None:
        counts, self.read_again = arrived[0].tokens_per_slot, self._never_again
        for other in arrived[1:]:
            self.read_again = ((counts > 0) & (other.tokens_per_slot > 0)).sum()
            counts = counts + other.tokens_per_slot
        if self._counts_stay:
            self.tokens_per_slot.copy_(counts, non_blocking=True)
        else:
            self.tokens_per_slot = counts

    def _run_experts(self, dispatched: Dispatched) -> torch.Tensor:
        if self._gpu is not None:
            return self._gpu.run_arrived(dispatched)
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
        counts = dispatched.tokens_per_slot
        if counts.device.type != "cpu":  # a look at them would make the host wait
            return filled_ffn(dispatched.rows, counts, self._experts, self._activation)
        num_rows = int(counts.sum())
        rows_MD = dispatched.source.new_empty(dispatched.num_rows, dispatched.source.shape[1])
        rows_MD[:num_rows] = grouped_ffn(dispatched.rows[:num_rows], counts, self._experts, self._activation)
        return rows_MD

    def _choose(self, x_TD: torch.Tensor, num_filled: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        if self._router_native is not None:
            routed = self._router_native(x_TD)
            if self.observer is not None:
                self.observer(self._moe_layer, routed.expert_ids)
            if not self._all_owned:
                self._report_unowned(routed.expert_ids, routed.slot_ids)
            return routed.slot_ids, routed.weights
        logits_TE = self._router_logits(x_TD)
        if self._kernels is not None:
            bias = self._selection_bias
            routing, physical_ids_TK = triton_route(logits_TE, self._routing, bias, self._table, num_filled)
        else:
            routing = route(logits_TE, self._routing, self._selection_bias)
            physical_ids_TK = slots_of(routing.topk_ids, self._table)
        self._look_at(routing.topk_ids, physical_ids_TK, num_filled)
        return physical_ids_TK, routing.topk_weights

    def _router_logits(self, x_TD: torch.Tensor) -> torch.Tensor:
        assert self._router is not None
        if self._kernels is not None and x_TD.shape[0] <= MOST_ROWS and not self._kernels.batch_invariant:
            return triton_router(x_TD, self._router, self._router_bias)
        return linear(x_TD.float(), self._router, self._router_bias, self._kernels)

    def _look_at(self, topk_ids_TK: torch.Tensor, places_TK: torch.Tensor, num_filled: torch.Tensor | None) -> None:
        """Show choices to whoever looks; those without an owner have a place below 0."""
        if self.observer is not None:
            self.observer(self._moe_layer, topk_ids_TK)
        if not self._all_owned and num_filled is None:
            self._report_unowned(topk_ids_TK, places_TK)

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
        output_TD = gated_ffn(x_TD, self._shared, kernels=self._kernels)
        if self._shared_gate is not None:
            output_TD = output_TD * linear(x_TD, self._shared_gate, kernels=self._kernels).sigmoid()
        return output_TD

    def _tick(self, marks: StepMarks | None, part: int) -> None:
        """Say that `part` is done."""
        if self.progress is not None:
            self.progress.tick()
        if marks is not None:
            marks.mark(part)


def _halves(num_tokens: int) -> tuple[slice, slice]:
    middle = (num_tokens + 1) // 2
    return slice(0, middle), slice(middle, num_tokens)
