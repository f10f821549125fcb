"""Every launch that norms and attention of a model make, from its config alone: to compile them before they are needed.

Tensors are of device `meta`, which has no memory. Not experts (moe/kernels/launches.py) and nothing that runs.
Letters: T tokens, D width, H heads.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from ...attention.batch import AttentionOptions
from ...attention.kernels.attend import attention_launches
from ...attention.kernels.heads import heads_launch
from ...attention.kernels.latent import LatentSteps, latent_launch
from ...attention.kernels.step import GpuStep
from ...attention.native_heads import HeadSteps
from ...kvcache.storage import KVStorage
from ...moe.kernels.combine import ExpertRows
from ...native.gpu import GpuTarget, Launch
from ...quant import FORMATS, KV_FORMATS
from ..config import ModelConfig
from ..footprint import cache_groups
from .norm import norm_launch

_KV_FORMATS = (FORMATS["bfloat16"], *KV_FORMATS.values())
_BLOCK_SIZE = 16


def layer_launches(config: ModelConfig, num_tokens: int, target: GpuTarget) -> Iterator[Launch]:
    """Yield the launches of one layer of each kind, in bf16 and with every format of KV, with T = `num_tokens`."""
    x, out = _rows(num_tokens, config.hidden_size), _rows(num_tokens, config.hidden_size)
    weight = _rows(config.hidden_size)
    for added in (None, x, _expert_rows(config, num_tokens)):
        yield norm_launch(x, weight, eps=config.norm_eps, added=added, multiplier=1.0, out=out)
    for held in _KV_FORMATS:
        groups = cache_groups(config, dtype=held)
        storage = KVStorage(groups, num_blocks=1, block_size=_BLOCK_SIZE, device="meta")
        for group in groups:
            yield from _row_launches(config, storage, group.layers[0], num_tokens, target)
            yield from _attention_launches(config, storage, group.layers[0], target)


def _expert_rows(config: ModelConfig, num_tokens: int) -> ExpertRows | None:
    """Return what a MoE layer leaves to the next norm to add up."""
    if config.moe is None:
        return None
    size, top_k = config.hidden_size, config.moe.routing.top_k
    weights = torch.empty(num_tokens, top_k, device="meta")
    row_of = torch.empty(num_tokens, top_k, dtype=torch.int32, device="meta")
    shared = _rows(num_tokens, size) if config.moe.shared_width else None
    return ExpertRows(_rows(num_tokens * top_k, size), weights, row_of, shared)


def _row_launches(
    config: ModelConfig, storage: KVStorage, layer: int, num_tokens: int, target: GpuTarget
) -> Iterator[Launch]:
    slots = torch.empty(num_tokens, dtype=torch.int64, device="meta")
    angles = torch.empty(num_tokens, 1, config.rotary.rotary_dim, device="meta")
    if config.latent is not None:
        yield _latent(config, storage, layer, slots, angles, target)
        return
    steps = head_steps(config, layer)
    qkv = _rows(num_tokens, (steps.num_heads + 2 * steps.num_kv_heads) * steps.head_dim)
    both = (angles, angles) if steps.rotary_dim else None
    yield heads_launch(steps, storage.pages(layer), qkv, slots, both, target=target)[0]


def _attention_launches(config: ModelConfig, storage: KVStorage, layer: int, target: GpuTarget) -> Iterator[Launch]:
    """Of one row behind a few tokens, and of a run of two."""
    group = storage.groups[storage.group_of(layer)]
    step = GpuStep(np.array([[0, 1, 9, 0], [1, 2, 9, 1]]), np.zeros(2, np.int32), 1, torch.device("meta"))
    sinks = torch.empty(config.num_heads, device="meta") if config.sinks else None
    options = AttentionOptions(config.attention_scale, config.score_cap, sinks)
    q, out = (_rows(3, config.num_heads, width) for width in (group.head_dim, group.value_dim))
    yield from attention_launches(q, out, storage, layer, step, options, target)


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
