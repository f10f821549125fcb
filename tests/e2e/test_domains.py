"""Groups that span two emulated domains: the tokens of one rank, from threads and from processes over a slowed link."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from moewe.moe.wide_ep.exchanges import GroupShape, ThreadHub, join_over_links
from moewe.runtime.metrics.stats import decode_counters
from moewe.runtime.params import SamplingParams
from moewe.runtime.prompts import packed
from moewe.runtime.replicas import ReplicaSet
from moewe.topologies.meeting import PeersLostError
from tests.runtime.test_generation import FIXTURE, READY_S, config, descendants, is_gone, start, wait_gone
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
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"topology": "EP4DP1[domains=2+2]"}, {"topology": "EP4DP1[domains=2+2]", "max_chunk_tokens": 7}),
        # All rows are rounded, wherever their experts are: neither the number of ranks nor that of domains' shows.
        ({"topology": "EP4DP1", "exchange_payload": "fp8"}, {"topology": "EP2DP1", "exchange_payload": "fp8"}),
    ],
    ids=["hierarchical", "fp8"],
)
def test_company_and_chunks_change_no_bit(first: dict[str, Any], second: dict[str, Any]) -> None:
    path = checkpoint("T-QW3", dtype="bfloat16")
    ways = ((first, False), (first, True), (second, False))
    expected, *others = (
        generate(
            path, PROMPTS, setup=Setup(dtype="bfloat16", **way), params=greedy(8, logprobs=2), one_by_one=alone
        ).outcomes
        for way, alone in ways
    )
    for outcomes in others:
        for one, other in zip(expected, outcomes, strict=True):
            assert one.tokens == other.tokens
            assert torch.equal(one.logits_of_all(), other.logits_of_all())


def test_fp8_rows_stay_near() -> None:
    path = checkpoint("T-QW3")
    expected = generate(path, PROMPTS, setup=Setup(), params=greedy(1)).outcomes
    rounded = generate(path, PROMPTS, setup=Setup(topology="EP2DP1", exchange_payload="fp8"), params=greedy(1)).outcomes
    for one, other in zip(expected, rounded, strict=True):
        left, right = one.logits_of_all(), other.logits_of_all()
        error = float((left - right).pow(2).mean().sqrt() / left.pow(2).mean().sqrt())
        assert 0 < error < 0.05


def test_who_only_lost_the_others_says_so() -> None:
    """A rank over links between threads that breaks for another's sake is not the one to blame."""
    shape = GroupShape(slot_ranges=((0, 1), (1, 2)), domain_sizes=(1, 1))
    hub = ThreadHub(shape.slot_ranges, shape=shape)
    exchange = join_over_links("hierarchical", shape, 0, lambda ranks: hub.link(ranks, 0))
    hub.abort("rank 1 has ended")
    with pytest.raises(PeersLostError, match="rank 1 has ended"):
        exchange.dispatch(torch.ones(1, 4), torch.ones(1, 1, dtype=torch.int32))
    with pytest.raises(RuntimeError) as error:
        exchange.dispatch(torch.ones(1, 4), torch.full((1, 1), 9, dtype=torch.int32))
    assert not isinstance(error.value, PeersLostError)


@pytest.mark.spawn
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_lost_in_another_domain_is_named(number: signal.Signals) -> None:
    replicas = start("EP2DP1[domains=1+1]", stall_timeout_s=3.0)
    pids = descendants(replicas)
    replicas.submit("a", packed(PROMPTS[0]), SamplingParams(max_tokens=400, temperature=0, ignore_eos=True))
    while not replicas.poll(0.5):
        continue
    os.kill(replicas.ready[0].pids[1], number)
    assert finish(replicas, 1)[1] == {"a": "error"}
    deadline = time.monotonic() + 20
    while replicas.failure is None:
        assert time.monotonic() < deadline
        replicas.poll(0.2)
    assert replicas.failure.rank == 1, replicas.failure.reason
    replicas.close()
    assert wait_gone(pids)


@pytest.mark.parametrize("exchange", ["all_to_all", "padded"])
def test_asked_for_exchanges_give_the_tokens_of_the_reference(exchange: str) -> None:
    path = checkpoint("T-QW3")
    outcomes = generate(path, PROMPTS, setup=Setup(topology="EP2DP1", exchange=exchange)).outcomes
    for prompt, outcome in zip(PROMPTS, outcomes, strict=True):
        assert outcome.tokens == reference_greedy(path, prompt, 16)


@pytest.mark.spawn
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_processes_switch_between_exchanges_as_plans_say() -> None:
    made = config(checkpoint(FIXTURE), "EP2DP1")
    replicas = ReplicaSet.start(replace(made, parallel=replace(made.parallel, exchange="padded")))
    try:
        replicas.wait_ready(READY_S)
        for i, prompt in enumerate(PROMPTS):
            replicas.submit(f"r{i}", packed(prompt), SamplingParams(max_tokens=16, temperature=0, ignore_eos=True))
        told, _ = finish(replicas, len(PROMPTS), seconds=240)
    finally:
        replicas.close()
    for i, prompt in enumerate(PROMPTS):
        assert told[f"r{i}"] == reference_greedy(checkpoint(FIXTURE), prompt, 16), i


@pytest.mark.spawn
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_processes_in_two_domains_answer_as_the_reference() -> None:
    replicas = start("EP4DP1[domains=2+2,rate=500,delay=200]")
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
