"""Stage 2 of gpu_check, the small kernels of a step: routing, permute, combine, norms, heads, latents, logits.

Products and attention are in gpu_check_speed.py. Shapes are Qwen3-30B-A3B's, of latents DeepSeek-V3's.
Letters: T tokens, K top-k, E experts, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from benchmarks.gpu_check_device import Repetitions
from benchmarks.gpu_check_inputs import BLOCK_SIZE, Place, groups_of, random_choices, shapes_of
from benchmarks.gpu_check_speed import Speed
from moewe.attention.kernels.heads import heads_launch
from moewe.attention.kernels.latent import LatentSteps, latent_launch
from moewe.attention.kernels.roofline import AttentionRows
from moewe.kvcache.storage import KVStorage
from moewe.models.config import ModelConfig
from moewe.models.kernels.launches import head_steps
from moewe.models.kernels.norm import norm_launch
from moewe.models.kernels.roofline import norm_work, rows_work
from moewe.models.published import published_config
from moewe.moe.kernels.combine import ExpertRows, combine_launch
from moewe.moe.kernels.permute import permute_launches
from moewe.moe.kernels.roofline import layer_work, router_work
from moewe.moe.kernels.route import route_launch
from moewe.moe.kernels.route_permute import fits_one_program, route_permute_launch
from moewe.moe.kernels.router import MOST_ROWS, router_launch
from moewe.moe.kernels.row_tiles import empty_tiles
from moewe.native.gpu import GpuTarget, Launch
from moewe.runtime.ranks.kernels.roofline import sampling_work
from moewe.runtime.ranks.kernels.rows import draw_launch, logprobs_launch, scan_launch
from moewe.topologies.kernel_work import Work

MODEL, LATENT_MODEL = "qwen3-30b-a3b", "deepseek-v3"
_TOKENS = (1, 16, 64, 4096)
_ROWS = (1, 64)  # of logits
_MOST_REPEATS = 10

Once = Callable[[Place, GpuTarget], list[Launch]]


def _route(config: ModelConfig, tokens: int, place: Place, target: GpuTarget) -> list[Launch]:
    routing = shapes_of(config, []).routing
    return [route_launch(torch.randn(tokens, routing.num_experts, device=place.device), routing)[0]]


def _permute(config: ModelConfig, tokens: int, place: Place, target: GpuTarget) -> list[Launch]:
    routing = shapes_of(config, []).routing
    ids = random_choices(tokens, routing.num_experts, routing.top_k, place)
    return permute_launches(ids, routing.num_experts)[0]


def _expert_rows(config: ModelConfig, tokens: int, place: Place) -> ExpertRows:
    top_k = shapes_of(config, []).routing.top_k
    row_of = torch.arange(tokens * top_k, device=place.device).flip(0).view(tokens, top_k).to(torch.int32)
    weights = torch.rand(tokens, top_k, device=place.device)
    return ExpertRows(place.randn(tokens * top_k, config.hidden_size), weights, row_of.contiguous())


def _combine(config: ModelConfig, tokens: int, place: Place, target: GpuTarget) -> list[Launch]:
    return [combine_launch(_expert_rows(config, tokens, place))[0]]


def _router(config: ModelConfig, tokens: int, place: Place, target: GpuTarget) -> list[Launch]:
    shapes = shapes_of(config, [])
    weight = torch.randn(shapes.routing.num_experts, shapes.width, device=place.device)
    return [router_launch(place.randn(tokens, shapes.width), weight, None)[0]]


def _route_permute(config: ModelConfig, tokens: int, place: Place, target: GpuTarget) -> list[Launch]:
    routing, device = shapes_of(config, []).routing, place.device
    counts = torch.empty(routing.num_experts, dtype=torch.int64, device=device)
    cut = empty_tiles(tokens * routing.top_k, routing.num_experts, 16, counts.device)
    slot_of = torch.arange(routing.num_experts, device=device).to(torch.int32)
    logits = torch.randn(tokens, routing.num_experts, device=device)
    return [route_permute_launch(logits, routing, None, slot_of, counts=counts, cut=cut)[0]]


def _adding_norm(config: ModelConfig, tokens: int, place: Place, target: GpuTarget) -> list[Launch]:
    experts, width = _expert_rows(config, tokens, place), config.hidden_size
    x = place.randn(tokens, width)
    out = torch.empty_like(x)
    return [norm_launch(x, place.randn(width), eps=1e-6, added=experts, multiplier=1.0, out=out)]


def _norm(config: ModelConfig, tokens: int, place: Place, target: GpuTarget) -> list[Launch]:
    x, added = place.randn(tokens, config.hidden_size), place.randn(tokens, config.hidden_size)
    weight = place.randn(config.hidden_size)
    return [norm_launch(x, weight, eps=1e-6, added=added, multiplier=1.0, out=torch.empty_like(x))]


def _angles(config: ModelConfig, tokens: int, place: Place) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = (torch.rand(tokens, 1, config.rotary.rotary_dim, device=place.device) for _ in range(2))
    return cos, sin


def _heads(config: ModelConfig, kv: str, tokens: int, place: Place, target: GpuTarget) -> list[Launch]:
    group = groups_of(config, kv)[0]
    storage = KVStorage([group], num_blocks=-(-tokens // BLOCK_SIZE), block_size=BLOCK_SIZE, device=place.device)
    steps = head_steps(config, group.layers[0])
    if steps.norm_weights is not None:
        steps = replace(steps, norm_weights=place.randn(steps.norm_weights.numel()))
    qkv = place.randn(tokens, (steps.num_heads + 2 * steps.num_kv_heads) * steps.head_dim)
    slots = torch.arange(tokens, device=place.device)
    pages = storage.pages(group.layers[0])
    return [heads_launch(steps, pages, qkv, slots, _angles(config, tokens, place), target=target)[0]]


def _latents(config: ModelConfig, kv: str, tokens: int, place: Place, target: GpuTarget) -> list[Launch]:
    group, shape = groups_of(config, kv)[0], config.latent
    assert shape is not None
    storage = KVStorage([group], num_blocks=-(-tokens // BLOCK_SIZE), block_size=BLOCK_SIZE, device=place.device)
    steps = LatentSteps(
        kv_rank=shape.kv_rank, rope_dim=shape.rope_dim, nope_dim=shape.nope_dim, norm=place.randn(shape.kv_rank),
        eps=shape.norm_eps, interleaved=config.rotary.interleaved,
    )  # fmt: skip
    queries = place.randn(tokens, config.num_heads, shape.nope_dim + shape.rope_dim)
    q = place.randn(tokens, config.num_heads, group.head_dim)
    kv_rows, slots = place.randn(tokens, group.head_dim), torch.arange(tokens, device=place.device)
    pages = storage.pages(group.layers[0])[0]
    return [latent_launch(steps, pages, kv_rows, queries, q, slots, _angles(config, tokens, place), target=target)]


def _logits(operation: str, vocab: int, rows: int, place: Place, target: GpuTarget) -> list[Launch]:
    logits, device = torch.randn(rows, vocab, device=place.device), place.device
    numbers, wide = torch.ones(rows, device=device), torch.full((rows,), 0.9, dtype=torch.float64, device=device)
    ids = torch.zeros(rows, dtype=torch.int64, device=device)
    if operation == "scan":
        return [scan_launch(logits)[0]]
    if operation == "logprobs":
        return [logprobs_launch(logits, torch.arange(rows, device=device), ids, -9999.0)[0]]
    return [draw_launch(logits, numbers, numbers * 0, ids + 50, wide, wide / 2)[0]]


def _repeated(once: Once) -> Callable[[Place, GpuTarget, int], Repetitions]:
    return lambda place, target, number: [once(place, target) for _ in range(min(number, _MOST_REPEATS))]


def row_speeds() -> Iterator[Speed]:
    """Yield the kernels of this file. None has a goal: their bytes are few, and what counts is the whole step."""
    config, latent = published_config(MODEL), published_config(LATENT_MODEL)
    for tokens in _TOKENS:
        layer = layer_work(shapes_of(config, ["bf16"]), tokens, "bf16")
        made: dict[str, tuple[object, Once]] = {
            name: (layer[name], partial(once, config, tokens))
            for name, once in (("route", _route), ("permute", _permute), ("combine", _combine))
        }
        shapes = shapes_of(config, [])
        if tokens <= MOST_ROWS:
            made["router"] = router_work(shapes, tokens), partial(_router, config, tokens)
        if fits_one_program(tokens, shapes.routing):
            # Slots of choices go no way any more.
            both = layer["route"].bytes + layer["permute"].bytes
            made["route and permute"] = Work(bytes=both), partial(_route_permute, config, tokens)
        summed = layer["combine"].bytes + norm_work(tokens, config.hidden_size, adds=True).bytes
        written = 2 * tokens * config.hidden_size * 2  # what is added is neither written nor read again
        made["norm that adds experts"] = Work(bytes=summed - written), partial(_adding_norm, config, tokens)
        made["norm"] = norm_work(tokens, config.hidden_size, adds=True), partial(_norm, config, tokens)
        for kv in ("bf16", "fp8"):
            for each, once in ((config, _heads), (latent, _latents)):
                rows = AttentionRows(group=groups_of(each, kv)[0], num_heads=each.num_heads)
                name = f"{'latents' if each.latent else 'heads'} and KV write in {kv}"
                made[name] = rows_work(each, rows, tokens), partial(once, each, kv, tokens)
        for name, (work, once) in made.items():
            yield Speed(name=f"{name}, {tokens} tokens", rank=8, work=work, build=_repeated(once))  # type: ignore[arg-type]
    for rows in _ROWS:
        for name, work in sampling_work(rows, config.vocab_size).items():
            once = partial(_logits, name, config.vocab_size, rows)
            yield Speed(name=f"{name} of logits, {rows} rows", rank=8, work=work, build=_repeated(once))
