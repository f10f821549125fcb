"""Every family, topology and chunk size against transformers in fp32: logits within 1e-4, 16 greedy tokens equal."""

import pytest

from tests.support.comparison import compare_with_reference
from tests.support.fixtures import DENSE_FIXTURES, MOE_FIXTURES, checkpoint, random_prompt
from tests.support.harness import generate, greedy
from tests.support.numerics import LOGITS_AGAINST_REFERENCE
from tests.support.setups import Setup

TOPOLOGIES = ("EP1DP1", "EP2DP1", "EP4DP1", "EP2DP2", "EP4DP2")
CHUNKS = (1, 7, 512)
MIXED_LENGTHS = (33, 1, 17, 50, 5, 34, 2, 9)
TIGHT_LENGTHS = (20, 9, 14)  # for each rank
TIGHT = {"num_blocks": 26, "block_size": 2}  # two such sequences end, three do not fit

FAMILIES = [(name, topology) for name in MOE_FIXTURES for topology in TOPOLOGIES]
FAMILIES += [(name, topology) for name in DENSE_FIXTURES for topology in ("EP1DP1", "EP1DP2")]
MATRIX = [(name, topology, chunk) for name, topology in FAMILIES for chunk in CHUNKS]
# The default run: every family on one rank and on several, every topology and chunk size with some family.
QUICK = {
    ("T-MIX", "EP1DP1", 7),
    ("T-MIX", "EP4DP2", 512),
    ("T-QW2", "EP1DP1", 512),
    ("T-QW2", "EP2DP1", 7),
    ("T-QW3", "EP1DP1", 1),
    ("T-QW3", "EP4DP1", 7),
    ("T-OLM", "EP1DP1", 512),
    ("T-OLM", "EP2DP2", 1),
    ("T-GLM-demo", "EP1DP1", 512),
    ("T-GLM-demo", "EP2DP1", 7),
    ("T-LLA", "EP1DP1", 7),
    ("T-QWD", "EP1DP2", 512),
}
CASES = [
    pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow, id="-".join(map(str, case))) for case in MATRIX
]


def num_ranks(topology):
    return int(topology[2]) * int(topology[5])


def setup_of(topology, chunk, **changes):
    return Setup(topology=topology, max_chunk_tokens=chunk, **changes)


@pytest.mark.parametrize(("name", "topology", "chunk"), CASES)
def test_one_request_alone_equals_transformers(name, topology, chunk):
    path = checkpoint(name)
    run = generate(path, [random_prompt(33)], setup=setup_of(topology, chunk), params=greedy(16))
    compare_with_reference(path, run.outcomes[0])
    assert len(run.outcomes[0].tokens) == 16


@pytest.mark.parametrize(("name", "topology", "chunk"), CASES)
def test_a_batch_of_unequal_lengths_equals_transformers(name, topology, chunk):
    path = checkpoint(name)
    prompts = [random_prompt(length, seed=length) for length in MIXED_LENGTHS]
    run = generate(path, prompts, setup=setup_of(topology, chunk), params=greedy(16))
    for outcome in run.outcomes:
        compare_with_reference(path, outcome)
        assert len(outcome.tokens) == 16


@pytest.mark.parametrize(("name", "topology", "chunk"), CASES)
def test_preempted_requests_equal_transformers(name, topology, chunk):
    path = checkpoint(name)
    prompts = [random_prompt(length, seed=i) for i, length in enumerate(TIGHT_LENGTHS * num_ranks(topology))]
    run = generate(path, prompts, setup=setup_of(topology, chunk, **TIGHT), params=greedy(16))
    assert run.num_preemptions > 0
    for outcome in run.outcomes:
        compare_with_reference(path, outcome)
        assert len(outcome.tokens) == 16
        assert outcome.drift <= LOGITS_AGAINST_REFERENCE
