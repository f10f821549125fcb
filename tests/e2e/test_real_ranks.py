"""Engines and ranks as processes, four ranks a group: answers, participation, and idleness (P-EP-01, P-EP-03)."""

from __future__ import annotations

import time

import psutil
import pytest

from moewe.runtime.metrics.stats import decode_counters
from moewe.runtime.params import SamplingParams
from moewe.runtime.prompts import packed
from tests.runtime.test_generation import FIXTURE, descendants, is_gone, start
from tests.support.fixtures import checkpoint, random_prompt, reference_greedy
from tests.support.polling import finish

pytestmark = [pytest.mark.spawn, pytest.mark.slow, pytest.mark.timeout(600)]

IDLE_S = 10.0
MOST_IDLE_CPU = 0.05


def ask(replicas, lengths, max_tokens=16):
    """Submit a prompt of each length; check that all get the reference's tokens."""
    prompts = {f"of-{length}-{time.monotonic()}": random_prompt(length, seed=length) for length in lengths}
    for name, prompt in prompts.items():
        replicas.submit(name, packed(prompt), SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True))
    told, ended = finish(replicas, len(prompts), seconds=240)
    assert set(ended.values()) == {"length"}
    for name, prompt in prompts.items():
        assert told[name] == reference_greedy(checkpoint(FIXTURE), prompt, max_tokens), name


def check_participation(replicas):
    """Wait until the last counters are in; every rank of a group then counts every step of it."""
    deadline = time.monotonic() + 10
    while True:
        replicas.poll(0.2)
        steps = [[decode_counters(rank).steps.tolist() for rank in stats.ranks] for stats in replicas.stats()]
        if all(sum(ranks[0]) == stats.num_steps for ranks, stats in zip(steps, replicas.stats(), strict=True)):
            break
        assert time.monotonic() < deadline, (steps, replicas.stats())
    assert all(rank == ranks[0] for ranks in steps for rank in ranks), steps
    return [sum(ranks[0]) for ranks in steps]


def idle_cpu(replicas, pids):
    """Return the share of a core that each process uses while nothing is asked for; the client keeps listening."""
    processes = [psutil.Process(pid) for pid in pids]

    def used():
        return [sum(process.cpu_times()[:2]) for process in processes]

    before, begin = used(), time.monotonic()
    while time.monotonic() - begin < IDLE_S:
        replicas.poll(0.5)
    after, seconds = used(), time.monotonic() - begin
    return [(b - a) / seconds for a, b in zip(before, after, strict=True)]


def test_four_ranks_keep_step_and_rest():  # P-EP-01
    replicas = start("EP4DP1")
    try:
        pids = descendants(replicas)
        assert len(pids) == 5
        ask(replicas, [12], max_tokens=64)
        alone = check_participation(replicas)[0]
        assert alone >= 64
        ask(replicas, [1, 17, 200])
        assert check_participation(replicas)[0] > alone
        shares = idle_cpu(replicas, pids)
        assert max(shares) < MOST_IDLE_CPU, dict(zip(pids, shares))
        ask(replicas, [12], max_tokens=64)
        check_participation(replicas)
    finally:
        replicas.close()
    assert all(is_gone(pid) for pid in pids)


@pytest.mark.parametrize(("topology", "num_processes"), [("EP4DP2", 10), ("EP4DP1[adp=2,atp=2]", 5)])
def test_groups_of_four_ranks_answer_as_the_reference(topology, num_processes):
    replicas = start(topology)
    try:
        pids = descendants(replicas)
        assert len(pids) == num_processes
        ask(replicas, [33, 1, 17, 50, 5, 34, 2, 9])
        assert all(steps > 0 for steps in check_participation(replicas))
    finally:
        replicas.close()
    assert all(is_gone(pid) for pid in pids)
