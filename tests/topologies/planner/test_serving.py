"""What users get: Little's law holds, queues are those of textbooks, and what binds is named."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moewe.topologies import TopologyError, parse_topology
from moewe.topologies.planner.flags import foreign_flags
from moewe.topologies.planner.money import cost
from moewe.topologies.planner.serving import (
    MOST_BUSY,
    Pool,
    Workload,
    decode_step,
    parse_workload,
    queue_seconds,
    serve,
)
from tests.topologies.planner.test_step_time import setting

LOAD = Workload(isl=20, osl=10, concurrency=16)


def pool(topology: str = "EP2DP2", *, chunk: int = 8, most: int = 100) -> Pool:
    return Pool(setting=setting(topology), chunk=chunk, most_sequences=most)


@pytest.mark.parametrize("prefill", [None, "EP1DP4"])
def test_as_many_requests_are_in_the_system_as_users_wait_for(prefill: str | None) -> None:
    served = serve(pool(), LOAD, None if prefill is None else pool(prefill))
    assert served.requests * (served.ttft + LOAD.osl * served.tpot) == pytest.approx(LOAD.concurrency, rel=1e-3)
    assert served.output_rate == pytest.approx(served.requests * 10)
    assert served.total_rate == pytest.approx(3 * served.output_rate)
    assert served.user_rate == 1 / served.tpot and served.num_gpus == (4 if prefill is None else 8)
    assert served.decode_gpus == 4 and 0 < served.batch <= 4


def test_more_users_wait_longer_and_more_is_served_until_something_binds() -> None:
    rates = [serve(pool(), replace(LOAD, concurrency=n)) for n in (4, 16, 64)]
    assert [r.output_rate for r in rates] == sorted(r.output_rate for r in rates)
    assert [r.tpot for r in rates] == sorted(r.tpot for r in rates)
    full = serve(pool(most=2), replace(LOAD, concurrency=400))
    assert full.limit == "kv" and full.batch == pytest.approx(2, rel=1e-6) and full.waiting > 0
    starved = serve(pool(), replace(LOAD, concurrency=4000), pool("EP1DP1", chunk=1))
    assert starved.limit == "prefill" and starved.waiting > 0.5 * starved.ttft


def test_prefix_hits_save_prompts_and_not_kv() -> None:
    half = replace(LOAD, hit=0.5)
    assert half.new_tokens == 10 and half.context == LOAD.context
    assert serve(pool(), half).requests > serve(pool(), LOAD).requests


def test_drafts_commit_more_tokens_for_a_longer_step() -> None:
    drafted = replace(LOAD, drafts=1, acceptance=0.8)
    assert drafted.tokens_a_step == pytest.approx(1.8)
    assert replace(LOAD, drafts=3, acceptance=0.5).tokens_a_step == 1 + 0.5 + 0.25 + 0.125
    assert replace(LOAD, drafts=2, acceptance=1.0).tokens_a_step == 3
    plain, longer = decode_step(setting(), LOAD, 2), decode_step(setting(), drafted, 2)
    assert plain.seconds < longer.seconds < 2 * plain.seconds and longer.part("drafts").seconds > 0


def test_queues_of_textbooks() -> None:
    assert queue_seconds(0.5, 1, 2.0) == pytest.approx(0.5 * 2 / (2 * 0.5))  # M/D/1: Pollaczek, Khinchine
    assert queue_seconds(0.9, 1, 1.0) == pytest.approx(4.5)
    assert queue_seconds(0.5, 8, 2.0) < queue_seconds(0.5, 2, 2.0) < queue_seconds(0.5, 1, 2.0)
    assert queue_seconds(0.0, 4, 2.0) == 0 and MOST_BUSY < 1


def test_cost_and_energy() -> None:
    served = serve(pool(), LOAD)
    spent = cost(served, price=3.6, watts=500)
    assert spent.per_million == pytest.approx(served.num_gpus * 1e-3 / served.output_rate * 1e6)
    assert spent.joules == pytest.approx(500 * served.num_gpus / served.output_rate)
    assert cost(served, price=None, watts=None) == cost(served, price=None, watts=0)


def test_workloads_in_words() -> None:
    made = parse_workload("isl=100, osl=50,concurrency=7,hit=0.25,drafts=2,acceptance=0.7")
    assert made == Workload(isl=100, osl=50, concurrency=7, hit=0.25, drafts=2, acceptance=0.7)
    assert parse_workload("") == Workload()


@pytest.mark.parametrize(
    "text", ["isl", "isl=0", "isl=1.5", "hit=2", "osl=x", "isl=1,isl=2", "depth=3", "isl=nan", "concurrency=1e99"]
)
def test_workloads_that_are_refused(text: str) -> None:
    with pytest.raises(TopologyError, match="workload") as error:
        parse_workload(text)
    assert "\n" not in str(error.value)


def test_the_same_layout_elsewhere() -> None:
    flags = foreign_flags(parse_topology("EP16DP3[red=32]"), "m")
    assert flags["vllm"][0].startswith("# 3 times, each on 16 GPUs")
    assert "--tensor-parallel-size 1 --data-parallel-size 16 --enable-expert-parallel" in flags["vllm"][1]
    assert '"num_redundant_experts": 32' in flags["vllm"][1]
    assert "--tp 16 --dp 16 --enable-dp-attention --ep 16" in flags["sglang"][1]
    assert "enable_attention_dp: true" in " ".join(flags["tensorrt-llm"])
    divided = foreign_flags(parse_topology("EP8DP1[adp=4,atp=2]"), "m")
    assert "--tensor-parallel-size 2 --data-parallel-size 4" in divided["vllm"][0]
    assert "--tp 8 --dp 4 --enable-dp-attention" in divided["sglang"][0]
    assert divided["tensorrt-llm"][0].startswith("# not possible")
    alone = foreign_flags(parse_topology("EP8DP1[atp=8,adp=1]"), "m")
    assert "data-parallel" not in alone["vllm"][0] and "enable_attention_dp: false" in " ".join(alone["tensorrt-llm"])
    assert foreign_flags(parse_topology("EP1DP1"), "m")["vllm"] == ["vllm serve m --tensor-parallel-size 1"]
