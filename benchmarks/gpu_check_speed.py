"""Stage 2 of gpu_check: which share of what this GPU can do does each kernel reach, at the shapes of real models?

Values are stage 1's. Times are of CUDA graphs, over other rows, experts or blocks in every repetition; floors are those
of the packages' roofline.py. Letters: T tokens, K top-k, E experts. Units: bytes, seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.gpu_check_device import Repetitions, callable_seconds, graph_seconds, repeats_for
from benchmarks.gpu_check_inputs import (
    BLOCK_SIZE,
    KV,
    Place,
    groups_of,
    random_choices,
    random_experts,
    random_storage,
    shapes_of,
    sorted_by_slot,
    step_of,
)
from benchmarks.gpu_check_plan import LeftOut, decode_attention_goal, experts_goal, share_figures
from moewe.attention.kernels.attend import attention_launches
from moewe.attention.kernels.roofline import AttentionRows
from moewe.models.published import published_config
from moewe.moe.gated import ExpertWeights
from moewe.moe.kernels.experts import ffn_launches
from moewe.moe.kernels.roofline import hit_experts, layer_work
from moewe.native.gpu import GpuKernels, GpuTarget, Launch
from moewe.runtime.gpu_launches import MODELS
from moewe.topologies.kernel_work import Work
from moewe.topologies.planner.hardware import load_hardware

# More than the second-level cache of any GPU, so that repetitions over random parts of it miss.
_COLD_BYTES = 512 << 20
_MOST_MEMORY = 0.4  # of the GPU's, for the inputs of one item
_MOST_BASELINE_BYTES = 12 << 30
_MOST_REPEATS = 6  # of launches that need many rows
_MOST_COLD = 64  # repetitions, so that together they read more than the second-level cache holds
_TOKENS = (1, 8, 64, 512, 4096)
_INVARIANT_TOKENS = (8, 512)  # of formats other than bf16
# Of decode attention, sequences and their tokens, the most important first; of prefill, tokens before and new ones.
_DECODES = (
    (32, 8192),
    (1, 8192),
    (256, 1024),
    (256, 8192),
    (1, 32768),
    (32, 1024),
    (8, 32768),
    (256, 32768),
    (1, 1024),
)
_PREFILLS = ((0, 4096), (7168, 1024))

# Only to say before anything is measured what binds a size, which is what goals are about.
_H200 = load_hardware("h200")

Calls = Sequence[Callable[[], object]]


@dataclass(frozen=True, kw_only=True)
class Speed:
    """One kernel at one size.

    Attributes:
        name, rank: as of items.
        work: the least that it must do.
        build: launches of so many repetitions.
        goal: by name, or None.
        baseline: torch doing the same, so many times; None where torch has nothing like it.
        invariant: launches of the batch-invariant form.
        input_bytes: of memory that inputs take.
    """

    name: str
    rank: int
    work: Work
    build: Callable[[Place, GpuTarget, int], Repetitions]
    goal: str | None = None
    baseline: Callable[[Place, int], Calls] | None = None
    invariant: Callable[[Place, GpuTarget, int], Repetitions] | None = None
    input_bytes: float = 0.0

    def run(self, place: Place, target: GpuTarget, ceilings: dict[str, float]) -> dict[str, Any]:
        """Return figures; raises where inputs do not fit this GPU or a kernel fails."""
        card = torch.cuda.get_device_properties(0)
        if self.input_bytes > _MOST_MEMORY * card.total_memory:
            raise LeftOut(f"inputs of {self.input_bytes / 1e9:.0f} GB do not fit")
        floor = self.work.seconds_at(ceilings["copy_bytes_per_second"], ceilings["matrix_flops_per_second"])
        number = max(repeats_for(floor), min(_MOST_COLD, math.ceil(2 * card.L2_cache_size / self.work.bytes)))
        seconds = graph_seconds(self.build(place, target, number))
        figures: dict[str, Any] = share_figures(self.work.bytes, self.work.flops, seconds, ceilings)
        figures["goal"] = self.goal
        if self.invariant is not None:
            figures["invariant_us"] = graph_seconds(self.invariant(place, target, number)) * 1e6
        if self.baseline is not None:
            try:
                figures["torch_us"] = callable_seconds(self.baseline(place, number)) * 1e6
            except Exception as error:  # what torch cannot do here says nothing of us
                figures["torch_error"] = f"{type(error).__name__}: {error}"[:200]
        return figures

    def launches(self, target: GpuTarget) -> list[Launch]:
        """Return what would be launched, over tensors without memory."""
        place = Place(device=torch.device("meta"))
        built = [*self.build(place, target, 1)]
        if self.invariant is not None:
            built += self.invariant(place, target, 1)
        return [launch for launches in built for launch in launches]


class _Held:
    """Experts of the last model: 12 GB are not made anew for each number of tokens."""

    def __init__(self) -> None:
        self._key: tuple[str, str] | None = None
        self._weights: ExpertWeights | None = None

    def __call__(self, model: str, format_name: str, place: Place) -> ExpertWeights:
        key = (model, format_name)
        shapes = shapes_of(published_config(model), [format_name])
        if place.holds_nothing:
            return random_experts(shapes, format_name, place)
        if self._key != key or self._weights is None:
            self._weights = None  # before others take its place
            self._key, self._weights = key, random_experts(shapes, format_name, place)
        return self._weights


held_experts = _Held()


def _rows(model: str, tokens: int, place: Place) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return x [T, D], and of choices at random which row of x each sorted one is, and how many there are of a slot."""
    config = published_config(model)
    routing = shapes_of(config, []).routing
    ids = random_choices(tokens, routing.num_experts, routing.top_k, place)
    return place.randn(tokens, config.hidden_size), *sorted_by_slot(ids, routing.num_experts, place)


def _expert_launches(
    model: str, format_name: str, tokens: int, invariant: bool, place: Place, target: GpuTarget, number: int
) -> Repetitions:
    weights, shapes = held_experts(model, format_name, place), shapes_of(published_config(model), [format_name])
    made = []
    for _ in range(number):
        x, row_tokens, counts = _rows(model, tokens, place)
        made.append(
            ffn_launches(
                x,
                counts,
                weights,
                shapes.activation,
                kernels=GpuKernels(target=target, batch_invariant=invariant),
                row_tokens=row_tokens,
            )[0]
        )
    return made


def _grouped_mm(model: str, tokens: int, place: Place, number: int) -> Calls:
    """torch's grouped product, twice, with the activation between; rows are sorted beforehand."""
    weights = held_experts(model, "bf16", place)
    assert isinstance(weights.w13, torch.Tensor) and isinstance(weights.w2, torch.Tensor)
    w13, w2 = weights.w13.transpose(1, 2), weights.w2.transpose(1, 2)

    def call(rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        gate, up = torch._grouped_mm(rows, w13, offs=ends).chunk(2, -1)
        return torch._grouped_mm(F.silu(gate).mul_(up), w2, offs=ends)

    calls = []
    for _ in range(number):
        x, row_tokens, counts = _rows(model, tokens, place)
        calls.append(partial(call, x[row_tokens.long()], counts.cumsum(0).to(torch.int32)))
    return calls


def expert_speeds() -> Iterator[Speed]:
    """Yield grouped products of all models and formats, a model's one after the other."""
    first = ("qwen3-30b-a3b", "deepseek-v3", "gpt-oss-120b")
    for place, model in enumerate((*first, *(name for name in MODELS if name not in first))):
        for format_name in MODELS[model]:
            for tokens in _TOKENS:
                shapes = shapes_of(published_config(model), [format_name])
                routing, plain = shapes.routing, format_name == "bf16"
                work = layer_work(shapes, tokens, format_name)["experts"]
                hit = hit_experts(tokens, routing.num_experts, routing.top_k)
                build = partial(_expert_launches, model, format_name, tokens)
                yield Speed(
                    name=f"experts {format_name}, {model}, {tokens} tokens",
                    rank=10 * place + (0 if format_name == MODELS[model][0] else 5),
                    work=work,
                    build=partial(build, False),
                    goal=experts_goal(tokens, hit, bound_by_memory=work.is_bound_by_memory(_H200)),
                    baseline=partial(_grouped_mm, model, tokens) if plain and not shapes.has_biases else None,
                    invariant=partial(build, True) if plain or tokens in _INVARIANT_TOKENS else None,
                    input_bytes=routing.num_experts * shapes.experts(format_name).bytes_per_slot,
                )


def _attention(
    model: str,
    kv: str,
    group_number: int,
    runs: Sequence[tuple[int, int]],
    place: Place,
    target: GpuTarget,
    number: int,
) -> Repetitions:
    config = published_config(model)
    group = groups_of(config, kv)[group_number]
    own = sum(-(-(before + rows) // BLOCK_SIZE) for before, rows in runs)
    blocks = max(own, int(_COLD_BYTES / group.bytes_per_token()) // BLOCK_SIZE)
    attended = random_storage(config, group, blocks * BLOCK_SIZE, place)
    num_rows, num_decodes = sum(rows for _, rows in runs), sum(rows == 1 for _, rows in runs)
    made = []
    for seed in range(number):
        q = place.randn(num_rows, config.num_heads, group.head_dim)
        out = q.new_empty(num_rows, config.num_heads, group.value_dim)
        step = step_of(runs, num_decodes, blocks, place, seed=seed)
        made.append(list(attention_launches(q, out, attended.storage, attended.layer, step, attended.options, target)))
    return made


def _sdpa(model: str, sequences: int, rows: int, context: int, place: Place, number: int) -> Calls:
    """torch over K and V that lie in one piece: one row each behind `context`, or a prompt of `context` rows."""
    config = published_config(model)
    shape = (sequences, config.num_kv_heads, context, config.head_dim)
    copies = max(1, min(number, int(_COLD_BYTES / (2 * 2 * shape[0] * shape[1] * shape[2] * shape[3]))))
    kept = [(place.randn(*shape), place.randn(*shape)) for _ in range(copies)]
    q = place.randn(sequences, config.num_heads, rows, config.head_dim)
    return [
        partial(F.scaled_dot_product_attention, q, *kept[i % copies], is_causal=rows > 1, enable_gqa=True)
        for i in range(number)
    ]


def attention_speeds() -> Iterator[Speed]:
    """Yield decode and prefill: all sizes of one model, and some of the others and of other formats of KV."""
    first = "qwen3-30b-a3b"
    for model in (first, *(name for name in MODELS if name != first)):
        for kv in KV:
            most = len(_DECODES) if (model, kv) == (first, "bf16") else 3 if model == first else 1
            for number, group in enumerate(groups_of(published_config(model), kv)):
                rows = AttentionRows(group=group, num_heads=published_config(model).num_heads)
                of = f"over {kv}, {model}, {group.kind}"
                plain = kv == "bf16" and group.kind == "full"
                for i, (sequences, context) in enumerate(_DECODES[:most]):
                    work = rows.decode(sequences, context)
                    held = sequences * context * group.bytes_per_token()
                    goal = decode_attention_goal(sequences, context)
                    yield Speed(
                        name=f"decode attention {of}, {sequences} x {context}",
                        rank=(2 if model == first else 12) + 10 * (i > 2),
                        work=work,
                        build=partial(_attention, model, kv, number, [(context - 1, 1)] * sequences),
                        goal=None if group.window else goal,
                        baseline=partial(_sdpa, model, sequences, 1, context)
                        if plain and held < _MOST_BASELINE_BYTES
                        else None,
                        input_bytes=max(held, _COLD_BYTES),
                    )
                for before, new in _PREFILLS:
                    if kv != "bf16" and (model != first or before):
                        continue
                    yield Speed(
                        name=f"prefill attention {of}, {new} rows behind {before}",
                        rank=3 if model == first else 13,
                        work=rows.work([(before, new)]),
                        build=_few(partial(_attention, model, kv, number, [(before, new)])),
                        goal=None if group.window else "prefill attention",
                        baseline=partial(_sdpa, model, 1, new, new) if plain and not before else None,
                    )


def _few(build: Callable[[Place, GpuTarget, int], Repetitions]) -> Callable[[Place, GpuTarget, int], Repetitions]:
    return lambda place, target, number: build(place, target, min(number, _MOST_REPEATS))
