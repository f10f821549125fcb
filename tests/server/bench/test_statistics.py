"""Figures of known records: latencies, percentiles, goodput, concurrency."""

from __future__ import annotations

import statistics as standard
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moewe.server.bench.records import RequestRecord
from moewe.server.bench.statistics import (
    latencies,
    meets,
    parse_goals,
    peak_concurrency,
    reasons,
    results,
    summary,
)


def made(started: float, *pieces: float, ended: float | None = None, **more: Any) -> RequestRecord:
    record = RequestRecord(started=started, **more)
    for at in pieces:
        record.saw_piece(at)
    record.ended = pieces[-1] if ended is None else ended
    record.output_tokens = more.get("output_tokens", len(pieces))
    return record


def test_times_of_one_request() -> None:
    record = made(10.0, 10.5, 10.75, 11.5, ended=11.75)
    assert record.ttft == 0.5 and record.e2el == 1.75
    assert list(record.gaps) == [0.25, 0.75] and record.tpot == 0.5


def test_tokens_count_for_tpot_and_pieces_for_gaps() -> None:
    record = made(0.0, 1.0, 3.0, output_tokens=5)
    assert record.tpot == 0.5 and list(record.gaps) == [2.0]


def test_one_token_has_no_time_per_token_and_none_has_no_first() -> None:
    assert made(0.0, 1.0).tpot is None
    silent = RequestRecord(started=0.0, ended=2.0, output_tokens=4)
    assert silent.ttft is None and silent.tpot is None


def test_summary_of_known_values() -> None:
    assert summary(range(101)) == {"mean": 50.0, "median": 50.0, "p95": 95.0, "p99": 99.0}
    assert summary([4.0]) == {"mean": 4.0, "median": 4.0, "p95": 4.0, "p99": 4.0}
    assert summary([]) == {}


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=60))
def test_points_are_those_of_the_standard_library(values: list[float]) -> None:
    cuts = standard.quantiles(values, n=100, method="inclusive")
    want = {"mean": standard.fmean(values), "median": standard.median(values), "p95": cuts[94], "p99": cuts[98]}
    assert summary(values) == pytest.approx(want, rel=1e-9, abs=1e-9)


def test_results_count_only_what_succeeded() -> None:
    records = [
        made(0.0, 1.0, 2.0, prompt_tokens=10, counted=True),
        made(1.0, 2.0, 4.0, prompt_tokens=20, counted=True),
        made(1.5, 3.0, prompt_tokens=100, error="HTTP 500: broken"),
    ]
    got = results(records, 4.0, {"ttft": 1000.0, "e2el": 2500.0})
    assert (got["completed"], got["failed"]) == (2, 1)
    assert (got["total_input_tokens"], got["total_output_tokens"]) == (30, 4)
    assert (got["request_throughput"], got["output_throughput"], got["total_token_throughput"]) == (0.5, 1.0, 8.5)
    assert got["request_goodput"] == 0.25
    assert (got["mean_ttft_ms"], got["mean_tpot_ms"], got["mean_itl_ms"], got["mean_e2el_ms"]) == (
        1000,
        1500,
        1500,
        2500,
    )
    assert got["max_concurrent_requests"] == 3 and got["tokens_per_piece"] == 1.0
    assert reasons(records) == {"HTTP 500: broken": 1}


def test_nothing_measured_gives_no_latency_and_no_division_by_zero() -> None:
    got = results([], 0.0, {})
    assert got["completed"] == got["request_throughput"] == 0 and got["tokens_per_piece"] is None
    assert not any(name.endswith("_ms") for name in got) and "request_goodput" not in got
    assert latencies([made(0, 1, error="x")]) == {"ttft": [], "tpot": [], "itl": [], "e2el": []}


@pytest.mark.parametrize(
    ("goals", "fine"),
    [
        ({"ttft": 1000}, True),
        ({"ttft": 999}, False),
        ({"tpot": 500}, True),
        ({"tpot": 499}, False),
        ({"e2el": 2500, "ttft": 1000}, True),
        ({"e2el": 2499, "ttft": 1000}, False),
    ],
)
def test_goals_are_met_up_to_their_limit(goals: dict[str, float], fine: bool) -> None:
    assert meets(made(0.0, 1.0, 1.5, 2.0, ended=2.5), goals) is fine


def test_what_was_not_measured_meets_no_goal_but_a_single_token_has_no_tpot() -> None:
    assert meets(made(0.0, 1.0), {"tpot": 1.0})
    assert not meets(RequestRecord(ended=1.0, output_tokens=3), {"ttft": 1e9})
    assert not meets(RequestRecord(ended=1.0, output_tokens=3), {"tpot": 1e9})
    assert not meets(made(0.0, 1.0, error="x"), {})


def test_goals_as_words() -> None:
    assert parse_goals(["ttft:200", "tpot:50.5,e2el:1e3"]) == {"ttft": 200.0, "tpot": 50.5, "e2el": 1000.0}
    assert parse_goals([]) == {}


@pytest.mark.parametrize("word", ["ttft", "ttft:", "itl:3", "ttft:-1", "ttft:nan", "ttft:0", "ttft:1 ttft:2"])
def test_other_words_are_refused(word: str) -> None:
    with pytest.raises(ValueError, match="--goodput"):
        parse_goals([word])


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9)), max_size=25))
def test_peak_is_the_greatest_number_at_any_moment(spans: list[tuple[int, int]]) -> None:
    records = [RequestRecord(started=at, ended=at + length) for at, length in spans]
    moments = range(31)
    want = max(sum(at <= moment < at + length for at, length in spans) for moment in moments)
    assert peak_concurrency(records) == want
