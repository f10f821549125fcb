"""KV in fp8 and int8 in the whole runtime: near answers, exact bytes, and latent attention in any company.

tests/e2e/test_bitwise.py has the same bits for heads of K and V, in every format.
"""

from __future__ import annotations

import pytest
import torch

from moewe.models.footprint import cache_groups
from moewe.quant import KV_FORMATS
from moewe.telemetry import COMPONENTS
from tests.support.fixtures import checkpoint, random_prompt
from tests.support.harness import Group, generate, greedy
from tests.support.native import needs_native
from tests.support.numerics import LOGITS_WITH_SCALED_KV, assert_same
from tests.support.setups import Setup

BOTH = sorted(KV_FORMATS)


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """Return the rms error of each row over the rms of the row."""
    return (ours - theirs).pow(2).mean(-1).sqrt() / theirs.pow(2).mean(-1).sqrt()


@pytest.mark.parametrize("name", BOTH)
def test_logits_stay_near_those_of_fp32_at_token_200(name: str) -> None:  # P-KVQ-01
    path, prompts = checkpoint("T-QW3"), [random_prompt(200)]
    exact = generate(path, prompts, params=greedy(1)).outcomes[0].logits_of_all()
    held = generate(path, prompts, setup=Setup(kv_cache_dtype=name), params=greedy(1)).outcomes[0].logits_of_all()
    errors = relative_error(held, exact)
    assert 0 < errors[-1] < LOGITS_WITH_SCALED_KV[name]


@needs_native
@pytest.mark.parametrize("name", BOTH)
def test_latents_give_the_same_bits_in_any_company(name: str) -> None:
    path, prompts = checkpoint("T-DS3"), [random_prompt(length, seed=length) for length in (40, 5, 23)]
    plain = Setup(dtype="bfloat16", kv_cache_dtype=name)
    alone = generate(path, prompts, setup=plain, params=greedy(6), one_by_one=True)
    for setup in (
        Setup(dtype="bfloat16", kv_cache_dtype=name, topology="EP2DP1", max_chunk_tokens=7),
        Setup(dtype="bfloat16", kv_cache_dtype=name, num_blocks=20, block_size=4, max_chunk_tokens=16),
    ):
        run = generate(path, prompts, setup=setup, params=greedy(6))
        for ours, theirs in zip(run.outcomes, alone.outcomes, strict=True):
            assert ours.tokens == theirs.tokens
            assert_same(ours.logits_of_all(), theirs.logits_of_all())


@pytest.mark.parametrize("name", ["auto", *BOTH])
def test_bytes_of_the_pool_and_of_what_moves_are_exact(name: str) -> None:
    """A prompt of 10 and 3 tokens: 10 rows write and see 10 tokens, then two rows write one each and see 11 and 12."""
    with Group(checkpoint("T-QW3"), Setup(dtype="bfloat16", kv_cache_dtype=name, num_blocks=6)) as group:
        (held,) = cache_groups(group.model, dtype=KV_FORMATS.get(name, "bfloat16"))
        a_token = held.bytes_per_token()
        assert a_token == (512 if name == "auto" else 256 + 8 * 2)
        assert group.allocated[0].kv_bytes == {held.number_format.name: 6 * 16 * a_token}
        group.submit("a", random_prompt(10), greedy(3))
        group.run()
        moved = group.workers[0].counters.bytes_moved.sum(0)[COMPONENTS.index("kv")]
        assert moved == a_token * (10 + 10 + 1 + 11 + 1 + 12)
