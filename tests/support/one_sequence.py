"""Runs `Decoder` over one sequence from weights that a test makes: no checkpoint, no loader, no runtime, one rank.

Not tests/support/decoding.py (batches, ranks and checkpoints). Blocks before the first visible token are poisoned with
NaN as soon as no later row may see them. Shapes: logits [T, V] f32.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from moewe.attention.build import build_attention_batch, build_gpu_batch
from moewe.kvcache.groups import first_visible
from moewe.kvcache.storage import KVStorage
from moewe.models.config import ModelConfig
from moewe.models.decoder import Decoder
from moewe.models.footprint import cache_groups
from moewe.models.forward_batch import ForwardBatch
from moewe.models.kernels.choice import TORCH, KernelChoice
from moewe.models.weights import ModelWeights
from moewe.moe.wide_ep import LocalExchange, linear_placement
from moewe.telemetry import RankCounters
from tests.support.attention_steps import Rows

BLOCK_SIZE = 4
build_for_torch = partial(build_attention_batch, block_size=BLOCK_SIZE)


class Run(NamedTuple):
    """Logits of every position, and what was counted."""

    logits: torch.Tensor
    counters: RankCounters


@torch.inference_mode()
def run_one(
    config: ModelConfig,
    weights: ModelWeights,
    tokens: list[int],
    *,
    chunk: int,
    dtype: str = "float32",
    long: bool = False,
    kernels: KernelChoice = TORCH,
) -> Run:
    """Run `tokens` in chunks; `long`: the sequence may outgrow the rotary embedding's original length."""
    num_experts = config.moe.routing.num_experts if config.moe else 0
    placement = linear_placement(len(config.moe_layers), num_experts, 1)
    counters = RankCounters(len(config.moe_layers), num_experts)
    exchange = LocalExchange(num_experts)
    decoder = Decoder(
        config, weights, placement=placement, rank=0, exchange=exchange, counters=counters, kernels=kernels
    )
    num_blocks = -(-len(tokens) // BLOCK_SIZE)
    storage = KVStorage(cache_groups(config, dtype=dtype), num_blocks=num_blocks + 1, block_size=BLOCK_SIZE)
    table = np.random.default_rng(0).permutation(num_blocks) + 1
    logits = []
    for start, stop in pairwise([*range(0, len(tokens), chunk), len(tokens)]):
        batch = _batch(storage, table, tokens, range(start, stop), long, kernels.attention is not None)
        counters.begin_step("mixed", stop - start)
        logits.append(decoder.logits(decoder.forward(batch, storage)))
    counters.settle()
    return Run(torch.cat(logits), counters)


def _batch(
    storage: KVStorage, table: np.ndarray, tokens: list[int], rows: range, long: bool, on_gpu: bool
) -> ForwardBatch:
    positions = np.arange(rows.start, rows.stop)
    used = table[: -(-rows.stop // BLOCK_SIZE)]
    slots = table[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    batches = []
    for group in storage.groups:
        for block in table[: first_visible(group.kind, group.window, rows.start) // BLOCK_SIZE].tolist():
            for layer in group.layers:
                storage.layer(layer)[0][block] = torch.nan
        single = len(rows) == 1
        batches.append(
            (build_gpu_batch if on_gpu else build_for_torch)(
                slot_mapping=slots,
                segments=[] if single else [Rows(0, len(rows), rows.start, used)],
                decode_lengths=np.array([rows.stop] * single, np.int64),
                decode_tables=used[None] if single else np.zeros((0, 0), np.int64),
                device=torch.device("cpu"),
                kind=group.kind,
                window=group.window,
            )
        )
    return ForwardBatch(
        input_ids=torch.tensor(tokens[rows.start : rows.stop]),
        positions=torch.from_numpy(positions),
        attention=tuple(batches),
        sample_rows=torch.arange(len(rows)),
        long_rows=torch.full((len(rows),), long),
    )
