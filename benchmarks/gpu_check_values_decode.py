"""Stage 1 of gpu_check, what steps of few rows run in place of several launches: router, choice with sorting, sums.

The launches that do it one by one are in gpu_check_values.py. Letters: T tokens, K top-k, E experts, S slots, D width.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.gpu_check_inputs import Place, shapes_of
from benchmarks.gpu_check_values import Case, Errors, Made, near, random_expert_rows, same, same_order, summed64
from moewe.models.kernels.norm import norm_launch
from moewe.moe.kernels.route import route_launch
from moewe.moe.kernels.route_permute import route_permute_launch
from moewe.moe.kernels.router import router_launch
from moewe.moe.kernels.row_tiles import empty_tiles
from moewe.moe.routing.reference import route_reference
from moewe.native.gpu import GpuTarget
from tests.support.numerics import ROUTING_WEIGHTS
from tests.support.routed import tiles_reference

_BLOCK_M = 16
_FEW = 4  # rows, of which none may choose otherwise
_ROUTED = (
    ("qwen3-30b-a3b", (1, 16)),
    ("deepseek-v3", (1, 13)),
    ("mixtral-8x7b", (1, 40)),
    ("gpt-oss-120b", (1, 32)),
    ("glm-4.5", (1, 16)),
)


def _router(model: str, tokens: int, place: Place, target: GpuTarget) -> Made:
    shapes = shapes_of(place.config(model), [])
    x = place.randn(tokens, shapes.width)
    weight = torch.randn(shapes.routing.num_experts, shapes.width, device=place.device) * shapes.width**-0.5
    bias = torch.randn(shapes.routing.num_experts, device=place.device)
    launch, logits = router_launch(x, weight, bias)

    def compare() -> Errors:
        return near(logits, x.double() @ weight.double().T + bias.double(), "float32")

    return Made(launches=[launch], compare=compare)


def _route_permute(model: str, tokens: int, place: Place, target: GpuTarget) -> Made:
    """Choices like the reference's but for near-ties; order, counts and tiles like those of the choices made."""
    shapes = shapes_of(place.config(model), [])
    routing, device = shapes.routing, place.device
    logits = torch.randn(tokens, routing.num_experts, device=device)
    bias = torch.randn(routing.num_experts, device=device) * 0.1 if shapes.has_selection_bias else None
    slot_of = torch.randperm(routing.num_experts + 1, device=device).to(torch.int32) - 1  # one has none
    num_slots, num_filled = routing.num_experts, max(1, tokens - 2)
    filled = torch.full((1,), num_filled, dtype=torch.int64, device=device)
    counts = torch.empty(num_slots, dtype=torch.int64, device=device)
    cut = empty_tiles(tokens * routing.top_k, num_slots, _BLOCK_M, counts.device)
    launch, (chosen, permuted) = route_permute_launch(
        logits, routing, bias, slot_of, counts=counts, cut=cut, num_filled=filled
    )

    def compare() -> Errors:
        want = route_reference(logits.cpu(), routing, None if bias is None else bias.cpu())
        ids, weights = chosen.topk_ids.cpu(), chosen.topk_weights.cpu()
        agreed = (ids == want.topk_ids).all(-1)
        if int((~agreed).sum()) > 1:
            raise AssertionError(f"{int((~agreed).sum())} of {tokens} tokens chose other experts")
        slots = slot_of.cpu()[ids.long()]
        slots[num_filled:] = -1
        same_order(permuted, slots.to(device), num_slots)
        wanted = torch.tensor(tiles_reference(counts.tolist(), _BLOCK_M)).view(-1, 3)
        same(cut.tiles[: int(cut.num_tiles)].cpu(), wanted, "tiles")
        same(cut.tiles[int(cut.num_tiles) :, 0].cpu(), torch.tensor(-1), "tiles behind the last")
        error = float((weights - want.topk_weights)[agreed].abs().max()) if bool(agreed.any()) else 0.0
        if error > ROUTING_WEIGHTS * routing.scaling_factor:
            raise AssertionError(f"a weight is {error:.1e} off")
        return {"max_error": error}

    return Made(launches=[launch], compare=compare)


def _norm(model: str, tokens: int, place: Place, target: GpuTarget) -> Made:
    """The norm that adds outputs of experts up on the way."""
    shapes = shapes_of(place.config(model), [])
    width, top_k = shapes.width, shapes.routing.top_k
    x, weight = place.randn(tokens, width, scale=3), place.randn(width)
    experts = random_expert_rows(tokens, top_k, width, place)
    stream, out = x.clone(), torch.empty_like(x)
    launch = norm_launch(stream, weight, eps=1e-6, added=experts, multiplier=1.0, out=out)

    def compare() -> Errors:
        total = x.double() + summed64(experts)
        near(stream, total, "bfloat16", "bfloat16")
        return near(out, F.rms_norm(total, (width,), weight.double(), 1e-6), "bfloat16", "bfloat16")

    return Made(launches=[launch], compare=compare)


def _near_ties(tokens: int, place: Place, target: GpuTarget) -> Made:
    """Of routers whose rows are pairs 1e-3 apart, torch's product of many rows and the kernel's of few choose the same.

    Torch must not cut fp32 to tf32, and sums of both must be good enough for 99.9 % of the tokens.
    """
    shapes = shapes_of(place.config("deepseek-v3"), [])
    routing, width = shapes.routing, shapes.width
    x = place.randn(tokens, width)
    pairs = torch.randn(routing.num_experts // 2, width, device=place.device).repeat_interleave(2, 0)
    weight = ((pairs + 1e-3 * torch.randn(pairs.shape, device=place.device)) * width**-0.5).contiguous()
    bias = torch.randn(routing.num_experts // 2, device=place.device).repeat_interleave(2) * 0.1  # sets no pair apart
    product, few = router_launch(x[:_FEW], weight, None)
    many = torch.empty(tokens, routing.num_experts, device=place.device)
    if place.device.type != "meta":
        torch.mm(x.float(), weight.T, out=many)
    routes = [route_launch(logits, routing, bias) for logits in (many, few)]

    def compare() -> Errors:
        exact = x.double().cpu() @ weight.double().cpu().T
        want = route_reference(exact, routing, bias.cpu()).topk_ids.sort(-1).values
        shares = []
        for launched, wanted, allowed in ((routes[0], want, tokens // 1000), (routes[1], want[:_FEW], 0)):
            other = (launched[1].topk_ids.cpu().sort(-1).values != wanted).any(-1)
            if int(other.sum()) > allowed:
                raise AssertionError(f"{int(other.sum())} of {len(wanted)} tokens chose other experts, {allowed} may")
            shares.append(float(other.float().mean()))
        return {"max_error": max(shares)}

    return Made(launches=[product, *(route[0] for route in routes)], compare=compare)


def decode_cases(*, small: bool) -> Iterator[Case]:
    """Yield the cases of this file."""
    for model, sizes in _ROUTED:
        for tokens in sizes:
            yield Case(
                name=f"route and permute, {model}, {tokens} tokens", rank=1, make=partial(_route_permute, model, tokens)
            )
    yield Case(name="routers with near-ties", rank=1, make=partial(_near_ties, 24 if small else 4096))
    for model in ("qwen3-30b-a3b", "deepseek-v3"):
        tokens = 3 if small else 16
        yield Case(name=f"router, {model}", rank=1, make=partial(_router, model, tokens))
        yield Case(name=f"norm that adds experts, {model}", rank=1, make=partial(_norm, model, tokens))
