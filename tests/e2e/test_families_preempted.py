"""Every family when its requests lose their blocks on the way and begin again: the same answers all the same."""

import pytest

from tests.support.comparison import compare_with_reference
from tests.support.fixtures import checkpoint, random_prompt
from tests.support.harness import generate, greedy
from tests.support.matrix import MATRIX, QUICK, UNLIKE, num_ranks, parameters
from tests.support.numerics import LOGITS_AGAINST_REFERENCE
from tests.support.setups import Setup

LENGTHS = (20, 9, 14)  # for each rank
TIGHT = {"num_blocks": 26, "block_size": 2}  # two such sequences end, three do not fit
ONLY_WINDOWS = ("T-MIS",)  # a sequence never grows beyond the blocks that it was admitted with
EVERYWHERE = ("T-QW3", "T-DS3", "T-GOS")  # in every topology and chunk size: plain, latent and windowed caches
COMMON = (("EP2DP1", 7), ("EP1DP2", 7))
CASES = [
    case
    for case in MATRIX
    if case[0] not in ONLY_WINDOWS and (case[0] in EVERYWHERE or case[1:] in COMMON or case in QUICK)
]


@pytest.mark.parametrize(
    ("name", "topology", "chunk"), parameters(CASES, {case for case in QUICK if case[0] in UNLIKE})
)
def test_preempted_requests_equal_transformers(name, topology, chunk):
    path = checkpoint(name)
    prompts = [random_prompt(length, seed=i) for i, length in enumerate(LENGTHS * num_ranks(topology))]
    setup = Setup(topology=topology, max_chunk_tokens=chunk, **TIGHT)
    run = generate(path, prompts, setup=setup, params=greedy(16))
    assert run.num_preemptions > 0
    for outcome in run.outcomes:
        compare_with_reference(path, outcome)
        assert len(outcome.tokens) == 16
        assert outcome.drift <= LOGITS_AGAINST_REFERENCE
