"""Runs `Decoder` alone, without scheduler and worker: token ids in, logits of every position out, ranks as threads.

Not the invariance harness (harness.py drives the real runtime). Sequence i belongs to rank i modulo W; it runs in
chunks of `chunk` tokens, its last tokens one by one as decode rows. Blocks that no row of a piece sees any more are
replaced in its table by one full of NaN, as a block given to somebody else could be.
Shapes: logits [T, V] f32 of one sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from moewe.attention.batch import AttentionBatch
from moewe.attention.build import build_attention_batch
from moewe.kvcache.groups import CacheGroup, first_visible
from moewe.kvcache.storage import KVStorage
from moewe.models.config import ModelConfig
from moewe.models.decoder import Decoder
from moewe.models.families import load_config
from moewe.models.footprint import cache_groups
from moewe.models.forward_batch import ForwardBatch
from moewe.models.loading import LoadOptions, load_weights
from moewe.models.weights import ModelWeights
from moewe.moe.wide_ep import Exchange, linear_placement
from moewe.quant import FORMATS
from moewe.telemetry import RankCounters
from tests.support.ranks import run_ranks

BLOCK_SIZE = 16
NUM_DECODES = 3  # tokens at the end of every sequence that run alone


@dataclass(frozen=True)
class Piece:
    """Tokens [start, stop) of sequence `index` in one step; also what `build_attention_batch` calls a segment.

    Attributes:
        length: of the whole sequence.
        block_table: [n] i64 of the cache group at hand.
    """

    index: int
    start: int
    stop: int
    length: int
    block_table: np.ndarray
    row_start: int = 0

    @property
    def num_rows(self) -> int:
        return self.stop - self.start

    @property
    def num_computed_tokens(self) -> int:
        return self.start


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """Logits by sequence, counters and weights by rank, number of steps."""

    logits: list[torch.Tensor]
    counters: list[RankCounters]
    weights: list[ModelWeights]
    num_steps: int


def decode(
    path: Path,
    sequences: Sequence[Sequence[int]],
    *,
    num_ranks: int = 1,
    chunk: int = 512,
    dtype: str = "float32",
    change: Callable[[ModelWeights], None] | None = None,
) -> Decoded:
    """Run all sequences together, at most `chunk` rows of each in a step."""
    config = load_config(path)
    moe = config.moe
    placement = linear_placement(len(config.moe_layers), moe.routing.num_experts if moe else 0, num_ranks)
    plan = [_pieces(i, len(s), chunk) for i, s in enumerate(sequences)]
    num_steps = max(map(len, plan))

    def load(rank: int) -> ModelWeights:
        torch_dtype = FORMATS[dtype].torch_dtype
        options = LoadOptions(placement=placement, rank=rank, dtype=torch_dtype, num_threads=1)
        weights = load_weights(path, config, options).weights
        if change is not None:
            change(weights)
        return weights

    held = [load(rank) for rank in range(num_ranks)]

    @torch.inference_mode()
    def work(rank: int, exchange: Exchange) -> tuple[dict[int, torch.Tensor], RankCounters]:
        weights = held[rank]
        counters = RankCounters(len(config.moe_layers), placement.num_local_slots(rank))
        decoder = Decoder(config, weights, placement=placement, rank=rank, exchange=exchange, counters=counters)
        own = [i for i in range(len(sequences)) if i % num_ranks == rank]
        tables = _tables([len(sequences[i]) for i in own])
        groups = cache_groups(config, dtype=FORMATS[dtype])
        poison = sum(map(len, tables)) + 1
        storage = KVStorage(groups, num_blocks=poison + 1, block_size=BLOCK_SIZE)
        for layer in range(config.num_layers):
            for part in storage.layer(layer):
                part[poison] = torch.nan
        found: dict[int, list[torch.Tensor]] = {i: [] for i in own}
        for step in range(num_steps):
            pieces = []
            for i, table in zip(own, tables):
                if step < len(plan[i]):
                    start, stop = plan[i][step]
                    pieces.append(Piece(i, start, stop, len(sequences[i]), table[: -(-stop // BLOCK_SIZE)]))
            pieces.sort(key=lambda p: p.num_rows != 1)  # decode rows first
            batch, pieces = _batch(pieces, sequences, config, groups, poison)
            counters.begin_step("mixed", batch.input_ids.shape[0])
            logits = decoder.logits(decoder.forward(batch, storage))
            for piece in pieces:
                found[piece.index].append(logits[piece.row_start : piece.row_start + piece.num_rows])
        counters.settle()
        return {i: torch.cat(parts) for i, parts in found.items()}, counters

    results = run_ranks(placement.slot_ranges if moe else ((0, 0),), work)
    by_sequence = {i: logits for found, _ in results for i, logits in found.items()}
    return Decoded(
        logits=[by_sequence[i] for i in range(len(sequences))],
        counters=[counters for _, counters in results],
        weights=held,
        num_steps=num_steps,
    )


def _pieces(index: int, length: int, chunk: int) -> list[tuple[int, int]]:
    """Chunks of sequence `index`, beginning `index` steps late so that kinds of rows mix."""
    body = max(1, length - NUM_DECODES)
    edges = [*range(0, body, chunk), *range(body, length + 1)]
    return [(0, 0)] * index + list(pairwise(edges))


def _tables(lengths: Sequence[int]) -> list[np.ndarray]:
    """Block tables in shuffled order; block 0 belongs to nobody."""
    counts = [-(-length // BLOCK_SIZE) for length in lengths]
    order = np.random.default_rng(0).permutation(sum(counts)) + 1
    return [part.astype(np.int64) for part in np.split(order, np.cumsum(counts)[:-1])]


def _batch(
    pieces: list[Piece],
    sequences: Sequence[Sequence[int]],
    config: ModelConfig,
    groups: Sequence[CacheGroup],
    poison: int,
) -> tuple[ForwardBatch, list[Piece]]:
    pieces = [p for p in pieces if p.num_rows]
    starts = np.cumsum([0, *[p.num_rows for p in pieces]])
    pieces = [replace(p, row_start=int(at)) for p, at in zip(pieces, starts)]
    positions = np.concatenate([np.arange(p.start, p.stop) for p in pieces] or [np.zeros(0, np.int64)])
    ids = [token for p in pieces for token in sequences[p.index][p.start : p.stop]]
    scaling = config.rotary.scaling
    long_rows = None
    if scaling is not None and scaling.kind == "longrope":
        long = [p.length > scaling.original_max_position for p in pieces for _ in range(p.num_rows)]
        long_rows = torch.tensor(long, dtype=torch.bool)
    batch = ForwardBatch(
        input_ids=torch.tensor(ids, dtype=torch.int64),
        positions=torch.from_numpy(positions.astype(np.int64)),
        attention=tuple(_attention(pieces, group, poison) for group in groups),
        sample_rows=torch.arange(len(ids)),
        long_rows=long_rows,
    )
    return batch, pieces


def _attention(pieces: Sequence[Piece], group: CacheGroup, poison: int) -> AttentionBatch:
    """What the pieces read and write in one cache group."""
    pieces = [replace(p, block_table=p.block_table.copy()) for p in pieces]
    for piece in pieces:
        piece.block_table[: first_visible(group.kind, group.window, piece.start) // BLOCK_SIZE] = poison
    decodes = [p for p in pieces if p.num_rows == 1]
    width = max((len(p.block_table) for p in decodes), default=0)
    tables = np.zeros((len(decodes), width), np.int64)
    for row, piece in enumerate(decodes):
        tables[row, : len(piece.block_table)] = piece.block_table
    slots = [
        p.block_table[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE for p in pieces for at in range(p.start, p.stop)
    ]
    return build_attention_batch(
        slot_mapping=np.array(slots, np.int64),
        segments=[p for p in pieces if p.num_rows > 1],
        decode_lengths=np.array([p.stop for p in decodes], np.int64),
        decode_tables=tables,
        block_size=BLOCK_SIZE,
        device=torch.device("cpu"),
        kind=group.kind,
        window=group.window,
    )
