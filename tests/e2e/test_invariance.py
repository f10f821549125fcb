"""One answer whatever happens around a request: preemption, batch mates, aborts, end tokens, a rebuilt batch."""

import numpy as np
import pytest

from moewe.runtime.params import SamplingParams
from tests.support.chain import chain
from tests.support.comparison import compare_runs
from tests.support.fixtures import checkpoint, random_prompt
from tests.support.harness import Group, generate, greedy
from tests.support.setups import Setup


# --- P-KV-04 ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("topology", ["EP1DP1", "EP2DP1"])
def test_preempted_requests_continue_as_if_nothing_had_happened(topology):
    path = checkpoint("T-QW3")
    ranks = int(topology[2])
    prompts = [random_prompt(60, seed=i) for i in range(4 * ranks)]
    tight = Setup(topology=topology, num_blocks=20, max_chunk_tokens=16)  # two and a half requests of 60 + 60
    ample = generate(path, prompts, setup=Setup(topology=topology, max_chunk_tokens=16), params=greedy(60))
    run = generate(path, prompts, setup=tight, params=greedy(60))
    assert ample.num_preemptions == 0
    assert run.num_preemptions > 0
    assert [len(outcome.tokens) for outcome in run.outcomes] == [60] * len(prompts)
    compare_runs(run.outcomes, ample.outcomes)


# --- P-KV-08, in small ------------------------------------------------------------------------------------------------
def check_batches(group):
    for worker in group.workers:
        worker.batch.check_invariants()


@pytest.mark.parametrize("depth", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_books_balance_after_random_requests_and_aborts(depth):
    random = np.random.default_rng(0)
    setup = Setup(topology="EP2DP1", num_blocks=40, block_size=4, keep_logits=False, depth=depth)
    with Group(checkpoint("T-MIX"), setup) as group:
        for i in range(60):
            length = int(random.integers(1, 90))
            group.submit(str(i), random_prompt(length, seed=i), greedy(int(random.integers(1, 60)), ignore_eos=False))
            for _ in range(int(random.integers(0, 3))):
                group.step()
            if random.random() < 0.3:
                group.abort(str(random.integers(0, i + 1)))
            if depth == 1:  # nothing is in flight between steps, so no rank changes its batch while it is looked at
                check_batches(group)
        outcomes = group.run()
        check_batches(group)
        assert group.num_preemptions > 0
        assert {outcome.finish_reason for outcome in outcomes.values()} <= {"stop", "length", "abort"}


# --- P-API-03 ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["T-QW3", pytest.param("T-GLM-demo", marks=pytest.mark.slow)])
def test_a_seed_gives_the_same_tokens_in_any_company(name):
    path = checkpoint(name)
    seeded = SamplingParams(max_tokens=32, temperature=0.8, seed=42, ignore_eos=True)
    unseeded = SamplingParams(max_tokens=32, temperature=0.8, ignore_eos=True)
    prompts = [random_prompt(11), *[random_prompt(5 + i, seed=i) for i in range(7)]]
    seen = []
    for topology in ("EP1DP1", "EP2DP1", "EP1DP2", "EP2DP2"):
        setup = Setup(topology=topology, keep_logits=False)
        seen.append(generate(path, prompts[:1], setup=setup, params=seeded).outcomes[0].tokens)
        together = generate(path, prompts, setup=setup, params=[seeded, *[unseeded] * 7])
        seen.append(together.outcomes[0].tokens)
        assert together.outcomes[1].tokens != together.outcomes[2].tokens
    assert all(tokens == seen[0] for tokens in seen)
    assert len(set(seen[0])) > 8


def test_another_seed_gives_other_tokens():
    params = [SamplingParams(max_tokens=32, temperature=0.8, seed=seed, ignore_eos=True) for seed in (1, 2, 1)]
    run = generate(checkpoint("T-QW3"), [random_prompt(11)] * 3, params=params)
    first, second, third = (outcome.tokens for outcome in run.outcomes)
    assert first == third != second


def test_a_seed_survives_preemption():
    path, prompts = checkpoint("T-QW3"), [random_prompt(20, seed=i) for i in range(4)]
    params = [SamplingParams(max_tokens=40, temperature=1.0, top_p=0.9, seed=i, ignore_eos=True) for i in range(4)]
    ample = generate(path, prompts, params=params)
    tight = generate(path, prompts, setup=Setup(num_blocks=40, block_size=4), params=params)
    assert tight.num_preemptions > 0
    assert [outcome.tokens for outcome in tight.outcomes] == [outcome.tokens for outcome in ample.outcomes]


# --- the rest ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_depth_does_not_change_tokens_and_end_tokens_end(depth):
    path = checkpoint("T-MIX")
    prompts = [random_prompt(9 + i, seed=i) for i in range(5)]
    plain = generate(path, prompts, params=greedy(24))
    ends = tuple(sorted({outcome.tokens[7] for outcome in plain.outcomes}))
    ended = generate(
        path, prompts, setup=Setup(depth=depth, eos_token_ids=ends), params=greedy(24, ignore_eos=False)
    ).outcomes
    for ours, full in zip(ended, plain.outcomes, strict=True):
        stop = next(i for i, token in enumerate(full.tokens) if token in ends)
        assert (ours.tokens, ours.finish_reason) == (full.tokens[: stop + 1], "stop")


@pytest.mark.parametrize("topology", ["EP1DP1", "EP4DP1"])
def test_a_scripted_checkpoint_says_its_script_and_ends(topology):
    script = chain(["Hello", ",", " ", "world"])
    run = generate(
        script.path, [[5], [7, 8, 9], [4] * 40], setup=Setup(topology=topology), params=greedy(30, ignore_eos=False)
    )
    for outcome in run.outcomes:
        assert (outcome.tokens, outcome.finish_reason) == (script.token_ids, "stop")


def test_a_snapshot_rebuilds_the_batch_in_the_middle_of_things():
    path = checkpoint("T-QW2")
    prompts = [random_prompt(length, seed=length) for length in (40, 3, 90)]
    plain = generate(path, prompts, params=greedy(20))
    with Group(path, Setup(topology="EP2DP1", max_chunk_tokens=16)) as group:
        for i, prompt in enumerate(prompts):
            group.submit(str(i), prompt, greedy(20))
        for number in range(12):
            if number % 3 == 2:
                group.snapshot()
            group.step()
        outcomes = list(group.run().values())
    compare_runs(outcomes, plain.outcomes)
