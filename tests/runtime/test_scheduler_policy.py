"""Sharing of rows among prompts, kinds of steps, and order of precedence: pure functions, plain numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moewe.runtime.plan import Chunk, RankPlan
from moewe.runtime.scheduling.limits import GroupLimits, SchedulerConfig
from moewe.runtime.scheduling.policy import fill_evenly, precedence, share_tokens, step_header, step_kind
from moewe.topologies import RankGrid, parse_topology
from moewe.topologies.exchange_choice import ExchangeFacts, ExchangeRule
from tests.support.null_worker import make_request

CHUNK = Chunk(slot=0, start=0, num_tokens=7, samples=False)


@pytest.mark.parametrize(
    ("needs", "budget", "shares"),
    [
        ([30000], 512, [512]),
        ([30000, 100, 5], 512, [407, 100, 5]),
        ([30000, 30000], 512, [384, 128]),
        ([5, 30000], 512, [5, 507]),
        ([9, 9, 9, 9], 4, [1, 1, 1, 1]),
        ([9, 9, 9, 9], 3, [1, 1, 1, 0]),
        ([9, 9, 9, 9], 0, [0, 0, 0, 0]),
        ([], 10, []),
    ],
    ids=["alone", "short behind long", "two long", "short first", "one each", "too few", "none", "nobody"],
)
def test_share_tokens(needs: list[int], budget: int, shares: list[int]):
    assert share_tokens(needs, budget) == shares


@given(st.lists(st.integers(1, 2000), max_size=20), st.integers(0, 1000))
def test_share_tokens_wastes_nothing_and_starves_nobody(needs: list[int], budget: int):
    shares = share_tokens(needs, budget)
    assert sum(shares) == min(budget, sum(needs))
    assert all(0 <= share <= need for share, need in zip(shares, needs, strict=True))
    if budget >= len(needs):
        assert all(share >= 1 for share in shares)
        fair = budget // 2 // max(1, len(needs))
        assert all(share >= min(need, fair) for share, need in zip(shares, needs, strict=True))


@given(st.lists(st.integers(0, 50), max_size=12), st.integers(0, 200))
def test_fill_evenly_is_level(needs: list[int], budget: int):
    shares = fill_evenly(needs, budget)
    assert sum(shares) == min(budget, sum(needs))
    highest = max(shares, default=0)
    assert all(share == need or share >= highest - 1 for share, need in zip(shares, needs, strict=True))


def test_step_kind_looks_at_all_ranks():
    idle, prefill, decode = RankPlan(), RankPlan(chunks=(CHUNK,)), RankPlan(num_decodes=3)
    assert step_kind([idle, idle]) == "idle"
    assert step_kind([idle, prefill]) == "prefill"
    assert step_kind([decode, idle]) == "decode"
    assert step_kind([decode, prefill]) == "mixed"
    header = step_header(
        [decode, prefill, idle], step=4, epoch=2, way_of=lambda kind, bucket: (f"{kind}-{bucket}", "so"), snapshot=False
    )
    assert (header.step, header.epoch, header.kind, header.bucket, header.exchange) == (4, 2, "mixed", 7, "mixed-7")
    assert header.overlap == "so"


def test_precedence_minds_priority_only_under_its_policy():
    a, b = make_request("a", 1, priority=5, arrival=1.0), make_request("b", 1, priority=0, arrival=2.0)
    assert precedence(a, "fcfs") < precedence(b, "fcfs")
    assert precedence(b, "priority") < precedence(a, "priority")
    tie = make_request("c", 1, arrival=1.0)
    assert precedence(a, "fcfs") < precedence(tie, "fcfs"), (
        "ties go by name, whatever the order of arrival in the queue"
    )


def test_the_exchange_of_a_step_follows_its_kind_and_bucket() -> None:
    rule = ExchangeRule(grid=RankGrid(parse_topology("EP2DP1"), 2), facts=ExchangeFacts(asked="padded"))
    limits = SchedulerConfig(
        num_ranks=2, groups=(GroupLimits(num_blocks=8),), block_size=4, max_model_len=32, max_num_seqs=4,
        max_num_batched_tokens=8, exchange_rule=rule,
    )  # fmt: skip
    decode, prefill = RankPlan(num_decodes=3), RankPlan(chunks=(Chunk(slot=0, start=0, num_tokens=3, samples=True),))

    def exchange(*ranks: RankPlan) -> str:
        return step_header(ranks, step=0, epoch=0, way_of=limits.way_of, snapshot=False).exchange

    assert exchange(decode, RankPlan()) == "padded"
    assert exchange(decode, RankPlan(num_decodes=65)) == exchange(decode, prefill) == "all_to_all"
    assert replace(limits, exchange_rule=None, exchange="shm").way_of("decode", 3) == ("shm", "none")
