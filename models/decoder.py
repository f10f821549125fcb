"""The one decoder of all families: embed, then per layer attention and FFN or experts, then norm and head.

Not a family (models/families.py says what differs) and not a loader. One object a rank; every rank calls `forward` in
every step, with T = 0 too, because the MoE layers are collectives.
Shapes: T rows of this rank, S rows that sample, D width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..attention.batch import AttentionBatch
from ..kvcache import KVStorage
from ..moe.layer import MoELayer, num_bytes
from ..moe.wide_ep.exchange import Exchange
from ..moe.wide_ep.placement import ExpertPlacement
from ..telemetry import RankCounters, RankProgress
from .config import ModelConfig
from .layers import AttentionBlock, Rotary, dense_ffn, rms_norm
from .weights import LayerWeights, ModelWeights


@dataclass(frozen=True, kw_only=True)
class ForwardBatch:
    """The rows of one rank in one step.

    Attributes:
        input_ids: [T] i64.
        positions: [T] i64, from 0 in each sequence.
        attention: which blocks each row reads and writes.
        sample_rows: [S] i64, rows whose logits are wanted.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    attention: AttentionBatch
    sample_rows: torch.Tensor


class Decoder:
    """A decoder on one rank.

    Args:
        config: of the model.
        weights: what this rank holds.
        placement: of all experts of the group; None for a dense model.
        rank: this rank in the group.
        exchange: joins the ranks.
        counters: where bytes and tokens are counted.
        progress: ticked after every layer; None in tests.
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
        progress: RankProgress | None = None,
    ) -> None:
        self._config, self._weights = config, weights
        self._counters, self._progress = counters, progress
        rotary = Rotary(config.rotary, weights.embedding.device)
        self._rotary = rotary
        self._attention = [
            AttentionBlock(config, layer, layer=i, rotary=rotary) for i, layer in enumerate(weights.layers)
        ]
        self._moe: list[MoELayer | None] = []
        for i, layer in enumerate(weights.layers):
            if layer.moe is None:
                self._moe.append(None)
                continue
            assert config.moe is not None and placement is not None
            self._moe.append(
                MoELayer(
                    config.moe.routing,
                    layer.moe,
                    placement=placement,
                    moe_layer=config.moe_layers.index(i),
                    rank=rank,
                    exchange=exchange,
                    counters=counters,
                    progress=progress,
                )
            )
        self._attention_bytes = sum(map(_attention_bytes, weights.layers))
        self._dense_bytes = sum(map(_dense_bytes, weights.layers)) + num_bytes(weights.final_norm)

    @property
    def config(self) -> ModelConfig:
        """Of the model."""
        return self._config

    def forward(self, batch: ForwardBatch, storage: KVStorage) -> torch.Tensor:
        """Run the rows of this rank through all layers, writing their K and V.

        Returns:
            [T, D] hidden states after the final norm.
        """
        eps = self._config.norm_eps
        x = F.embedding(batch.input_ids, self._weights.embedding)  # [T, D]
        has_rows = x.shape[0] > 0
        if has_rows:
            angles = self._rotary.angles(batch.positions)
            self._count_weights(x)
        for i, (layer, attention, moe) in enumerate(zip(self._weights.layers, self._attention, self._moe)):
            if has_rows:
                x = x + attention(rms_norm(x, layer.input_norm, eps), angles, storage, batch.attention)
                self._count_kv(i, x.shape[0], batch.attention, storage)
            if moe is not None:
                x = x + moe(rms_norm(x, layer.post_attention_norm, eps))
            elif has_rows:
                assert layer.dense is not None
                x = x + dense_ffn(rms_norm(x, layer.post_attention_norm, eps), layer.dense)
            if self._progress is not None:
                self._progress.tick()
        return rms_norm(x, self._weights.final_norm, eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of `hidden` [S, D]: [S, V] f32."""
        if hidden.shape[0]:
            self._counters.add_bytes("dense", num_bytes(self._weights.head))
        return F.linear(hidden, self._weights.head).float()

    def _count_weights(self, x: torch.Tensor) -> None:
        """Count weights that a step with rows reads once: all but routed experts (moe/layer.py) and the head."""
        counters = self._counters
        counters.add_bytes("attention", self._attention_bytes)
        counters.add_bytes("dense", self._dense_bytes + num_bytes(x))  # x: embedding rows read
        # The residual stream, read and written around each half of a layer; what a half keeps in cache is not counted.
        counters.add_bytes("activations", 4 * len(self._weights.layers) * num_bytes(x))

    def _count_kv(self, layer: int, num_rows: int, batch: AttentionBatch, storage: KVStorage) -> None:
        self._counters.add_bytes("kv", (batch.kv_tokens_read + num_rows) * storage.bytes_per_token(layer))


def _attention_bytes(layer: LayerWeights) -> int:
    return num_bytes(layer.input_norm, layer.qkv, layer.qkv_bias, layer.o, layer.o_bias, layer.q_norm, layer.k_norm)


def _dense_bytes(layer: LayerWeights) -> int:
    """Weights of a layer that are neither attention's nor the MoE layer's own affair (it counts router and shared)."""
    dense = layer.dense
    return num_bytes(layer.post_attention_norm, *((dense.w13, dense.w2) if dense is not None else ()))
