"""Every launch that norms and attention of a model make, from its config alone: to compile them before they are needed.

Tensors are of device `meta`, which has no memory. Not experts (moe/kernels/launches.py) and nothing that runs.
Letters: T tokens, D width, H heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import numpy as np
import torch

from ...attention.batch import AttentionOptions
from ...attention.kernels.attend import attention_launches
from ...attention.kernels.heads import heads_launch
from ...attention.kernels.latent import LatentSteps, latent_launch
from ...attention.kernels.step import GpuStep
from ...attention.native_heads import HeadSteps
from ...attention.tensor_parallel import HeadShare
from ...kvcache.storage import KVStorage
from ...moe.kernels.combine import ExpertRows
from ...native.gpu import GpuTarget, Launch
from ...quant import FORMATS, KV_FORMATS
from ..config import ModelConfig
from ..footprint import cache_groups
from ..head_shares import local_config, possible_shares
from .norm import norm_launch

_KV_FORMATS = (FORMATS["bfloat16"], *KV_FORMATS.values())
_BLOCK_SIZE = 16
_RANKS_OF_A_HOST = (2, 4, 8)


def layer_launches(config: ModelConfig, target: GpuTarget, num_tokens: int = 1) -> Iterator[Launch]:
    """Yield every launch of norms and attention that differs in its code: in bf16, with every format of KV.

    With all heads, and with as many as a rank has that shares them. T = `num_tokens` changes grids alone.
    """
    x, weight = _rows(num_tokens, config.hidden_size), _rows(config.hidden_size)
    for added in (None, x, _expert_rows(config, num_tokens)):
        yield norm_launch(x, weight, eps=config.norm_eps, added=added, multiplier=1.0, out=x)
    if config.latent is not None and config.latent.query_rank:
        x, weight = _rows(num_tokens, config.latent.query_rank), _rows(config.latent.query_rank)
        yield norm_launch(x, weight, eps=config.latent.norm_eps, added=None, multiplier=1.0, out=x)
    if config.latent is not None:
        yield from _expanded_launches(config, target, num_tokens)
    for held in _KV_FORMATS:
        for part in head_parts(config):
            groups = cache_groups(part, dtype=held)
            storage = KVStorage(groups, num_blocks=1, block_size=_BLOCK_SIZE, device="meta")
            for group in groups:
                if part.num_heads == config.num_heads or part.latent is not None:  # torch turns other divided heads
                    yield _row_launch(part, storage, group.layers[0], target, num_tokens)
                yield from _attention_launches(part, storage, group.layers[0], target, num_tokens)


@cache
def head_parts(config: ModelConfig) -> list[ModelConfig]:
    """Return what a rank has of a model whose heads are divided among 1, 2, 4, .. ranks, up to those of one host."""
    shares = (1, *(number for number in possible_shares(config) if number in _RANKS_OF_A_HOST))
    return [local_config(config, HeadShare(0, number)) for number in shares]


def _expert_rows(config: ModelConfig, num_tokens: int) -> ExpertRows | None:
    """Return what a MoE layer leaves to the next norm to add up."""
    if config.moe is None:
        return None
    size, top_k = config.hidden_size, config.moe.routing.top_k
    weights = torch.empty(num_tokens, top_k, device="meta")
    row_of = torch.empty(num_tokens, top_k, dtype=torch.int32, device="meta")
    shared = _rows(num_tokens, size) if config.moe.shared_width else None
    return ExpertRows(_rows(num_tokens * top_k, size), weights, row_of, shared)


def _row_launch(config: ModelConfig, storage: KVStorage, layer: int, target: GpuTarget, num_tokens: int) -> Launch:
    slots = torch.empty(num_tokens, dtype=torch.int64, device="meta")
    angles = torch.empty(num_tokens, 1, config.rotary.rotary_dim, device="meta")
    if config.latent is not None:
        return _latent(config, storage, layer, slots, angles, target)
    steps = head_steps(config, layer)
    qkv = _rows(num_tokens, (steps.num_heads + 2 * steps.num_kv_heads) * steps.head_dim)
    both = (angles, angles) if steps.rotary_dim else None
    return heads_launch(steps, storage.pages(layer), qkv, slots, both, target=target)[0]


def _attention_launches(
    config: ModelConfig, storage: KVStorage, layer: int, target: GpuTarget, num_tokens: int
) -> Iterator[Launch]:
    """Of one row behind T tokens, and of a run of T + 1."""
    group = storage.groups[storage.group_of(layer)]
    runs = np.array([[0, 1, num_tokens, 0], [1, num_tokens + 1, 0, 1]])
    step = GpuStep(runs, np.zeros(2, np.int32), 1, torch.device("meta"))
    sinks = torch.empty(config.num_heads, device="meta") if config.sinks else None
    options = AttentionOptions(config.attention_scale, config.score_cap, sinks)
    q, out = (_rows(num_tokens + 2, config.num_heads, width) for width in (group.head_dim, group.value_dim))
    yield from attention_launches(q, out, storage, layer, step, options, target)


def _expanded_launches(config: ModelConfig, target: GpuTarget, num_tokens: int) -> Iterator[Launch]:
    """Of latent attention over heads of K and V, whose widths differ: what kernels can, and no model here asks for."""
    latent = config.latent
    assert latent is not None
    for held in _KV_FORMATS:
        group = replace(
            cache_groups(config, dtype=held)[0],
            kind="full",
            num_kv_heads=config.num_heads,
            head_dim=latent.nope_dim + latent.rope_dim,
            value_dim=latent.value_dim,
        )
        storage = KVStorage([group], num_blocks=1, block_size=_BLOCK_SIZE, device="meta")
        yield from _attention_launches(config, storage, group.layers[0], target, num_tokens)


def head_steps(config: ModelConfig, layer: int) -> HeadSteps:
    """Return what the layer does with its heads, with weights that have no memory."""
    heads = config.num_heads + config.num_kv_heads
    rotary = config.attention_of(layer).rotary
    norm = None if config.qk_norm == "unit" and not rotary else config.qk_norm
    return HeadSteps(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rotary_dim=config.rotary.rotary_dim if rotary else 0,
        interleaved=config.rotary.interleaved,
        head_norm=norm,
        norm_weights=_rows(heads * config.head_dim) if norm in ("head", "full") else None,
        norm_after_rotary=config.qk_norm_after_rotary,
        eps=config.norm_eps,
    )


def _latent(
    config: ModelConfig, storage: KVStorage, layer: int, slots: torch.Tensor, angles: torch.Tensor, target: GpuTarget
) -> Launch:
    shape, num_tokens = config.latent, len(slots)
    assert shape is not None
    width = shape.kv_rank + shape.rope_dim
    steps = LatentSteps(
        kv_rank=shape.kv_rank,
        rope_dim=shape.rope_dim,
        nope_dim=shape.nope_dim,
        norm=_rows(shape.kv_rank),
        eps=shape.norm_eps,
        interleaved=config.rotary.interleaved,
    )
    queries = _rows(num_tokens, config.num_heads, shape.nope_dim + shape.rope_dim)
    q = _rows(num_tokens, config.num_heads, width)
    pages = storage.pages(layer)[0]
    return latent_launch(steps, pages, _rows(num_tokens, width), queries, q, slots, (angles, angles), target=target)


def _rows(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16, device="meta")
