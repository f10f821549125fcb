"""Stage 1 of gpu_check: are the values of every kernel right, against fp64 on fresh random inputs?

MoE kernels and rows of logits here, attention in gpu_check_values_attention.py. What is allocated empty holds NaN.
Letters: T tokens, K top-k, E experts, S slots, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.gpu_check_inputs import Place, random_choices, random_experts, shapes_of, sorted_by_slot
from moewe.models.kernels.norm import norm_launch
from moewe.moe.activation import Activation
from moewe.moe.gated import ExpertWeights
from moewe.moe.kernels.combine import ExpertRows, combine_launch
from moewe.moe.kernels.experts import ffn_launches
from moewe.moe.kernels.permute import Permuted, permute_launches
from moewe.moe.kernels.route import route_launch
from moewe.moe.routing.reference import route_reference
from moewe.native.gpu import GpuKernels, GpuTarget, Launch
from moewe.quant import Matrix, QuantTensor
from moewe.runtime.ranks.kernels.rows import draw_launch, logprobs_launch, scan_launch
from tests.support.numerics import LOGPROBS, PROBABILITIES, ROUTING_WEIGHTS, TOLERANCES
from tests.support.poisoned import poisoned_memory

Errors = dict[str, float]
# Tokens whose choice two ways to compute scores in fp32 may decide differently: near-ties, one of some hundreds.
_OTHER_CHOICES = 5e-3


@dataclass(frozen=True, kw_only=True)
class Made:
    """Launches over inputs, and what compares what they left with what is right; raises AssertionError."""

    launches: Sequence[Launch]
    compare: Callable[[], Errors]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One kernel on one kind of input; `rank` is how early it shall be tried."""

    name: str
    rank: int
    make: Callable[[Place, GpuTarget], Made]

    def run(self, place: Place, target: GpuTarget) -> dict[str, Any]:
        """Return the errors; raises AssertionError where they are too large."""
        with poisoned_memory():
            made = self.make(place, target)
        for launch in made.launches:
            launch.run()
        return {"said": "right", **made.compare()}


def near(actual: torch.Tensor, expected: torch.Tensor, *formats: str) -> Errors:
    """Return the relative errors of `actual` from fp64; raises where they exceed what roundings in `formats` allow."""
    actual = actual.double()
    if not bool(actual.isfinite().all()):
        raise AssertionError(f"{int((~actual.isfinite()).sum())} of {actual.numel()} numbers are not finite")
    error = (actual - expected).abs()
    largest = float(error.max()) / max(float(expected.abs().max()), 1e-30)
    rms = float(error.pow(2).mean().sqrt()) / max(float(expected.pow(2).mean().sqrt()), 1e-30)
    most, most_rms = (sum(getattr(TOLERANCES[name], part) for name in formats) for part in ("max", "rms"))
    if largest > most or rms > most_rms:
        raise AssertionError(f"relative error {largest:.1e} (allowed {most:.1e}), rms {rms:.1e} ({most_rms:.1e})")
    return {"max_error": largest, "rms_error": rms}


def same(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Raise AssertionError unless whole numbers are equal."""
    wrong = int((actual.long() != expected.long()).sum())
    if wrong:
        raise AssertionError(f"{wrong} of {expected.numel()} {what} differ")


def ffn64(rows: torch.Tensor, counts: list[int], weights: ExpertWeights, activation: Activation) -> torch.Tensor:
    """Return [M, D] f64: rows, sorted by slot, through the experts of their slots, nothing rounded."""
    out, at = torch.zeros(rows.shape, dtype=torch.float64, device=rows.device), 0
    for slot, count in enumerate(counts):
        own = slice(at, at + count)
        if count:
            gate, up = _product(rows[own].double(), weights.w13, weights.b13, slot).chunk(2, -1)
            if activation.kind == "clamped":
                gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit) + 1
            alpha = activation.alpha if activation.kind == "clamped" else 1.0
            out[own] = _product(gate * torch.sigmoid(alpha * gate) * up, weights.w2, weights.b2, slot)
        at += count
    return out


def _product(rows: torch.Tensor, stack: Matrix, bias: torch.Tensor | None, slot: int) -> torch.Tensor:
    matrix = stack.select(slot).dequantize(torch.float32) if isinstance(stack, QuantTensor) else stack[slot]
    result = rows @ matrix.double().T
    return result if bias is None else result + bias[slot].double()


def _experts(model: str, format_name: str, tokens: int, invariant: bool, place: Place, target: GpuTarget) -> Made:
    config = place.config(model)
    shapes = shapes_of(config, [format_name], num_experts=4 if place.small else 16)
    weights, x = random_experts(shapes, format_name, place), place.randn(tokens, shapes.width)
    ids = random_choices(tokens, shapes.routing.num_experts, shapes.routing.top_k, place)
    row_tokens, counts = sorted_by_slot(ids, shapes.routing.num_experts, place)
    launches, out = ffn_launches(
        x,
        counts,
        weights,
        shapes.activation,
        kernels=GpuKernels(target=target, batch_invariant=invariant),
        row_tokens=row_tokens,
    )

    def compare() -> Errors:
        return near(out, ffn64(x[row_tokens.long()], counts.tolist(), weights, shapes.activation), "bfloat16")

    return Made(launches=launches, compare=compare)


def _alone(format_name: str, model: str, place: Place, target: GpuTarget) -> Made:
    """Rows in fixed tiles: the first tokens by themselves must come out with the bits that they have among others."""
    shapes = shapes_of(place.config(model), [format_name], num_experts=4 if place.small else 16)
    routing, few, tokens = shapes.routing, 3, 6 if place.small else 400
    weights, x = random_experts(shapes, format_name, place), place.randn(tokens, shapes.width)
    ids = random_choices(tokens, routing.num_experts, routing.top_k, place)

    def launched(own: torch.Tensor) -> tuple[list[Launch], torch.Tensor]:
        row_tokens, counts = sorted_by_slot(own, routing.num_experts, place)
        return ffn_launches(
            x,
            counts,
            weights,
            shapes.activation,
            kernels=GpuKernels(target=target, batch_invariant=True),
            row_tokens=row_tokens,
        )

    (together, among), (by_themselves, alone) = launched(ids), launched(ids[:few])

    def compare() -> Errors:
        places = [own.flatten().argsort(stable=True).argsort() for own in (ids, ids[:few])]
        chosen = few * routing.top_k
        same(among[places[0][:chosen]].view(torch.int16), alone[places[1]].view(torch.int16), "numbers of rows alone")
        return {}

    return Made(launches=[*together, *by_themselves], compare=compare)


def _route(model: str, tokens: int, place: Place, target: GpuTarget) -> Made:
    shapes = shapes_of(place.config(model), [])
    routing = shapes.routing
    logits = torch.randn(tokens, routing.num_experts, device=place.device)
    bias = torch.randn(routing.num_experts, device=place.device) * 0.1 if shapes.has_selection_bias else None
    slot_of = torch.randperm(routing.num_experts, device=place.device).to(torch.int32)
    filled = torch.full((1,), tokens - 3, dtype=torch.int64, device=place.device)
    launch, chosen, slots = route_launch(logits, routing, bias, slot_of, filled)

    def compare() -> Errors:
        want = route_reference(logits.cpu(), routing, None if bias is None else bias.cpu())
        ids, weights = chosen.topk_ids.cpu(), chosen.topk_weights.cpu()
        wrong = float((ids.sort(-1).values != want.topk_ids.sort(-1).values).any(-1).float().mean())
        if wrong > _OTHER_CHOICES:
            raise AssertionError(f"{wrong:.2%} of the tokens chose other experts")
        agreed = (ids == want.topk_ids).all(-1)
        error = float((weights - want.topk_weights)[agreed].abs().max())
        if error > ROUTING_WEIGHTS * routing.scaling_factor:
            raise AssertionError(f"a weight is {error:.1e} off")
        wanted = slot_of[chosen.topk_ids.long()]
        wanted[int(filled) :] = -1
        same(slots, wanted, "slots")
        return {"max_error": error}

    return Made(launches=[launch], compare=compare)


def same_order(permuted: Permuted, slot_ids: torch.Tensor, num_slots: int) -> None:
    """Raise AssertionError unless choices [T, K] are sorted by slot, those of one slot in order, and counted."""
    flat = slot_ids.flatten().long()
    kept = flat.where(flat >= 0, torch.full_like(flat, num_slots)).argsort(stable=True)[: int((flat >= 0).sum())]
    rows = torch.full_like(flat, -1)
    rows[kept] = torch.arange(len(kept), device=flat.device)
    same(permuted.rows.flatten(), rows, "rows")
    same(permuted.row_tokens[: len(kept)], kept // slot_ids.shape[1], "tokens")
    same(permuted.tokens_per_slot, (flat[:, None] == torch.arange(num_slots, device=flat.device)).sum(0), "counts")


def _permute(tokens: int, place: Place, target: GpuTarget) -> Made:
    num_slots, top_k = (16, 4) if place.small else (128, 8)
    ids = random_choices(tokens, num_slots, top_k, place)
    ids[::7, 0] = -1
    launches, permuted = permute_launches(ids, num_slots)

    def compare() -> Errors:
        same_order(permuted, ids, num_slots)
        return {}

    return Made(launches=launches, compare=compare)


def random_expert_rows(tokens: int, top_k: int, width: int, place: Place) -> ExpertRows:
    """Return outputs of experts in any order, some choices dropped, with shared experts."""
    rows, shared = place.randn(tokens * top_k, width), place.randn(tokens, width)
    weights = torch.rand(tokens, top_k, device=place.device)
    row_of = torch.randperm(tokens * top_k, device=place.device).view(tokens, top_k).to(torch.int32)
    row_of[::5, 1] = -1
    return ExpertRows(rows, weights, row_of, shared)


def summed64(experts: ExpertRows) -> torch.Tensor:
    """Return their sum, [T, D] f64, nothing rounded."""
    rows, weights, row_of, shared = experts
    assert shared is not None
    factors = weights.double().where(row_of >= 0, torch.zeros((), dtype=torch.float64, device=rows.device))
    return (rows.double()[row_of.long().clamp(min=0)] * factors[..., None]).sum(1) + shared.double()


def _combine(tokens: int, place: Place, target: GpuTarget) -> Made:
    width, top_k = (72, 4) if place.small else (2880, 8)
    experts = random_expert_rows(tokens, top_k, width, place)
    launch, out = combine_launch(experts)

    def compare() -> Errors:
        return near(out, summed64(experts), "bfloat16")

    return Made(launches=[launch], compare=compare)


def _norm(tokens: int, place: Place, target: GpuTarget) -> Made:
    width = 120 if place.small else 7168
    x, added, weight = place.randn(tokens, width, scale=3), place.randn(tokens, width), place.randn(width)
    stream, out = x.clone(), torch.empty_like(x)
    launch = norm_launch(stream, weight, eps=1e-6, added=added, multiplier=1.0, out=out)

    def compare() -> Errors:
        summed = x.double() + added.double()
        near(stream, summed, "bfloat16")
        return near(out, F.rms_norm(summed, (width,), weight.double(), 1e-6), "bfloat16")

    return Made(launches=[launch], compare=compare)


def _logits(rows: int, place: Place) -> torch.Tensor:
    return torch.randn(rows, 300 if place.small else 151_936, device=place.device) * 3


def _scan(rows: int, place: Place, target: GpuTarget) -> Made:
    logits = _logits(rows, place)
    logits[-1, 5] = torch.nan
    launch, best, finite = scan_launch(logits)

    def compare() -> Errors:
        same(best[:-1], logits[:-1].argmax(-1), "best places")
        same(finite, logits.isfinite().all(-1), "rows that are finite")
        return {}

    return Made(launches=[launch], compare=compare)


def _logprobs(rows: int, place: Place, target: GpuTarget) -> Made:
    logits = _logits(rows, place)
    row_ids = torch.arange(rows, device=place.device)
    tokens = torch.randint(0, logits.shape[1], (rows,), device=place.device)
    launch, chosen, ranks = logprobs_launch(logits, row_ids, tokens, -9999.0)

    def compare() -> Errors:
        own = logits.gather(1, tokens[:, None])
        error = float((chosen - logits.double().log_softmax(-1).gather(1, tokens[:, None])[:, 0]).abs().max())
        if not error <= LOGPROBS:
            raise AssertionError(f"a log-probability is {error:.1e} off")
        same(ranks, (logits >= own).sum(-1), "ranks")
        return {"max_error": error}

    return Made(launches=[launch], compare=compare)


def _draw(rows: int, place: Place, target: GpuTarget) -> Made:
    logits, device = _logits(rows, place), place.device
    number = torch.arange(rows, device=device)
    temperatures = 0.7 + 0.1 * (number % 5).float()
    min_ps, top_ks = 0.001 * (number % 3).float(), 40 * (number % 4)
    top_ps = torch.where(number % 2 == 0, 1.0, 0.8).double()
    chances = torch.rand(rows, dtype=torch.float64, device=device)
    launch, tokens = draw_launch(logits, temperatures, min_ps, top_ks, top_ps, chances)

    def compare() -> Errors:
        worst = 0.0
        for row in range(rows):
            settings = (float(part[row]) for part in (temperatures, min_ps, top_ks, top_ps))
            low, high = interval64(logits[row].double(), int(tokens[row]), *settings)
            worst = max(worst, low - float(chances[row]), float(chances[row]) - high)
            if high <= low or worst > PROBABILITIES:
                raise AssertionError(f"row {row}: chance {float(chances[row]):.7f} is not in [{low:.7f}, {high:.7f})")
        return {"max_error": max(worst, 0.0)}

    return Made(launches=[launch], compare=compare)


def interval64(
    logits: torch.Tensor, token: int, temperature: float, min_p: float, top_k: float, top_p: float
) -> tuple[float, float]:
    """Return where the distribution function of what is kept, in order of ids, stands before `token` and behind it."""
    weights = ((logits - logits.max()) / temperature).exp()
    weights = weights.where(weights >= min_p, torch.zeros_like(weights))
    order = weights.argsort(descending=True, stable=True)
    if top_k > 0:
        order = order[: int(top_k)]
    ranked = weights[order]
    if top_p < 1:
        order = order[(ranked.cumsum(0) - ranked) < top_p * ranked.sum()]
    kept = torch.zeros_like(weights)
    kept[order] = weights[order]
    ends = kept.cumsum(0) / kept.sum()
    return float(ends[token] - kept[token] / kept.sum()), float(ends[token])


# Every format of experts at sizes that take each schedule of tiles; the model names the shape.
_EXPERTS = (
    ("qwen3-30b-a3b", ("bf16", "fp8 128x128", "int4 32", "fp8 channel", "int8 channel", "fp8 tensor")),
    ("gpt-oss-120b", ("mxfp4", "bf16")),
    ("deepseek-v3", ("int4 128", "fp8 128x128")),
)
_SIZES = (1, 48, 2048)  # one row of a few experts, tiles of some rows, tiles of 128
_SMALL_SIZES = (5,)


def moe_cases(*, small: bool) -> Iterator[Case]:
    """Yield the cases of this file."""
    for number, tokens in enumerate(_SMALL_SIZES if small else _SIZES):
        for model, formats in _EXPERTS:
            for format_name in formats:
                name = f"experts {format_name}, {model}, {tokens} tokens"
                yield Case(name=name, rank=number, make=partial(_experts, model, format_name, tokens, False))
    invariant = partial(_experts, "qwen3-30b-a3b", "bf16", 7, True)
    yield Case(name="experts bf16, qwen3-30b-a3b, batch-invariant", rank=1, make=invariant)
    for format_name in ("bf16", "fp8 128x128", "int4 32"):
        name = f"experts {format_name}, rows alone as among others, batch-invariant"
        yield Case(name=name, rank=1, make=partial(_alone, format_name, "qwen3-30b-a3b"))
    many = 6 if small else 512
    for model in ("qwen3-30b-a3b", "deepseek-v3", "mixtral-8x7b", "glm-4.5", "gpt-oss-120b"):
        yield Case(name=f"route, {model}", rank=1, make=partial(_route, model, many))
    for tokens in (9, many):
        yield Case(name=f"permute, {tokens} tokens", rank=1, make=partial(_permute, tokens))
    for name, make, rows in (
        ("combine", _combine, many), ("norm", _norm, many), ("scan", _scan, 3 if small else 64),
        ("logprobs", _logprobs, 3 if small else 64), ("draw", _draw, 3 if small else 64),
    ):  # fmt: skip
        yield Case(name=name, rank=1, make=partial(make, rows))
