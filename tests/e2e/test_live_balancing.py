"""`--eplb auto` whole: an engine and its ranks, as threads or processes, move experts for the traffic that comes."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path

import httpx
import pytest

from moewe.runtime import live_balance
from moewe.runtime.config import CacheOptions, EngineConfig, ModelOptions, ParallelOptions, ScheduleOptions
from moewe.runtime.plan import unpack
from moewe.runtime.rank_stats import BalanceStats
from moewe.runtime.rebalancing import balancer
from moewe.runtime.replicas import ReplicaSet
from moewe.runtime.session import Session
from tests.support.fixtures import checkpoint, random_prompt
from tests.support.harness import greedy
from tests.support.layer_models import Bold
from tests.support.native import needs_native
from tests.support.server_process import NAME, ServerProcess
from tests.support.steered import steered

MOST_TIMES = 40  # a busy machine decides and reads late
PROMPTS = [random_prompt(40, seed=i % 3) for i in range(40)]


@cache
def model() -> Path:
    """All tokens choose two experts, which stand on rank 0."""
    return steered(0, 1, dtype="bfloat16", num_experts_per_tok=2)


def config(topology: str, ranks: str, eplb: str) -> EngineConfig:
    path = str(model())
    return EngineConfig(
        model=ModelOptions(model=path, path=path, skip_tokenizer_init=True),
        parallel=ParallelOptions(topology=topology, ranks=ranks, threads=1, eplb=eplb),
        cache=CacheOptions(num_blocks=64),
        schedule=ScheduleOptions(max_num_seqs=4, max_num_batched_tokens=64, stall_timeout_s=60),
    )


def run(topology: str, ranks: str = "threads", eplb: str = "off") -> tuple[list[list[list[int]]], BalanceStats | None]:
    """Return what is generated for all prompts each time, and what has moved in the end; with auto until it did."""
    every: list[list[list[int]]] = []
    with Session.start(config(topology, ranks, eplb)) as session:
        for _ in range(MOST_TIMES if eplb == "auto" else 1):
            tokens: list[list[int]] = [[] for _ in PROMPTS]
            for i, delta in session.stream(PROMPTS, [greedy(12)] * len(PROMPTS)):
                tokens[i] += delta.token_ids
                assert delta.finish_reason in (None, "length"), delta
            every.append(tokens)
            balance = session._replicas.stats()[0].balance
            if balance is not None and balance.rounds > 1:
                break
        return every, balance


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines are threads of this process, decide after few tokens, and take a row for a second: every move pays."""
    monkeypatch.setattr(ReplicaSet, "start", partial(ReplicaSet.start, engines="threads"))
    monkeypatch.setenv(live_balance.WINDOW_VARIABLE, "128")
    monkeypatch.setattr(balancer, "COUNT_EVERY_S", 0.0)
    monkeypatch.setattr(balancer, "DECIDE_SHARE", 1.0)

    def bold(
        size: object, ceilings: object, slot_ranges: tuple[tuple[int, int], ...], domains: object, **_: object
    ) -> Bold:
        return Bold(slot_ranges)

    monkeypatch.setattr(live_balance, "LayerCost", bold)


RANKS = ["threads", pytest.param("processes", marks=[pytest.mark.spawn, pytest.mark.timeout(300)])]


@needs_native
@pytest.mark.slow
@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("topology", ["EP2DP1", "EP4DP1[red=2]"])
def test_experts_move_while_serving_and_tokens_stay(topology: str, ranks: str) -> None:
    (expected,), nothing = run("EP1DP1")
    assert nothing is None
    every, balance = run(topology, ranks, "auto")
    assert all(tokens == expected for tokens in every)
    assert balance is not None and balance.rounds > 0 and balance.moves > 0 and not balance.failures, balance
    assert balance.placement >= balance.rounds and balance.move_seconds > 0
    assert sorted(set(unpack(balance.slots).tolist())) == list(range(8)), "every expert stands somewhere"


@pytest.mark.spawn
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_server_with_auto_says_so_and_counts() -> None:
    flags = ("--topology", "EP2DP1[red=2]", "--eplb", "auto", "--max-num-seqs", "8", "--skip-tokenizer-init")
    with ServerProcess(checkpoint("T-QW3"), *flags, "--kv-cache-memory-bytes", "8MiB") as server:
        body = {"model": NAME, "prompt": PROMPTS[0], "temperature": 0, "max_tokens": 12, "ignore_eos": True}
        assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 200
        view = httpx.get(f"{server.url}/v1/topology", timeout=60).json()
        assert view["eplb"] == "auto" and view["replicas"][0]["failed_rounds"] == 0
        metrics = httpx.get(f"{server.url}/metrics", timeout=60).text
        assert 'moewe_balance_rounds_total{outcome="failed",replica="0"} 0.0' in metrics
        assert 'moewe_balance_gain_seconds{kind="realised",replica="0"}' in metrics
