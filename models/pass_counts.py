"""What a pass through a decoder reads, writes and multiplies, for the counters of its rank: exact, of what really ran.

Not the counters (telemetry/counters.py) and no measurement. What weights weigh is added up once; a pass costs one look
at rows per slot and a dozen additions, whatever the number of layers and experts. Not counted: what a part of a layer
keeps in cache between its products, copies that a format is dequantised to where there is no kernel, tables of
positions and of placement.
Units: bytes as held; operations of products, where a multiplication and an addition are two. T rows of this rank, S
rows whose logits are wanted, D width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass

import numpy as np
import torch

from ..attention.batch import AttentionBatch
from ..kvcache.groups import CacheGroup
from ..moe.layer import MoELayer
from ..moe.layer_counts import PassCounts
from ..quant import PackedTensor, QuantTensor, num_bytes
from ..telemetry import RankCounters
from .config import ModelConfig
from .weights import LayerWeights, ModelWeights, held_bytes

# Of a `LayerWeights`: what is not read by its attention.
_FFN_FIELDS = ("post_attention_norm", "post_attention_norm_bias", "dense", "moe")
_STREAM_PASSES = 4  # the residual stream is read and written around each half of a layer


class PassCounter:
    """Counts the passes of one decoder.

    Args:
        config: of the model, or of this rank's share of its heads.
        weights: what this rank holds.
        moe_layers: all MoE layers, in order.
        counters: of the rank.
    """

    def __init__(
        self, config: ModelConfig, weights: ModelWeights, moe_layers: Sequence[MoELayer], counters: RankCounters
    ) -> None:
        self._counters, self._num_heads = counters, config.num_heads
        self._moe = PassCounts(moe_layers) if moe_layers else None
        attention = [_attention_parts(layer) for layer in weights.layers]
        self._attention_bytes = sum(map(held_bytes, _flat(attention)))
        self._attention_flops = sum(map(flops_per_row, _flat(attention)))
        norms = [(layer.post_attention_norm, layer.post_attention_norm_bias) for layer in weights.layers]
        norms.append((weights.final_norm, weights.final_norm_bias))
        self._dense_bytes = sum(num_bytes(*pair) for pair in norms)
        self._dense_bytes += sum(held_bytes(layer.dense) for layer in weights.layers)
        self._dense_flops = sum(flops_per_row(layer.dense) for layer in weights.layers)
        self._stream_passes = _STREAM_PASSES * len(weights.layers)
        self._head_bytes = num_bytes(weights.head, weights.head_bias)
        self._head_flops = flops_per_row(weights.head)

    def count(
        self,
        rows: torch.Tensor,
        num_attended: int,
        batches: Sequence[AttentionBatch],
        groups: Sequence[CacheGroup],
        tokens_per_slot: np.ndarray | None = None,
    ) -> None:
        """Count one pass, without its logits and without what an exchange moved.

        Args:
            rows: [T, D], this rank's own, as embedding rows come and as the residual stream goes.
            num_attended: rows that went through its attention; more than T where ranks divide heads.
            batches: of these rows, one a cache group.
            groups: the cache groups.
            tokens_per_slot: [L_moe, S] i64, rows that reached each expert slot; None takes what the MoE layers left.
        """
        counters, num_rows = self._counters, rows.shape[0]
        if self._moe is not None:
            self._moe.add(counters, num_rows=num_rows, tokens_per_slot=tokens_per_slot)
        if num_attended:
            counters.add_bytes("attention", self._attention_bytes)
            counters.add_flops("attention", num_attended * self._attention_flops)
            for group, batch in zip(groups, batches, strict=True):
                counters.add_bytes("kv", (batch.kv_tokens_read + num_attended) * group.bytes_per_token())
                width = len(group.layers) * (group.head_dim + group.value_dim)
                counters.add_flops("kv", 2 * batch.pairs_scored * self._num_heads * width)
        if num_rows:
            row_bytes = num_bytes(rows)
            counters.add_bytes("dense", self._dense_bytes + row_bytes)  # a row of the embedding for each
            counters.add_flops("dense", num_rows * self._dense_flops)
            counters.add_bytes("activations", self._stream_passes * row_bytes)

    def count_logits(self, num_rows: int) -> None:
        """Count the product of S rows with the head."""
        if num_rows:
            self._counters.add_bytes("dense", self._head_bytes)
            self._counters.add_flops("dense", num_rows * self._head_flops)


def flops_per_row(node: object) -> int:
    """Return the operations of one row with all matrices in a record (or with one): two for each of their numbers."""
    return 2 * sum(math.prod(shape) for shape in _matrix_shapes(node))


def _matrix_shapes(node: object) -> Iterator[tuple[int, ...]]:
    if isinstance(node, torch.Tensor | PackedTensor | QuantTensor):
        if len(node.shape) > 1:
            yield tuple(node.shape)
    elif is_dataclass(node):
        for item in fields(node):
            yield from _matrix_shapes(getattr(node, item.name))


def _attention_parts(layer: LayerWeights) -> list[object]:
    return [getattr(layer, item.name) for item in fields(layer) if item.name not in _FFN_FIELDS]


def _flat(parts: Sequence[Sequence[object]]) -> Iterator[object]:
    return (part for own in parts for part in own)
