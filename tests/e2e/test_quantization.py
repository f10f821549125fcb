"""`quantization=int8|int4`: one answer whatever happens around a request and on any topology."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.fixtures import checkpoint, random_prompt
from tests.support.harness import generate, greedy
from tests.support.native import needs_native
from tests.support.numerics import assert_same
from tests.support.setups import Setup

pytestmark = needs_native
PROMPTS = [random_prompt(length, seed=length) for length in (1, 5, 40, 23, 64, 17)]


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("name", ["T-MIX", "T-DS3"])
def test_bits_do_not_depend_on_the_company(name: str, quantization: str) -> None:
    path, setup = checkpoint(name), Setup(dtype="bfloat16", quantization=quantization)
    alone = generate(path, PROMPTS, setup=setup, params=greedy(8), one_by_one=True)
    others = [
        setup,
        replace(setup, topology="EP2DP1"),
        replace(setup, topology="EP4DP1"),
        replace(setup, max_chunk_tokens=7),
        replace(setup, num_blocks=12, max_chunk_tokens=16),
    ]
    for other in others:
        run = generate(path, PROMPTS, setup=other, params=greedy(8))
        for ours, theirs in zip(run.outcomes, alone.outcomes, strict=True):
            assert ours.tokens == theirs.tokens
            assert_same(ours.logits_of_all(), theirs.logits_of_all())


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_answers_stay_near_those_of_bf16(quantization: str) -> None:
    path, setup = checkpoint("T-MIX"), Setup(dtype="bfloat16")
    plain = generate(path, PROMPTS, setup=setup, params=greedy(1)).outcomes
    held = generate(path, PROMPTS, setup=replace(setup, quantization=quantization), params=greedy(1)).outcomes
    for ours, theirs in zip(held, plain, strict=True):
        a, b = ours.logits_of_all().double(), theirs.logits_of_all().double()
        # Random weights: where two experts are nearly as good, the other one is taken, and the row goes another way.
        least = 0.95 if quantization == "int8" else 0.75
        assert torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1] > least
        assert (a != b).any()
