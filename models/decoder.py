"""The one decoder of all families: embed, then per layer attention and FFN or experts, then norm and head.

Not a family (models/families.py says what differs) and not a loader. One object a rank; every rank calls `forward` in
every step, with T = 0 too, because the MoE layers are collectives.
Shapes: T rows of this rank, S rows that sample, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from ..attention.tensor_parallel import TensorParallelGroup
from ..kvcache.storage import KVStorage
from ..moe.experts import gated_ffn
from ..moe.gpu_experts import GpuPairs
from ..moe.kernels.linear import logits as head_logits
from ..moe.layer import MoELayer, RoutingObserver
from ..moe.wide_ep.exchanges.contract import Exchange
from ..moe.wide_ep.exchanges.joining import give_kernels
from ..moe.wide_ep.placement import ExpertPlacement
from ..quant import PackedTensor, embedding_rows
from ..telemetry import RankCounters, RankProgress, StepMarks
from ..telemetry.step_marks import ATTENTION, DENSE, INPUTS, NO_LAYER
from ..topologies.overlap_choice import NOTHING
from .config import ModelConfig
from .decoder_parts import DecoderLayer, ExpertChange
from .forward_batch import ForwardBatch
from .kernels.choice import TORCH, KernelChoice
from .latent import LatentAttentionBlock
from .layers import Added, AttentionBlock, Norm, RowPositions, query_temperature
from .native_layers import NativeLayers, can_fuse
from .pass_counts import PassCounter
from .rotary import Rotary
from .weights import ModelWeights


class Decoder:
    """A decoder on one rank.

    Args:
        config: of the model.
        weights: what this rank holds.
        placement: of all experts of the group; None for a dense model.
        rank: this rank in the group.
        exchange: joins the ranks.
        counters: where bytes and tokens are counted.
        ranks: that divide the heads of attention with this one; None where it has them all. `config` and `weights` are
            then those of its share.
        kernels: of a GPU; by default none.

    Attributes:
        moe_layers: in order.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        *,
        placement: ExpertPlacement | None,
        rank: int,
        exchange: Exchange,
        counters: RankCounters,
        ranks: TensorParallelGroup | None = None,
        kernels: KernelChoice = TORCH,
    ) -> None:
        self._config, self._weights, self._exchange, self._ranks = config, weights, exchange, ranks
        self._kernels = kernels
        self._progress: RankProgress | None = None
        self._rotary = Rotary(config.rotary, weights.embedding.device)
        norm = partial(Norm, config, kernels=kernels.rows)
        self._final_norm = norm(weights.final_norm, weights.final_norm_bias)
        self._layers: list[DecoderLayer] = []
        for i, layer in enumerate(weights.layers):
            moe = None
            if layer.moe is not None:
                assert config.moe is not None and placement is not None
                moe = MoELayer(
                    config.moe,
                    layer.moe,
                    placement=placement,
                    moe_layer=config.moe_layers.index(i),
                    rank=rank,
                    exchange=exchange,
                    counters=counters,
                    kernels=kernels.rows,
                )
            attention: AttentionBlock | LatentAttentionBlock
            if config.latent is None:
                attention = AttentionBlock(
                    config, layer, layer=i, rotary=self._rotary, ranks=ranks, kernels=kernels.attention
                )
            else:
                attention = LatentAttentionBlock(config, layer, layer=i, rotary=self._rotary, kernels=kernels.attention)
            self._layers.append(
                DecoderLayer(
                    input_norm=norm(layer.input_norm, layer.input_norm_bias),
                    attention=attention,
                    post_attention_norm=norm(layer.post_attention_norm, layer.post_attention_norm_bias),
                    dense=layer.dense,
                    moe=moe,
                )
            )
        self._is_observed = False
        self._native: NativeLayers | None = None
        self._native_storage: KVStorage | None = None  # for which `_native` was made, or found to be impossible
        self.moe_layers = [layer.moe for layer in self._layers if layer.moe is not None]
        if self.moe_layers and all(layer.runs_in_kernels for layer in self.moe_layers):
            give_kernels(exchange, GpuPairs())
        self._pass_counter = PassCounter(config, weights, self.moe_layers, counters)
        self._logits_room = self._logits_place = torch.empty(0, 0)

    @property
    def config(self) -> ModelConfig:
        """Of the model."""
        return self._config

    def forward(
        self,
        batch: ForwardBatch,
        storage: KVStorage,
        before_layers: Callable[[], None] | None = None,
        *,
        overlap: str = NOTHING,
        marks: StepMarks | None = None,
    ) -> torch.Tensor:
        """Run the rows of this rank through all layers, writing their K and V.

        Ranks that divide heads all have the same rows. Each attends with its heads over all of them; what is between
        two attentions it does for its own part of the rows, so that no expert sees a row twice.

        Args:
            batch: the rows.
            storage: of this rank's KV.
            before_layers: called once, when all that layers need is there.
            overlap: what MoE layers run while rows travel, the same on all ranks; see `MoELayer`.
            marks: get the parts of the step up to the last layer, if it is traced.

        Returns:
            [T, D] hidden states after the final norm.
        """
        x = self.compute(batch, storage, before_layers, overlap=overlap, marks=marks)
        self.count(batch, storage, x)
        if self._ranks is not None and batch.input_ids.shape[0]:
            x = self._ranks.gather(x, batch.input_ids.shape[0])
        return x

    def compute(
        self,
        batch: ForwardBatch,
        storage: KVStorage,
        before_layers: Callable[[], None] | None = None,
        *,
        overlap: str = NOTHING,
        marks: StepMarks | None = None,
    ) -> torch.Tensor:
        """Do what `forward` does, for this rank's own rows [t, D], without counting.

        With kernels of a GPU, the exchange `local` or `padded`, and a batch in `fixed` memory all of it is work of the
        device in shapes that follow from those of the batch: a graph can hold it.
        """
        config, ranks = self._config, self._ranks
        ids = batch.input_ids if ranks is None else ranks.share.own_rows(batch.input_ids)
        x = embedding_rows(ids, self._weights.embedding)  # [T, D], or [t, D] of its own
        if config.embedding_multiplier != 1.0:
            x = x * config.embedding_multiplier
        positions = self._positions(batch) if batch.input_ids.shape[0] else None
        native = self._native_layers(storage)
        if batch.fixed is not None:
            batch.fixed.grant(batch.input_ids.shape[0])
        if before_layers is not None:
            before_layers()
        if marks is not None:
            marks.mark(INPUTS)
        if native is None:
            x = self._by_parts(x, positions, batch, storage, overlap, marks)
        elif native.whole and not self._is_observed:
            x = native.run(x, positions, batch.attention, marks)
        else:
            x = native.final_norm(self._by_halves(native, x, positions, batch, overlap, marks))
        if marks is not None:
            marks.layer = NO_LAYER
        return x

    def watch(self, progress: RankProgress) -> None:
        """Tick `progress` after every layer, every collective and every matrix of logits from now on."""
        self._progress = progress
        for layer in self.moe_layers:
            layer.progress = progress

    def observe_routing(self, observer: RoutingObserver) -> None:
        """Show every choice of routers to `observer` from now on; layers then run one by one, with the same bits."""
        self._is_observed = True
        for layer in self._layers:
            if layer.moe is not None:
                layer.moe.observer = observer

    def move_experts(self, changes: Sequence[ExpertChange], tables: Mapping[int, torch.Tensor]) -> None:
        """Put other experts into slots, and find experts where they stand now. Between two steps only.

        Args:
            changes: of this rank's slots.
            tables: of each MoE layer that changes anywhere in the group, see `MoELayer.place`.
        """
        layers = [layer for layer in self._weights.layers if layer.moe is not None]
        for change in changes:
            moe = layers[change.moe_layer].moe
            assert moe is not None
            for place, new in zip(moe.experts.slot_tensors(change.slot), change.tensors, strict=True):
                assert place.dtype == new.dtype and place.shape == new.shape, (place.shape, new.shape)
                place.copy_(new)
        for number, table in tables.items():
            self.moe_layers[number].place(table)
        if tables:
            self._native_storage = None  # native calls for layers hold addresses of tables

    def slot_tensors(self, moe_layer: int, slot: int) -> list[torch.Tensor]:
        """Return what stands in a slot of this rank, see `ExpertWeights.slot_tensors`."""
        experts = [layer.moe.experts for layer in self._weights.layers if layer.moe is not None]
        return experts[moe_layer].slot_tensors(slot)

    def _native_layers(self, storage: KVStorage) -> NativeLayers | None:
        """Return the layers as native calls over `storage`; None where torch joins their parts."""
        if self._native_storage is storage:
            return self._native
        self._native, self._native_storage = None, storage
        if self._ranks is None and self._kernels.rows is None and can_fuse(self._weights, storage):
            self._native = NativeLayers(
                self._config,
                self._weights,
                storage,
                moe_layers=[layer.moe for layer in self._layers],
                exchange=self._exchange,
                progress=self._progress,
            )
        return self._native

    def _by_halves(
        self,
        native: NativeLayers,
        x: torch.Tensor,
        positions: RowPositions | None,
        batch: ForwardBatch,
        overlap: str,
        marks: StepMarks | None,
    ) -> torch.Tensor:
        """Run all layers, each up to its FFN in one native call."""
        added: torch.Tensor | None = None
        norm_after = self._config.norm_after
        for i, layer in enumerate(self._layers):
            hidden = x
            if positions is not None:
                hidden = native.attend(i, x, None if norm_after else added, positions, batch.attention)
            _attended(marks, i, positions)
            if layer.moe is not None:
                added = layer.moe(hidden, overlap, marks)
            elif positions is not None:
                added = self._dense(layer, hidden, marks)
            if norm_after and added is not None:
                x = layer.post_attention_norm.add_normed(x, added)
            if self._progress is not None:
                self._progress.tick()
        if norm_after or added is None:
            return x
        return self._final_norm.plus(x, added)

    def _by_parts(
        self,
        x: torch.Tensor,
        positions: RowPositions | None,
        batch: ForwardBatch,
        storage: KVStorage,
        overlap: str,
        marks: StepMarks | None,
    ) -> torch.Tensor:
        """Run all layers, part by part, and the final norm."""
        ranks, num_rows = self._ranks, batch.input_ids.shape[0]
        num_filled = None if batch.fixed is None else batch.fixed.num_filled
        added: Added | None = None  # what still has to be added to `x`
        for i, layer in enumerate(self._layers):
            if positions is not None:
                attention = batch.attention[storage.group_of(i)]
                x, hidden = self._before(x, added, layer.input_norm)
                if ranks is None:
                    added = layer.attention(hidden, positions, storage, attention)
                else:
                    added = ranks.reduce(layer.attention(ranks.gather(hidden, num_rows), positions, storage, attention))
                x, added = self._after(x, added, layer.input_norm)
            _attended(marks, i, positions)
            if layer.moe is not None:
                x, hidden = self._before(x, added, layer.post_attention_norm)
                added = layer.moe.unsummed(hidden, overlap, marks, num_filled)
                x, added = self._after(x, added, layer.post_attention_norm)
            elif x.shape[0]:
                x, hidden = self._before(x, added, layer.post_attention_norm)
                added = self._dense(layer, hidden, marks)
                x, added = self._after(x, added, layer.post_attention_norm)
            if self._progress is not None:
                self._progress.tick()
        return self._final_norm(x) if added is None else self._final_norm.add(x, added)[1]

    def step_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return what `logits` does, in memory that the next call may write to: new memory is slow to touch."""
        head = self._weights.head
        if not isinstance(head, PackedTensor):
            return self.logits(hidden)
        if len(self._logits_room) < len(hidden):
            self._logits_room = torch.empty(len(hidden), head.shape[0])
        if len(self._logits_place) != len(hidden):
            self._logits_place = self._logits_room[: len(hidden)]
        return self.logits(hidden, self._logits_place)

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the logits of `hidden` [S, D]: [S, V] f32, in `out` where it is given and a kernel computes them."""
        self._pass_counter.count_logits(hidden.shape[0])
        logits = self.head(hidden, out)
        if self._progress is not None:
            self._progress.tick()  # many rows of prompts are judged piece by piece, which can take longer than a layer
        return logits

    def head(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Do what `logits` does, without counting."""
        config, weights = self._config, self._weights
        logits = head_logits(hidden, weights.head, weights.head_bias, self._kernels.rows, out=out)
        if config.logits_multiplier != 1.0:
            logits = logits * config.logits_multiplier
        if config.logits_cap:
            logits = (logits / config.logits_cap).tanh_().mul_(config.logits_cap)
        return logits

    def _positions(self, batch: ForwardBatch) -> RowPositions:
        temperature = self._config.query_temperature
        on_host = batch.positions.device.type == "cpu" and self._kernels.rows is None
        return RowPositions(
            angles=self._rotary.lookup(batch.positions)
            if on_host and batch.long_rows is None
            else self._rotary.angles(batch.positions, batch.long_rows),
            temperature=None if temperature is None else query_temperature(temperature, batch.positions),
        )

    def _dense(self, layer: DecoderLayer, hidden: torch.Tensor, marks: StepMarks | None) -> torch.Tensor:
        """Return what an FFN without experts adds."""
        assert layer.dense is not None
        added = gated_ffn(hidden, layer.dense, kernels=self._kernels.rows)
        if marks is not None:
            marks.mark(DENSE)
        return added

    def _before(self, x: torch.Tensor, added: Added | None, norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the residual stream with what was `added`, and what goes into a block."""
        return norm.add(x, added) if added is not None else (x, x if self._config.norm_after else norm(x))

    def _after(self, x: torch.Tensor, added: Added, norm: Norm) -> tuple[torch.Tensor, Added | None]:
        """Return the residual stream and what a block adds to it, None if that has been done."""
        return (norm.add_normed(x, added), None) if self._config.norm_after else (x, added)

    @property
    def why_not_captured(self) -> str | None:
        """Why `compute` of rows in `fixed` memory is more than work of the device; None where it is not."""
        if self._kernels.attention is None:
            return next(iter(self._kernels.reasons), "layers run without kernels of a GPU")
        if self._ranks is not None:
            return "ranks divide the heads"
        if self._is_observed:
            return "somebody looks at what routers choose"
        return next((reason for layer in self.moe_layers if (reason := layer.why_not_captured) is not None), None)

    def count(self, batch: ForwardBatch, storage: KVStorage, x: torch.Tensor, *, num_logits: int = 0) -> None:
        """Count what a pass read, wrote, multiplied and sent; logits count when they are made.

        Args:
            batch: of the pass.
            storage: of KV.
            x: [t, D] what `compute` returned.
            num_logits: rows of logits that were made without a word to `logits`.
        """
        self._pass_counter.count_logits(num_logits)
        native = self._native
        self._pass_counter.count(
            x[: batch.num_rows],
            batch.input_ids.shape[0] if batch.num_rows is None else batch.num_rows,
            batch.attention,
            storage.groups,
            self._exchange.take_traffic(),
            native.tokens_per_slot if native is not None and native.whole and not self._is_observed else None,
        )


def _attended(marks: StepMarks | None, layer: int, positions: RowPositions | None) -> None:
    """Mark the end of attention in `layer`, where there are rows."""
    if marks is not None:
        marks.layer = layer
        if positions is not None:
            marks.mark(ATTENTION)
