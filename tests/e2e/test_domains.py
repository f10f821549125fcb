"""Groups that span two emulated domains: the tokens of one rank, from threads and from processes over a slowed link."""

from __future__ import annotations

import time

import pytest

from moewe.runtime.metrics.stats import decode_counters
from moewe.runtime.params import SamplingParams
from moewe.runtime.prompts import packed
from tests.runtime.test_generation import FIXTURE, descendants, is_gone, start
from tests.support.comparison import compare_runs
from tests.support.fixtures import checkpoint, random_prompt, reference_greedy
from tests.support.harness import generate, greedy
from tests.support.native import needs_native
from tests.support.polling import finish
from tests.support.setups import Setup

PROMPTS = [random_prompt(length, seed=length) for length in (33, 1, 17, 50)]


@pytest.mark.parametrize("topology", ["EP4DP1[domains=2+2]", "EP4DP1[domains=3+1]", "EP2DP1[domains=1+1]"])
@pytest.mark.parametrize("name", ["T-QW3", pytest.param("T-DS3", marks=pytest.mark.slow)])
def test_domains_give_the_logits_of_one_rank(name: str, topology: str) -> None:
    path = checkpoint(name)
    expected = generate(path, PROMPTS, setup=Setup())
    actual = generate(path, PROMPTS, setup=Setup(topology=topology))
    compare_runs(actual.outcomes, expected.outcomes)


@needs_native
def test_domains_are_bitwise_among_themselves() -> None:
    """Alone or in company and whatever the chunks: experts stay where they are, so do the sums of their outputs."""
    path = checkpoint("T-QW3", dtype="bfloat16")
    setup = Setup(topology="EP4DP1[domains=2+2]", dtype="bfloat16")
    together = generate(path, PROMPTS, setup=setup, params=greedy(8, logprobs=2)).outcomes
    alone = generate(path, PROMPTS, setup=setup, params=greedy(8, logprobs=2), one_by_one=True).outcomes
    for one, other in zip(alone, together, strict=True):
        assert one.tokens == other.tokens
        assert [(p.token_ids, p.logprobs) for p in one.logprobs] == [(p.token_ids, p.logprobs) for p in other.logprobs]


@pytest.mark.parametrize("exchange", ["all_to_all", "padded"])
def test_asked_for_exchanges_give_the_tokens_of_the_reference(exchange: str) -> None:
    path = checkpoint("T-QW3")
    outcomes = generate(path, PROMPTS, setup=Setup(topology="EP2DP1", exchange=exchange)).outcomes
    for prompt, outcome in zip(PROMPTS, outcomes, strict=True):
        assert outcome.tokens == reference_greedy(path, prompt, 16)


@pytest.mark.spawn
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("slowed", ["", ",rate=500,delay=200"])
def test_processes_in_two_domains_answer_as_the_reference(slowed: str) -> None:
    replicas = start(f"EP4DP1[domains=2+2{slowed}]")
    try:
        pids = descendants(replicas)
        for i, prompt in enumerate(PROMPTS):
            replicas.submit(f"r{i}", packed(prompt), SamplingParams(max_tokens=16, temperature=0, ignore_eos=True))
        told, ended = finish(replicas, len(PROMPTS), seconds=240)
        assert set(ended.values()) == {"length"}
        for i, prompt in enumerate(PROMPTS):
            assert told[f"r{i}"] == reference_greedy(checkpoint(FIXTURE), prompt, 16), i
        deadline = time.monotonic() + 10
        while True:  # until the last counters are in
            replicas.poll(0.2)
            counters = [decode_counters(rank) for stats in replicas.stats() for rank in stats.ranks]
            if len(counters) == 4 and all((rank.exchange_bytes > 0).all() for rank in counters):
                break
            assert time.monotonic() < deadline, [rank.exchange_bytes for rank in counters]
        assert all(rank.exchange_seconds[2] > 0 for rank in counters)
    finally:
        replicas.close()
    assert all(is_gone(pid) for pid in pids)
