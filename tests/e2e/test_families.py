"""Every family, topology and chunk size against transformers in fp32: logits within 1e-4, 16 equal greedy tokens."""

import pytest
import torch

from tests.support.comparison import compare_half_precision, compare_with_reference
from tests.support.fixtures import DENSE_FIXTURES, FIXTURES, MOE_FIXTURES, checkpoint, random_prompt
from tests.support.harness import generate, greedy
from tests.support.matrix import of_each, parameters
from tests.support.setups import Setup

MIXED_LENGTHS = (33, 1, 17, 50, 5, 34, 2, 9)


@pytest.mark.parametrize(("name", "topology", "chunk"), parameters())
def test_one_request_alone_and_a_batch_of_unequal_lengths_equal_transformers(name, topology, chunk):
    path = checkpoint(name)
    prompts = [random_prompt(33), *(random_prompt(length, seed=length) for length in MIXED_LENGTHS)]
    setup = Setup(topology=topology, max_chunk_tokens=chunk)
    run = generate(path, prompts, setup=setup, params=greedy(16), num_alone=1)
    for outcome in run.outcomes:
        compare_with_reference(path, outcome)
        assert len(outcome.tokens) == 16


# --- P-LOAD-05 --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", of_each(MOE_FIXTURES))
def test_both_layouts_of_experts_give_the_same_bits(name):
    """As published, one tensor an expert in most families; and as transformers stacks them."""
    folders = [checkpoint(name, stacked=stacked) for stacked in (False, True)]
    single, stacked = (
        generate(folder, [random_prompt(33)], setup=Setup(topology="EP2DP1"), params=greedy(2)).outcomes[0]
        for folder in folders
    )
    assert single.tokens == stacked.tokens
    assert torch.equal(single.logits_of_all(), stacked.logits_of_all())


# --- a number format of two bytes -------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", of_each(FIXTURES))
def test_bf16_is_as_close_to_fp32_as_transformers_in_bf16(name):  # P-LOAD-06
    path, prompt = checkpoint(name, dtype="bfloat16"), random_prompt(48)
    setup = Setup(topology="EP1DP1" if name in DENSE_FIXTURES else "EP2DP1", dtype="bfloat16", max_chunk_tokens=7)
    outcome = generate(path, [prompt], setup=setup, params=greedy(1)).outcomes[0]
    compare_half_precision(path, outcome.logits_of_all(), prompt)
