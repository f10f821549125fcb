"""Random inputs of kernels at the shapes of published models, on any device (`meta` has no memory), and small ones.

Not what is expected of kernels and no figures. Letters: D width, F expert width, S slots, T tokens, K top-k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from moewe.attention.batch import AttentionOptions
from moewe.attention.kernels.step import GpuStep
from moewe.kvcache.groups import CacheGroup
from moewe.kvcache.storage import KVStorage
from moewe.models.config import ModelConfig
from moewe.models.footprint import cache_groups
from moewe.models.published import published_config
from moewe.moe.gated import ExpertWeights
from moewe.moe.kernels.launches import MoEShapes
from moewe.quant import FORMATS, INT4_GROUP, KV_FORMATS, MXFP4, Matrix, QuantTensor
from moewe.runtime.gpu_launches import moe_shapes

BLOCK_SIZE = 16
KV = {"bf16": FORMATS["bfloat16"], **{name: KV_FORMATS[name] for name in ("fp8", "int8")}}
_HEAD = 32  # width of a head of a small model
_SMALL_WIDTH, _SMALL_FFN, _SMALL_EXPERTS = 128, 64, 4


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where inputs are made: on a device, of real sizes or small ones."""

    device: torch.device
    small: bool = False

    @property
    def holds_nothing(self) -> bool:
        """Whether there is nothing to fill: shapes alone."""
        return self.device.type == "meta"

    def randn(self, *size: int, scale: float = 1.0) -> torch.Tensor:
        """Return normal numbers in bf16."""
        if self.holds_nothing:
            return torch.empty(*size, dtype=torch.bfloat16, device=self.device)
        return torch.randn(*size, device=self.device).mul_(scale).bfloat16()

    def config(self, model: str) -> ModelConfig:
        """Return the config of a published model, or one that is alike with few narrow heads and few experts."""
        config = published_config(model)
        return shrunk(config) if self.small else config


def shrunk(config: ModelConfig) -> ModelConfig:
    """Return a config whose kernels take the same ways with as little work as there can be."""
    latent, moe, group = config.latent, config.moe, config.num_heads // config.num_kv_heads
    assert moe is not None
    groups, top_groups = (4, 2) if moe.routing.num_groups > 1 else (1, 1)
    top_k = min(4, moe.routing.top_k)
    routing = replace(moe.routing, num_experts=16, top_k=top_k, num_groups=groups, top_groups=top_groups)
    if latent is not None:
        latent = replace(latent, kv_rank=_HEAD, rope_dim=16, nope_dim=16, value_dim=16)
    turned = 16 if latent or config.rotary.rotary_dim < config.head_dim else _HEAD
    return replace(
        config,
        hidden_size=_SMALL_WIDTH,
        vocab_size=500,
        num_heads=4 if latent else 2 * min(group, 4),
        num_kv_heads=4 if latent else 2,
        head_dim=_HEAD,
        attention_scale=_HEAD**-0.5,
        latent=latent,
        rotary=replace(config.rotary, rotary_dim=turned, scaling=None),
        moe=replace(moe, expert_width=_SMALL_FFN, routing=routing),
    )


def shapes_of(config: ModelConfig, formats: Sequence[str], *, num_experts: int | None = None) -> MoEShapes:
    """Return the shapes of a model's MoE layers, with all of its experts or so many."""
    shapes = moe_shapes(config, tuple(formats))
    routing = shapes.routing
    if num_experts is None or num_experts >= routing.num_experts:
        return shapes
    few = replace(routing, num_experts=num_experts, num_groups=1, top_groups=1, top_k=min(routing.top_k, num_experts))
    return replace(shapes, routing=few)


def random_experts(shapes: MoEShapes, format_name: str, place: Place) -> ExpertWeights:
    """Return experts of about unit gain: normal numbers, or the codes that stand for such."""
    made = shapes.experts(format_name)
    if place.holds_nothing:
        return made
    biases = [None if part is None else place.randn(*part.shape, scale=0.1) for part in (made.b13, made.b2)]
    return ExpertWeights(
        w13=random_matrix(made.w13, place), w2=random_matrix(made.w2, place), b13=biases[0], b2=biases[1]
    )


def random_matrix(like: Matrix, place: Place) -> Matrix:
    """Return a stack as `like`, which has no memory, of numbers of standard deviation D ** -0.5."""
    inputs = like.shape[-1]
    if isinstance(like, torch.Tensor):
        made = torch.empty(like.shape, dtype=like.dtype, device=place.device)
        for matrix in made:
            matrix.normal_().mul_(inputs**-0.5)
        return made
    assert isinstance(like, QuantTensor)
    data = torch.empty(like.data.shape, dtype=like.data.dtype, device=place.device)
    for codes in data:
        if codes.dtype == torch.float8_e4m3fn:
            codes.copy_(torch.randn(codes.shape, device=place.device).mul_(40))
        else:
            codes.random_(*((-127, 128) if codes.dtype == torch.int8 else (0, 256)))
    kind, shape = like.scheme.kind, like.scales.shape
    if kind == MXFP4:
        exponent = 126 - inputs.bit_length() // 2
        scales = torch.randint(exponent - 3, exponent + 1, shape, dtype=torch.uint8, device=place.device)
    else:
        spread = {torch.float8_e4m3fn: 40, torch.int8: 74}.get(like.data.dtype, 5)
        scales = ((torch.rand(shape, device=place.device) + 0.5) * inputs**-0.5 / spread).to(like.scales.dtype)
    zeros = None
    if kind == INT4_GROUP and like.zeros is not None:
        zeros = torch.randint(4, 12, shape, dtype=torch.uint8, device=place.device)
    return replace(like, data=data, scales=scales, zeros=zeros)


def random_choices(tokens: int, num_experts: int, top_k: int, place: Place) -> torch.Tensor:
    """Return [T, K] i32: each token chooses K experts, all alike."""
    return torch.rand(tokens, num_experts, device=place.device).argsort(-1)[:, :top_k].to(torch.int32).contiguous()


def sorted_by_slot(ids: torch.Tensor, num_slots: int, place: Place) -> tuple[torch.Tensor, torch.Tensor]:
    """Return of choices [T, K] the token of each row, sorted by slot [N] i32, and the rows of each slot [S] i64."""
    if place.holds_nothing:
        counts = torch.empty(num_slots, dtype=torch.int64, device=place.device)
        return torch.empty(ids.numel(), dtype=torch.int32, device=place.device), counts
    flat = ids.flatten().long()
    row_tokens = (flat.argsort(stable=True) // ids.shape[1]).to(torch.int32)
    return row_tokens, torch.zeros(num_slots, dtype=torch.int64, device=place.device).index_add(
        0, flat, torch.ones_like(flat)
    )


@dataclass(frozen=True, kw_only=True)
class Attended:
    """What a layer attends over: storage with random KV, and how a model does it."""

    config: ModelConfig
    group: CacheGroup
    storage: KVStorage
    options: AttentionOptions

    @property
    def layer(self) -> int:
        return self.group.layers[0]


def groups_of(config: ModelConfig, kv: str) -> list[CacheGroup]:
    """Return the cache groups of a model, of one layer each."""
    return [replace(group, layers=group.layers[:1]) for group in cache_groups(config, dtype=KV[kv])]


def random_storage(config: ModelConfig, group: CacheGroup, tokens: int, place: Place) -> Attended:
    """Return storage for `tokens`, full of normal numbers in the format of the group."""
    blocks = -(-tokens // BLOCK_SIZE)
    storage = KVStorage([group], num_blocks=blocks, block_size=BLOCK_SIZE, device=place.device)
    k, v = storage.pages(group.layers[0])
    for pages in () if place.holds_nothing else (k,) if group.kind == "latent" else (k, v):
        for elements in pages.elements.split(1 << 14):  # a temporary of a billion numbers would not fit
            noise = torch.randn(elements.shape, device=place.device)
            if pages.scales is None:
                elements.copy_(noise)
            elif elements.dtype == torch.int8:
                elements.copy_(noise.mul_(32).clamp_(-127, 127))
            else:
                elements.copy_(noise.mul_(112).clamp_(-448, 448))
        if pages.scales is not None:
            largest = 32 if pages.elements.dtype == torch.int8 else 112
            pages.scales.copy_((torch.rand(pages.scales.shape, device=place.device) + 0.5) / largest)
    sinks = torch.randn(config.num_heads, device=place.device) if config.sinks else None
    options = AttentionOptions(config.attention_scale, config.score_cap, sinks)
    return Attended(config=config, group=group, storage=storage, options=options)


def step_of(
    runs: Sequence[tuple[int, int]], num_decodes: int, num_blocks: int, place: Place, *, seed: int = 0
) -> GpuStep:
    """Return a step of runs (tokens before, rows), the first ones single rows, in blocks at random, none twice."""
    rng = np.random.default_rng(seed)
    counts = [-(-(before + rows) // BLOCK_SIZE) for before, rows in runs]
    tables = rng.choice(num_blocks, sum(counts), replace=False).astype(np.int32)
    starts = np.cumsum([0, *counts])[:-1]
    first_rows = np.cumsum([0, *(rows for _, rows in runs)])[:-1]
    made = [(first, rows, before, start) for (before, rows), first, start in zip(runs, first_rows, starts)]
    return GpuStep(np.array(made, np.int64).reshape(-1, 4), tables, num_decodes, place.device)
