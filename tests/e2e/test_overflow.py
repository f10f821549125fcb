"""An expert whose numbers leave the range of fp16, or of bf16, in a batch that mostly does not meet it (P-EP-07)."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch

from tests.support.fixtures import checkpoint, copy_checkpoint, random_prompt, reference_model, rewrite_tensors
from tests.support.harness import Outcome, generate, greedy
from tests.support.native import needs_native
from tests.support.numerics import assert_same
from tests.support.setups import Setup

pytestmark = needs_native
LARGEST_FP16 = 65504.0
PROMPTS = [random_prompt(2, seed=seed) for seed in range(4)]
MAX_TOKENS = 3
LOUD = 2.0**20
# Gates and products of 2 ** 60, outputs beyond 2 ** 200.
OVERFLOWING = {"w1": 2.0**60, "w3": 2.0**60, "w2": 2.0**100}


def run(path: Path, quantization: str, chosen: list[int], topology: str = "EP1DP1") -> list[Outcome]:
    setup = Setup(dtype="bfloat16", quantization=quantization, topology=topology)
    prompts = [PROMPTS[i] for i in chosen]
    return generate(path, prompts, setup=setup, params=greedy(MAX_TOKENS)).outcomes


@cache
def quiet(quantization: str) -> tuple[list[Outcome], int, int, int]:
    """Return what becomes of each request alone, and a layer and an expert that just one of them meets, and which."""
    outcomes, met = [], []
    for prompt in PROMPTS:
        done = generate(
            checkpoint("T-MIX"),
            [prompt],
            setup=Setup(dtype="bfloat16", quantization=quantization),
            params=greedy(MAX_TOKENS),
        )
        outcomes += done.outcomes
        met.append(torch.from_numpy(done.groups[0].rows_per_expert() > 0))
    layer, expert = (torch.stack(met).sum(0) == 1).nonzero()[0].tolist()
    (owner,) = (i for i, seen in enumerate(met) if seen[layer, expert])
    return outcomes, layer, expert, owner


def scaled(quantization: str, factors: dict[str, float]) -> Path:
    """Return a copy of T-MIX with the matrices of that expert multiplied by powers of two."""
    _, layer, expert, _ = quiet(quantization)
    names = {f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{m}.weight": f for m, f in factors.items()}

    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        assert names.keys() <= tensors.keys()
        return {name: tensor * names.get(name, 1.0) for name, tensor in tensors.items()}

    return rewrite_tensors(copy_checkpoint(checkpoint("T-MIX")), change)


def assert_others_are_as_alone(outcomes: list[Outcome], quantization: str) -> None:
    expected, _, _, owner = quiet(quantization)
    for i, (ours, alone) in enumerate(zip(outcomes, expected, strict=True)):
        if i != owner:
            assert (ours.finish_reason, ours.tokens) == ("length", alone.tokens)
            assert_same(ours.logits_of_all(), alone.logits_of_all())


@pytest.mark.parametrize("topology", ["EP1DP1", "EP2DP1", "EP4DP1"])
@pytest.mark.parametrize("quantization", ["int4", pytest.param("int8", marks=pytest.mark.slow)])
def test_an_expert_beyond_the_range_of_fp16_stays_finite_and_by_itself(quantization: str, topology: str) -> None:
    path = scaled(quantization, {"w2": LOUD})
    outcomes = run(path, quantization, [0, 1, 2, 3], topology)
    assert_others_are_as_alone(outcomes, quantization)
    expected, layer, _, owner = quiet(quantization)
    own = outcomes[owner]
    assert own.finish_reason == "length" and own.logits_of_all().isfinite().all()
    assert not torch.equal(own.logits_of_all(), expected[owner].logits_of_all())
    (alone,) = run(path, quantization, [owner])
    assert own.tokens == alone.tokens
    assert_same(own.logits_of_all(), alone.logits_of_all())

    seen: list[float] = []
    model = reference_model(path)
    hook = model.model.layers[layer].register_forward_hook(lambda *call: seen.append(float(call[2].abs().max())))
    with torch.no_grad():
        model(input_ids=torch.tensor([PROMPTS[owner] + own.tokens[:-1]]))
    hook.remove()
    assert max(seen) > LARGEST_FP16


@pytest.mark.parametrize("topology", ["EP1DP1", "EP2DP1"])
@pytest.mark.parametrize("quantization", ["int4", pytest.param("int8", marks=pytest.mark.slow)])
def test_an_expert_beyond_the_range_of_bf16_fails_only_the_request_that_meets_it(
    quantization: str, topology: str
) -> None:
    outcomes = run(scaled(quantization, OVERFLOWING), quantization, [0, 1, 2, 3], topology)
    assert_others_are_as_alone(outcomes, quantization)
    *_, owner = quiet(quantization)
    assert outcomes[owner].finish_reason == "error" and "not finite" in str(outcomes[owner].error)
