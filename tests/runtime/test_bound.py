"""What binds: a verdict of each kind, from sums that are its own, and what holds of shares whatever the sums."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moewe.runtime.metrics.bound import (
    BOUNDS,
    EFFICIENCY_BY_ISA,
    MARGIN,
    MATRIX_EFFICIENCY,
    MEMORY_EFFICIENCY,
    GroupSums,
    RankCeilings,
    RankSums,
    Verdict,
    judge,
    judge_all,
)
from moewe.runtime.metrics.saturation import s_mbu, s_mfu

CEILINGS = RankCeilings(memory_bandwidth=100.0, matrix_rate=1000.0)
WORKING = RankSums(busy_seconds=9.0, host_seconds=0.5, collective_seconds=0.5, starved_seconds=0.5)
# A step that streams weights near the ceiling, one that multiplies near it.
STREAMING = replace(WORKING, memory_bytes=560.0, flops=300.0)
MULTIPLYING = replace(WORKING, memory_bytes=80.0, flops=3600.0)


def group(*ranks: RankSums, waiting: float = 0.0, running: float = 50.0, wall: float = 10.0) -> GroupSums:
    return GroupSums(wall_seconds=wall, ranks=ranks, waiting_seconds=waiting, running_seconds=running)


CASES = {
    "memory": group(STREAMING),
    "compute": group(MULTIPLYING),
    "link": group(*[replace(STREAMING, collective_seconds=7.0)] * 2),
    "host": group(replace(STREAMING, busy_seconds=3.0, starved_seconds=7.0, memory_bytes=100.0)),
    "imbalance": group(replace(STREAMING, collective_seconds=6.0), STREAMING),
    "queue": group(STREAMING, waiting=900.0, running=50.0),
    "idle": group(replace(STREAMING, busy_seconds=1.0, starved_seconds=0.1, memory_bytes=60.0)),
}


@pytest.mark.parametrize("bound", BOUNDS)
def test_each_verdict_is_given_where_it_is_due(bound: str) -> None:
    verdict = judge(CASES[bound], CEILINGS)[0]
    assert verdict.bound == bound
    assert tuple(verdict.shares) == BOUNDS and verdict.shares[bound] == max(verdict.shares.values())


def test_prompts_on_amx_are_bound_by_arithmetic_far_below_its_rate() -> None:
    """A prompt of 512 that multiplied at 0.18 of the rate, as docs/performance.md has it: no host held it up."""
    prompt = group(RankSums(busy_seconds=10, host_seconds=0.2, flops=0.18 * 1000 * 9.8), wall=10.0)
    (by_default,) = judge(prompt, CEILINGS)
    (on_amx,) = judge(prompt, replace(CEILINGS, matrix_efficiency=EFFICIENCY_BY_ISA["amx"]))
    assert by_default.bound == "host" and on_amx.bound == "compute"
    assert on_amx.shares["compute"] == pytest.approx(0.18 / 0.2 * 0.98)


def test_shares_are_those_of_the_time() -> None:
    (verdict,) = judge(group(STREAMING, waiting=50.0, running=150.0), CEILINGS)
    memory, compute = 560 / (MEMORY_EFFICIENCY * 100), 300 / (MATRIX_EFFICIENCY * 1000)
    host = 0.5 + 0.5 + (9 - 0.5 - 0.5 - memory - compute)
    expected = {
        "memory": memory / 10, "compute": compute / 10, "link": 0.05, "host": host / 10, "imbalance": 0.0,
        "queue": 0.25, "idle": 0.05,
    }  # fmt: skip
    assert verdict.shares == pytest.approx(expected)


def test_the_slow_rank_is_bound_by_its_own_work_and_the_others_by_it() -> None:
    fast = replace(STREAMING, collective_seconds=6.0, memory_bytes=150.0)
    verdicts = judge(group(fast, STREAMING, fast), CEILINGS)
    assert [verdict.bound for verdict in verdicts] == ["imbalance", "memory", "imbalance"]
    assert [verdict.shares["link"] for verdict in verdicts] == [0.05] * 3
    assert judge_all(verdicts).bound == "imbalance"


def test_waiting_in_which_nothing_travels_is_not_the_links() -> None:
    """Ranks that are slow in turns wait alike: the sums cannot tell, but shared memory can."""
    waiting = replace(STREAMING, collective_seconds=7.0)
    assert [verdict.bound for verdict in judge(group(waiting, waiting), CEILINGS)] == ["link"] * 2
    known = replace(waiting, waited_seconds=6.5)
    for verdict in judge(group(known, known), CEILINGS):
        assert verdict.bound == "imbalance" and verdict.shares["link"] == pytest.approx(0.05)


def test_bytes_from_a_cache_explain_nothing() -> None:
    """What streams from a cache waits for launches, as far as anybody can tell."""
    resident = replace(CEILINGS, cache_resident=True)
    assert judge(CASES["memory"], CEILINGS)[0].bound == "memory"
    verdict = judge(CASES["memory"], resident)[0]
    assert verdict.shares["memory"] == 0 and verdict.bound == "host"


def test_kernels_better_than_good_fill_their_time_and_no_more() -> None:
    (verdict,) = judge(group(replace(STREAMING, memory_bytes=4000.0, flops=3000.0)), CEILINGS)
    assert verdict.shares["memory"] + verdict.shares["compute"] == pytest.approx(0.8)
    assert verdict.shares["host"] == pytest.approx(0.1)


def test_a_window_without_anything_is_idle() -> None:
    assert judge(GroupSums(wall_seconds=0.0, ranks=(RankSums(),)), CEILINGS)[0].bound == "idle"
    assert judge(GroupSums(wall_seconds=5.0, ranks=(RankSums(),)), CEILINGS)[0].bound == "idle"
    assert judge(GroupSums(wall_seconds=5.0, ranks=()), CEILINGS) == [] and judge_all([]).bound == "idle"


def test_the_word_changes_only_when_another_share_leads_clearly() -> None:
    shares = dict.fromkeys(BOUNDS, 0.0) | {"memory": 0.4, "host": 0.4 + MARGIN / 2}
    near = Verdict("memory", shares)
    assert judge_all([near]).bound == "host"
    assert judge_all([near], previous="memory").bound == "memory"
    assert judge_all([near], previous="compute").bound == "host"
    clear = Verdict("memory", shares | {"host": 0.4 + 2 * MARGIN})
    assert judge_all([clear], previous="memory").bound == "host"


amounts = st.floats(-1.0, 1e6, allow_nan=False)
ranks = st.builds(
    RankSums, busy_seconds=amounts, host_seconds=amounts, collective_seconds=amounts, waited_seconds=amounts,
    starved_seconds=amounts,
    memory_bytes=st.floats(0, 1e15), flops=st.floats(0, 1e18),
)  # fmt: skip
groups = st.builds(
    GroupSums, wall_seconds=amounts, ranks=st.lists(ranks, min_size=1, max_size=5).map(tuple), waiting_seconds=amounts,
    running_seconds=amounts,
)  # fmt: skip
ceilings = st.builds(
    RankCeilings, memory_bandwidth=st.floats(1, 1e13), matrix_rate=st.floats(1, 1e16), cache_resident=st.booleans()
)


@given(sums=groups, ceilings=ceilings)
def test_shares_lie_between_0_and_1_and_those_of_time_make_all_of_it(sums: GroupSums, ceilings: RankCeilings) -> None:
    verdicts = judge(sums, ceilings)
    for verdict in (*verdicts, judge_all(verdicts)):
        assert all(0 <= share <= 1 for share in verdict.shares.values())
        time = sum(share for name, share in verdict.shares.items() if name != "queue")
        assert time == pytest.approx(1)
        assert verdict.bound in BOUNDS


@given(sums=groups, ceilings=ceilings, nudge=st.floats(-0.01, 0.01))
def test_a_verdict_stands_where_it_was_given_and_where_little_changes(
    sums: GroupSums, ceilings: RankCeilings, nudge: float
) -> None:
    first = judge(sums, ceilings)
    words = [verdict.bound for verdict in first]
    assert [verdict.bound for verdict in judge(sums, ceilings, words)] == words
    moved = judge(replace(sums, wall_seconds=sums.wall_seconds * (1 + nudge)), ceilings, words)
    for before, after in zip(first, moved):
        change = max(abs(before.shares[name] - after.shares[name]) for name in BOUNDS)
        assert after.bound == before.bound or change > MARGIN / 2 - 1e-9


@given(sums=groups, ceilings=ceilings, factor=st.sampled_from([0.25, 0.5, 2.0, 64.0]))
def test_a_verdict_does_not_depend_on_the_length_of_the_window(
    sums: GroupSums, ceilings: RankCeilings, factor: float
) -> None:
    def longer(rank: RankSums) -> RankSums:
        return RankSums(**{name: value * factor for name, value in vars(rank).items()})

    scaled = GroupSums(
        wall_seconds=sums.wall_seconds * factor, ranks=tuple(map(longer, sums.ranks)),
        waiting_seconds=sums.waiting_seconds * factor, running_seconds=sums.running_seconds * factor,
    )  # fmt: skip
    for one, other in zip(judge(sums, ceilings), judge(scaled, ceilings)):
        assert other.shares == pytest.approx(one.shares, abs=1e-9)


@given(sums=groups, ceilings=ceilings)
def test_a_verdict_does_not_depend_on_the_order_of_ranks(sums: GroupSums, ceilings: RankCeilings) -> None:
    forward = judge(sums, ceilings)
    backward = judge(replace(sums, ranks=sums.ranks[::-1]), ceilings)
    assert backward[::-1] == forward


def test_utilisations_follow_their_definitions() -> None:
    assert s_mbu(5e9, 0.5, 20e9) == 0.5 and s_mfu(3e12, 2.0, 3e12) == 0.5
    assert s_mbu(1.0, 0.0, 1.0) == s_mbu(1.0, 1.0, 0.0) == s_mfu(1.0, 0.0, 1.0) == s_mfu(1.0, 1.0, 0.0) == 0.0
    assert math.isclose(CEILINGS.ridge_point, 10.0)
