"""Stage 1 of gpu_check, attention: decode, prefill and KV written, over KV in bf16, fp8 and int8, against fp64.

MoE kernels and rows of logits are in gpu_check_values.py. What is expected follows from KV as it is stored.
Letters: T rows, H query heads, Hkv KV heads, Dh and Dv widths of a head, n tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.gpu_check_inputs import BLOCK_SIZE, KV, Attended, Place, groups_of, random_storage, step_of
from benchmarks.gpu_check_values import Case, Errors, Made, near, same
from moewe.attention.kernels.attend import attention_launches
from moewe.attention.kernels.heads import heads_launch
from moewe.attention.kernels.latent import LatentSteps, latent_launch
from moewe.attention.kernels.step import GpuStep
from moewe.kvcache.groups import first_visible_rows
from moewe.kvcache.storage import KVStorage, Pages
from moewe.models.kernels.launches import head_steps
from moewe.models.rotary import Angles, Rotary
from moewe.native.gpu import GpuTarget, Launch

MODELS = ("qwen3-30b-a3b", "gpt-oss-120b", "deepseek-v3", "glm-4.5", "mixtral-8x7b")
# Runs (tokens before, rows), and how many of the first are decode: borders of splits and blocks, long context.
_RUNS = [(0, 1), (511, 1), (512, 1), (4199, 1), (32767, 1), (0, 150), (1030, 70)], 5
_SMALL_RUNS = [(3, 1), (140, 1), (130, 6)], 2


def attend64(attended: Attended, q: torch.Tensor, step: GpuStep, run: int) -> torch.Tensor:
    """Return what the rows of a run must get, [rows, H, Dv] f64."""
    group, options = attended.group, attended.options
    first, rows, before, at = step.runs[run].tolist()
    end = before + rows
    blocks = step.tables[at : at - (-end // BLOCK_SIZE)].long()
    keys, values = (
        pages.read(blocks, torch.float64).flatten(0, 1)[:end] for pages in attended.storage.pages(attended.layer)
    )
    shared = q.shape[1] // group.num_kv_heads
    queries = q[first : first + rows].double().unflatten(1, (group.num_kv_heads, shared))
    scores = torch.einsum("tkgd,nkd->kgtn", queries, keys) * options.scale
    if options.score_cap:
        scores = options.score_cap * torch.tanh(scores / options.score_cap)
    positions = torch.arange(before, end)
    firsts = torch.from_numpy(first_visible_rows(group.kind, group.window, positions.numpy()))
    tokens = torch.arange(end)
    unseen = ((tokens < firsts[:, None]) | (tokens > positions[:, None])).to(q.device)
    scores = scores.masked_fill(unseen, -torch.inf)
    if options.sinks is not None:
        sinks = options.sinks.double().view(group.num_kv_heads, shared, 1, 1).expand(-1, -1, rows, 1)
        scores = torch.cat([scores, sinks], -1)
    weights = scores.softmax(-1)[..., :end]
    return torch.einsum("kgtn,nkd->tkgd", weights, values).flatten(1, 2)


def _attend(model: str, kv: str, number: int, place: Place, target: GpuTarget) -> Made:
    config = place.config(model)
    group = groups_of(config, kv)[number]
    runs, num_decodes = _SMALL_RUNS if place.small else _RUNS
    total = sum(-(-(before + rows) // BLOCK_SIZE) for before, rows in runs) + 3
    attended = random_storage(config, group, total * BLOCK_SIZE, place)
    step = step_of(runs, num_decodes, total, place)
    num_rows = sum(rows for _, rows in runs)
    q = place.randn(num_rows, config.num_heads, group.head_dim)
    out = q.new_empty(num_rows, config.num_heads, group.value_dim)
    launches = list(attention_launches(q, out, attended.storage, attended.layer, step, attended.options, target))

    def compare() -> Errors:
        errors = []
        for run, (first, rows, _, _) in enumerate(step.runs.tolist()):  # each by itself: few keys make large numbers
            errors.append(near(out[first : first + rows], attend64(attended, q, step, run), "bfloat16"))
        return {name: max(one[name] for one in errors) for name in errors[0]}

    return Made(launches=launches, compare=compare)


def _alone(model: str, kv: str, place: Place, target: GpuTarget) -> Made:
    """Splits and tiles stand at fixed places: a sequence has the same bits among others, by itself, and in chunks."""
    config = place.config(model)
    group = groups_of(config, kv)[0]
    runs, num_decodes = _SMALL_RUNS if place.small else ([(511, 1), (4199, 1), (1030, 70)], 2)
    counts = [-(-(before + rows) // BLOCK_SIZE) for before, rows in runs]
    starts, firsts = ([sum(numbers[:i]) for i in range(len(runs))] for numbers in (counts, [rows for _, rows in runs]))
    tables = np.random.default_rng(0).permutation(sum(counts)).astype(np.int32)
    attended = random_storage(config, group, sum(counts) * BLOCK_SIZE, place)
    q = place.randn(sum(rows for _, rows in runs), config.num_heads, group.head_dim)

    def launched(queries: torch.Tensor, told: list[list[int]], blocks: np.ndarray, decodes: int) -> torch.Tensor:
        out = queries.new_empty(len(queries), config.num_heads, group.value_dim)
        step = GpuStep(np.array(told, np.int64), blocks, decodes, place.device)
        launches.extend(
            attention_launches(queries, out, attended.storage, attended.layer, step, attended.options, target)
        )
        return out

    launches: list[Launch] = []
    all_runs = [[first, rows, before, start] for (before, rows), first, start in zip(runs, firsts, starts)]
    among, alone, cut = launched(q, all_runs, tables, num_decodes), [], []
    for i, (first, rows, before, start) in enumerate(all_runs):
        own = tables[start : start + counts[i]].copy()
        alone.append(launched(q[first : first + rows], [[0, rows, before, 0]], own, int(i < num_decodes)))
        ends = [rows] if rows == 1 else [rows // 3, rows]  # not where a tile ends
        for at, end in zip([0, *ends], ends):
            told = [[0, end - at, before + at, 0]]
            cut.append(launched(q[first + at : first + end], told, own, int(i < num_decodes)))

    def compare() -> Errors:
        same(among.view(torch.int16), torch.cat(alone).view(torch.int16), "numbers of sequences alone")
        same(among.view(torch.int16), torch.cat(cut).view(torch.int16), "numbers of prompts in chunks")
        return {}

    return Made(launches=launches, compare=compare)


def _turned(heads: torch.Tensor, angles: Angles, interleaved: bool) -> torch.Tensor:
    """Return [T, heads, Dh] f64, the first elements turned as `Rotary.rotate` does."""
    width = angles.cos.shape[-1]
    first, rest = heads[..., :width], heads[..., width:]
    if interleaved:
        partner = first.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    else:
        partner = first.roll(width // 2, -1)
    return torch.cat([first * angles.cos.double() + partner * angles.sin.double(), rest], -1)


def _stored(pages: Pages, slots: torch.Tensor) -> torch.Tensor:
    """Return what stands at `slots`, [T, Hkv, W] f64."""
    offsets = slots % BLOCK_SIZE
    return pages.read(slots // BLOCK_SIZE, torch.float64)[torch.arange(len(slots), device=slots.device), offsets]


def _angles(attended_rotary: Rotary, rows: int, place: Place) -> Angles:
    angles = attended_rotary.angles(torch.arange(rows, device=place.device) * 37 % 4000)
    return Angles(angles.cos.contiguous(), angles.sin.contiguous())


def _roundings(kv: str) -> tuple[str, ...]:
    return ("bfloat16",) if kv == "bf16" else ("bfloat16", kv)


def _heads(model: str, kv: str, place: Place, target: GpuTarget) -> Made:
    config, rows = place.config(model), 3 if place.small else 200
    group = groups_of(config, kv)[0]
    storage = KVStorage([group], num_blocks=1 + rows // BLOCK_SIZE, block_size=BLOCK_SIZE, device=place.device)
    steps = head_steps(config, group.layers[0])
    if steps.norm_weights is not None:
        steps = replace(steps, norm_weights=place.randn(steps.norm_weights.numel(), scale=0.1) + 1)
    both = steps.num_heads + steps.num_kv_heads
    qkv = place.randn(rows, (both + steps.num_kv_heads) * steps.head_dim)
    slots = torch.randperm(storage.num_blocks[0] * BLOCK_SIZE, device=place.device)[:rows]
    angles = _angles(Rotary(config.rotary, place.device), rows, place) if steps.rotary_dim else None
    launch, q = heads_launch(steps, storage.pages(group.layers[0]), qkv, slots, angles, target=target)

    def compare() -> Errors:
        heads = qkv.double().view(rows, -1, steps.head_dim)
        qk, v = heads[:, :both], heads[:, both:]
        if steps.head_norm == "head" and steps.norm_weights is not None:
            qk = F.rms_norm(qk, (steps.head_dim,), None, steps.eps)
            qk = qk * steps.norm_weights.double().view(both, steps.head_dim)
        assert steps.head_norm in (None, "head"), "no model of this script has another norm"
        if angles is not None:
            qk = _turned(qk, angles, steps.interleaved)
        k_pages, v_pages = storage.pages(group.layers[0])
        near(_stored(k_pages, slots), qk[:, steps.num_heads :], *_roundings(kv))
        near(_stored(v_pages, slots), v, *_roundings(kv))
        return near(q, qk[:, : steps.num_heads], "bfloat16")

    return Made(launches=[launch], compare=compare)


def _latent_rows(kv: str, place: Place, target: GpuTarget) -> Made:
    config, rows = place.config("deepseek-v3"), 3 if place.small else 200
    group, shape = groups_of(config, kv)[0], config.latent
    assert shape is not None
    storage = KVStorage([group], num_blocks=1 + rows // BLOCK_SIZE, block_size=BLOCK_SIZE, device=place.device)
    steps = LatentSteps(
        kv_rank=shape.kv_rank, rope_dim=shape.rope_dim, nope_dim=shape.nope_dim,
        norm=place.randn(shape.kv_rank, scale=0.1) + 1, eps=shape.norm_eps, interleaved=config.rotary.interleaved,
    )  # fmt: skip
    latents = place.randn(rows, group.head_dim)
    queries = place.randn(rows, config.num_heads, shape.nope_dim + shape.rope_dim)
    q = place.randn(rows, config.num_heads, group.head_dim)
    slots = torch.randperm(storage.num_blocks[0] * BLOCK_SIZE, device=place.device)[:rows]
    angles = _angles(Rotary(config.rotary, place.device), rows, place)
    pages = storage.pages(group.layers[0])[0]
    launch = latent_launch(steps, pages, latents, queries, q, slots, angles, target=target)

    def compare() -> Errors:
        normed = F.rms_norm(latents[:, : shape.kv_rank].double(), (shape.kv_rank,), steps.norm.double(), steps.eps)
        turned = _turned(latents[:, None, shape.kv_rank :].double(), angles, steps.interleaved)
        near(_stored(pages, slots), torch.cat([normed[:, None], turned], -1), *_roundings(kv))
        wanted = _turned(queries[..., shape.nope_dim :].double(), angles, steps.interleaved)
        return near(q[..., shape.kv_rank :], wanted, "bfloat16")

    return Made(launches=[launch], compare=compare)


def attention_cases(*, small: bool) -> Iterator[Case]:
    """Yield the cases of this file."""
    for kv in KV:
        for model in ("qwen3-30b-a3b", "deepseek-v3"):
            name = f"attention over {kv}, {model}, sequences alone as among others"
            yield Case(name=name, rank=1, make=partial(_alone, model, kv))
        for model in MODELS[:3] if small else MODELS:
            for number, group in enumerate(
                groups_of(Place(device=torch.device("meta"), small=small).config(model), kv)
            ):
                name = f"attention over {kv}, {model}, {group.kind}"
                yield Case(name=name, rank=0 if kv == "bf16" else 1, make=partial(_attend, model, kv, number))
        for model in ("qwen3-30b-a3b", "glm-4.5"):  # with and without a norm of heads; half of a head turns
            yield Case(name=f"heads and KV write in {kv}, {model}", rank=1, make=partial(_heads, model, kv))
        yield Case(name=f"latents and KV write in {kv}, deepseek-v3", rank=1, make=partial(_latent_rows, kv))
