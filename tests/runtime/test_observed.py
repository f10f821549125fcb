"""What the advisor is told of a window: means of steps over ranks and replicas, from counters that only grow."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from moewe.runtime.messages import Stats
from moewe.runtime.metrics.observed import ObservedWindow
from moewe.runtime.metrics.ranks import ReplicaMetrics
from moewe.runtime.metrics.stats import encode_counters, rank_stats
from moewe.telemetry import RankCounters
from moewe.topologies import parse_topology
from moewe.topologies.advisor.records import Observation


def counted(rank: int, steps: int) -> RankCounters:
    """Return what a rank counts in so many steps of decoding: twice as many rows on rank 1, which waits less."""
    counters = RankCounters(2, 2)
    for _ in range(steps):
        counters.begin_step("decode", 3 + 3 * rank)
        for component, num_bytes in (("routed", 1000), ("shared", 10), ("attention", 20), ("dense", 30), ("kv", 400)):
            counters.add_bytes(component, num_bytes)
        counters.add_flops("routed", 500)
        counters.add_flops("attention", 50)
        counters.add_exchange((0, 8, 8), (0.01, 0.03 - 0.02 * rank, 0.01))
        counters.end_step(0.2, 0.05, 0.01)
    return counters


def replicas(steps: int, number: int = 2) -> dict[int, ReplicaMetrics]:
    made = {}
    for replica in range(number):
        ranks = tuple(
            rank_stats(rank, encode_counters(counted(rank, steps)), used_blocks=6, total_blocks=12) for rank in range(2)
        )
        made[replica] = ReplicaMetrics(replica)
        made[replica].observe(Stats(num_running=9, num_waiting=0, num_preemptions=0, num_steps=0, ranks=ranks), 1.0)
    return made


def test_a_window_is_what_came_after_the_one_before() -> None:
    window = ObservedWindow(parse_topology("EP2DP2"), 16, now=10.0, widest=4)
    loads = np.array([[1.0, 3.0], [2.0, 2.0]])
    first = window.end(replicas(4), loads, 40.0, 1e9)
    window.sample(replicas(4))
    window.sample(replicas(4))
    seen = window.end(replicas(10), loads, 60.0, 1e9 + 20)
    assert (first.num_steps, seen.num_steps, seen.seconds) == (4, 6, 20.0)
    (phase,) = seen.phases
    assert (phase.phase, phase.rows) == ("decode", 2 * (3 + 6))
    assert phase.busy_s == pytest.approx(0.21) and phase.host_s == pytest.approx(0.06)
    assert (phase.routed_bytes, phase.weight_bytes, phase.kv_bytes) == (1000, 60, 400)
    assert (phase.flops, phase.routed_flops) == (550, 500)
    # Rank 1 spends 0.02 s of a step in collectives, rank 0 twice that.
    assert seen.link_s == pytest.approx(6 * 0.02) and seen.wait_s == pytest.approx(6 * 0.01)
    assert seen.running == 18 and seen.context == pytest.approx(4 * 6 * 16 / 18)
    assert seen.popularity == (0.625, 0.375) and dict(seen.imbalances)[2] == pytest.approx(1.25)
    # It goes through a log unchanged: plain numbers, no arrays.
    assert msgspec.json.decode(msgspec.json.encode(seen), type=Observation) == seen


def test_widths_that_do_not_run_are_seen_to_be_uneven_too() -> None:
    """A host of 6 cores that runs two ranks may run four; models have experts for no more."""
    window = ObservedWindow(parse_topology("EP2DP1"), 16, now=0.0, widest=6)
    seen = window.end(replicas(10, 1), np.array([[5.0, 1.0, 1.0, 1.0]]), 30.0, 1e9)
    assert dict(seen.imbalances) == {2: 1.5, 3: 2.25, 4: 2.5}


def test_ranks_that_began_anew_count_from_their_beginning() -> None:
    window = ObservedWindow(parse_topology("EP2DP1"), 16, now=0.0, widest=2)
    window.end(replicas(50, 1), np.zeros((0, 0)), 30.0, 1e9)
    seen = window.end(replicas(20, 1), np.zeros((0, 0)), 60.0, 1e9)
    assert seen.num_steps == 20 and seen.popularity == ()
    again = window.end(replicas(20, 1), np.zeros((0, 0)), 90.0, 1e9)
    assert again.phases == () and again.num_steps == 0 and again.shares == {}
