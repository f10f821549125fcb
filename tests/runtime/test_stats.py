"""Counters survive the way from worker to metrics."""

from __future__ import annotations

import numpy as np

from moewe.runtime.metrics.stats import decode_counters, encode_counters, rank_stats
from moewe.telemetry import RankCounters


def test_counters_arrive_with_shapes_and_values():
    counters = RankCounters(3, 5)
    counters.begin_step("decode", 7)
    counters.add_bytes("routed", 1 << 40)
    counters.add_flops("kv", 2.0**70)
    counters.add_exchange((1, 2, 3 << 40), (0.5, 0.25, 0.125), 0.0625)
    counters.add_expert_tokens(np.array([[0] * 5, [0] * 5, [0, 1, 2, 3, 4]]))
    counters.end_step(0.25, 0.125, 0.5)
    counters.unowned_ids, counters.measured_bytes = 2, 1.5e20
    stats = rank_stats(1, encode_counters(counters), used_blocks=4, total_blocks=9)
    assert (stats.rank, stats.used_blocks, stats.total_blocks, stats.unowned_ids) == (1, 4, 9, 2)
    back = decode_counters(stats)
    counters.begin_step("prefill", 7)
    counters.add_expert_tokens(np.ones((3, 5), np.int64))
    back = decode_counters(rank_stats(1, encode_counters(counters), used_blocks=4, total_blocks=9))
    assert (back.expert_tokens - back.expert_decode_tokens == 1).all() and back.expert_decode_tokens.sum() == 10
    fields = ("bytes_moved", "busy_seconds", "steps", "tokens", "expert_tokens", "expert_decode_tokens")
    fields += ("exchange_bytes", "exchange_seconds", "flops", "host_seconds", "starved_seconds")
    assert (back.waited_seconds, back.measured_bytes) == (0.0625, 1.5e20)
    for field in fields:
        np.testing.assert_array_equal(getattr(back, field), getattr(counters, field))


def test_counters_of_a_rank_that_never_ran_are_zero():
    back = decode_counters(rank_stats(0, b"", used_blocks=0, total_blocks=3))
    assert back.steps.sum() == 0
    assert back.expert_tokens.shape == (0, 0)
