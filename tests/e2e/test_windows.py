"""Windows, runs, sinks and long frequencies, tested beyond their edges: a model with its windows gone would differ."""

import pytest

from moewe.models.families import load_config
from moewe.models.footprint import cache_groups
from tests.support.comparison import compare_runs, compare_with_reference
from tests.support.fixtures import checkpoint, random_prompt
from tests.support.harness import Group, generate, greedy
from tests.support.setups import Setup

CHUNKS = [5, 512]


def check(path, lengths, *, topology="EP1DP1", max_tokens=16, **setup):
    """Run prompts of `lengths` together; compare them with transformers."""
    prompts = [random_prompt(length, seed=length) for length in lengths]
    run = generate(path, prompts, setup=Setup(topology=topology, **setup), params=greedy(max_tokens))
    for outcome in run.outcomes:
        compare_with_reference(path, outcome)
        assert len(outcome.tokens) == max_tokens
    return run


# --- P-LOAD-16 --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("name", ["T-GOS", "T-MIS"])
def test_a_window_of_eight_at_its_edges(name, block_size, chunk):
    check(checkpoint(name), (7, 8, 9, 40), block_size=block_size, max_chunk_tokens=chunk)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_runs_of_sixteen_at_their_edges(block_size, chunk):
    check(checkpoint("T-LL4"), (1, 15, 16, 17, 32, 40), block_size=block_size, max_chunk_tokens=chunk)


@pytest.mark.parametrize("name", ["T-GOS", "T-LL4"])
def test_groups_of_layers_with_their_own_lifetimes(name):
    groups = cache_groups(load_config(checkpoint(name)), dtype="float32")
    assert {group.kind for group in groups} == {"full", {"T-GOS": "window", "T-LL4": "chunk"}[name]}
    assert sorted(layer for group in groups for layer in group.layers) == [0, 1, 2, 3]


@pytest.mark.parametrize(("name", "window_blocks"), [("T-GOS", 8), ("T-MIS", 8), ("T-LL4", 12)])
def test_blocks_behind_the_window_serve_others(name, window_blocks):
    """Far more tokens than the blocks of windowed layers hold at once, and nobody is preempted for them."""
    path = checkpoint(name)
    sizes = {"num_blocks": 64, "window_blocks": window_blocks, "block_size": 4}
    run = check(path, (40, 9), max_chunk_tokens=5, max_tokens=48, **sizes)
    assert run.num_preemptions == 0
    assert run.groups[0].scheduler.config.groups[0].num_blocks == window_blocks
    ample = generate(
        path,
        [outcome.prompt for outcome in run.outcomes],
        setup=Setup(max_chunk_tokens=5),
        params=greedy(48),
    )
    compare_runs(run.outcomes, ample.outcomes)


@pytest.mark.parametrize("name", ["T-GOS", "T-MIS", "T-LL4"])
def test_an_abort_returns_the_blocks_of_every_group(name):
    path = checkpoint(name)
    with Group(path, Setup(topology="EP1DP1", block_size=4, max_chunk_tokens=5)) as group:
        group.submit("gone", random_prompt(40), greedy(30))
        kept = group.submit("kept", random_prompt(21, seed=1), greedy(16))
        for _ in range(14):
            group.step()
        assert group.abort("gone")
        group.run()  # checks that no block is left
    compare_with_reference(path, kept)


@pytest.mark.parametrize("name", ["T-GOS", "T-MIS", "T-LL4"])
def test_a_snapshot_in_the_middle_of_a_windowed_sequence(name):
    path = checkpoint(name)
    with Group(path, Setup(block_size=4, max_chunk_tokens=5)) as group:
        outcomes = [group.submit(str(n), random_prompt(n, seed=n), greedy(20)) for n in (40, 3, 21)]
        for number in range(12):
            if number % 3 == 2:
                group.snapshot()
            group.step()
        group.run()
    for outcome in outcomes:
        compare_with_reference(path, outcome)


# --- longrope ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("topology", ["EP1DP1", "EP2DP1"])
def test_long_and_short_frequencies_side_by_side(topology, chunk):
    """Sequences that end below and beyond the original length of 40, in one batch.

    Which frequencies serve a sequence is settled by how long it may become, so that no token's K changes its mind.
    """
    lengths = (5, 23, 26, 33, 50)
    assert [length + 16 > 40 for length in lengths] == [False, False, True, True, True]
    check(checkpoint("T-PHI"), lengths, topology=topology, max_chunk_tokens=chunk)


def test_a_sequence_that_may_grow_long_is_long_from_its_first_token():
    path, prompt = checkpoint("T-PHI"), random_prompt(20)
    long, short = generate(path, [prompt, prompt], params=[greedy(40), greedy(16)]).outcomes
    compare_with_reference(path, long)
    compare_with_reference(path, short)
    assert (long.logits[19] - short.logits[19]).abs().max() > 0.01
