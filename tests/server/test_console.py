"""What the operator reads: progress as log lines off a terminal, and a line of statistics while busy."""

from __future__ import annotations

import logging
import time

import pytest

from moewe.runtime.messages import Loading, Stats
from moewe.runtime.metrics.stats import encode_counters, rank_stats
from moewe.server.options import ServerOptions
from moewe.server.terminal.console import LoadingDisplay, StatsLine, address
from moewe.telemetry import RankCounters
from tests.support.fake_replicas import FakeReplicas, make_state, says, tokenizer


def stats(steps: int, prompt: int = 0) -> Stats:
    counters = RankCounters(1, 2)
    for _ in range(steps):
        counters.begin_step("decode", 1)
        counters.add_bytes("routed", 10**9)
        counters.end_step(2.0)
    rank = rank_stats(0, encode_counters(counters), used_blocks=2, total_blocks=8)
    return Stats(
        num_running=3, num_waiting=1, num_preemptions=0, num_steps=steps, ranks=(rank,), num_prompt_tokens=prompt
    )


def test_line_comes_when_due_and_only_while_busy() -> None:
    state = make_state(FakeReplicas(tokenizer(), says("a")))
    line = StatsLine(state, interval=10.0)
    start = time.monotonic()
    assert line.tick(start + 5) is None
    assert line.tick(start + 11) is None  # nothing happened
    state.metrics.totals.generation_tokens = 50
    state.latest_stats = lambda: [stats(4, prompt=100)]
    state.refresh()
    assert line.tick(start + 12) is None
    text = line.tick(start + 31)
    assert text == (
        "running 3, waiting 1 | prompt 5.0 tok/s, generation 2.5 tok/s | KV 25.0 % | memory saturation 50 %"
    )
    assert line.tick(start + 45) is None


def test_line_shows_the_saturation_since_the_last_one() -> None:
    state = make_state(FakeReplicas(tokenizer(), says("a")))
    line = StatsLine(state, interval=10.0)
    start = time.monotonic()
    state.latest_stats = lambda: [stats(4)]
    state.refresh()
    line.tick(start + 11)
    state.metrics.totals.generation_tokens = 1
    assert "memory saturation 0 %" in str(line.tick(start + 22))


def test_progress_is_logged_in_quarters_off_a_terminal(caplog: pytest.LogCaptureFixture) -> None:
    display = LoadingDisplay()
    with caplog.at_level(logging.INFO), display.shown():
        for done in range(0, 101, 5):
            for rank in range(2):
                display.update(0, Loading(rank=rank, done_bytes=done << 20, total_bytes=100 << 20))
    lines = [record.getMessage() for record in caplog.records]
    assert len([line for line in lines if line.endswith("of 200 MiB")]) <= 4
    assert lines[-1] == "loading weights: 200 of 200 MiB"


def test_address_of_an_ipv6_host_has_brackets() -> None:
    assert address(ServerOptions(host="127.0.0.1"), 80) == "http://127.0.0.1:80"
    assert address(ServerOptions(host="::1", ssl_certfile="a.pem"), 80) == "https://[::1]:80"
