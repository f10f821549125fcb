"""What a pass through a decoder reads, writes and multiplies, for the counters of its rank: exact, of what really ran.

Not the counters (telemetry/counters.py) and no measurement. What weights weigh is added up once; a pass costs a copy of
rows per slot and a note of its numbers, later a dozen additions, whatever the number of layers and experts. Not
counted: what a part of a layer keeps in cache between its products, copies that a format is dequantised to where there
is no kernel, tables of positions and of placement.
Units: bytes as held; operations of products, where a multiplication and an addition are two. T rows of this rank, S
rows whose logits are wanted, D width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import NamedTuple

import numpy as np
import torch

from ..attention.batch import AttentionBatch
from ..kvcache.groups import CacheGroup
from ..moe.layer import MoELayer
from ..moe.layer_counts import PassCounts, SlotCounts
from ..moe.wide_ep.exchanges.traffic import Traffic
from ..quant import PackedTensor, QuantTensor, num_bytes
from ..telemetry import PHASES, RankCounters
from .config import ModelConfig
from .weights import LayerWeights, ModelWeights, held_bytes

# Of a `LayerWeights`: what is not read by its attention.
_FFN_FIELDS = ("post_attention_norm", "post_attention_norm_bias", "dense", "moe")
_MOST_PUT_OFF = 64  # passes
_STREAM_PASSES = 4  # the residual stream is read and written around each half of a layer


class _Pass(NamedTuple):
    """What is left to count of a pass: `seen` are tokens read and pairs scored, an entry a cache group."""

    phase: int
    num_rows: int
    row_bytes: int
    num_attended: int
    groups: Sequence[CacheGroup]
    seen: list[tuple[int, int]]
    traffic: Traffic
    slots: SlotCounts | None


class PassCounter:
    """Counts the passes of one decoder: notes what ran, and adds it up when the counters are settled.

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
        self._passes: list[_Pass] = []
        self._heads, self._logits = [0] * len(PHASES), [0] * len(PHASES)
        counters.put_off = self._settle

    def count(
        self,
        rows: torch.Tensor,
        num_attended: int,
        batches: Sequence[AttentionBatch],
        groups: Sequence[CacheGroup],
        traffic: Traffic,
        tokens_per_slot: np.ndarray | None = None,
    ) -> None:
        """Count one pass, without its logits.

        Args:
            rows: [T, D], this rank's own, as embedding rows come and as the residual stream goes.
            num_attended: rows that went through its attention; more than T where ranks divide heads.
            batches: of these rows, one a cache group.
            groups: the cache groups.
            traffic: of the exchange.
            tokens_per_slot: [L_moe, S] i64, rows that reached each expert slot, which the next pass may overwrite; None
                takes what the MoE layers left.
        """
        slots = None
        if self._moe is not None:
            slots = self._moe.left() if tokens_per_slot is None else SlotCounts(tokens_per_slot.copy())
        seen = [(batch.kv_tokens_read, batch.pairs_scored) for batch in batches]
        self._passes.append(
            _Pass(self._counters.phase, rows.shape[0], rows.nbytes, num_attended, groups, seen, traffic, slots)
        )
        if len(self._passes) >= _MOST_PUT_OFF:
            self._settle()

    def count_logits(self, num_rows: int) -> None:
        """Count the product of S rows with the head."""
        self._logits[self._counters.phase] += num_rows
        self._heads[self._counters.phase] += num_rows > 0

    def _settle(self) -> None:
        counters, phase = self._counters, self._counters.phase
        passes, self._passes = self._passes, []
        for each in passes:
            counters.phase = each.phase
            self._add(each)
        for counters.phase, (heads, num_rows) in enumerate(zip(self._heads, self._logits, strict=True)):
            counters.add_bytes("dense", heads * self._head_bytes)
            counters.add_flops("dense", num_rows * self._head_flops)
        self._heads, self._logits = [0] * len(PHASES), [0] * len(PHASES)
        counters.phase = phase

    def _add(self, counted: _Pass) -> None:
        counters, num_rows, num_attended = self._counters, counted.num_rows, counted.num_attended
        traffic = counted.traffic
        counters.add_exchange(traffic.num_bytes, traffic.seconds, traffic.waited_seconds)
        if self._moe is not None and counted.slots is not None:
            self._moe.add(counters, counted.slots, num_rows=num_rows)
        if num_attended:
            counters.add_bytes("attention", self._attention_bytes)
            counters.add_flops("attention", num_attended * self._attention_flops)
            for group, (read, pairs) in zip(counted.groups, counted.seen, strict=True):
                counters.add_bytes("kv", (read + num_attended) * group.bytes_per_token())
                width = len(group.layers) * (group.head_dim + group.value_dim)
                counters.add_flops("kv", 2 * pairs * self._num_heads * width)
        if num_rows:
            row_bytes = counted.row_bytes
            counters.add_bytes("dense", self._dense_bytes + row_bytes)  # a row of the embedding for each
            counters.add_flops("dense", num_rows * self._dense_flops)
            counters.add_bytes("activations", self._stream_passes * row_bytes)


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
