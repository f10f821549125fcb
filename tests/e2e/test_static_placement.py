"""Experts placed by a load file: the tokens of one rank, bit by bit with native kernels, from threads and a server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from moewe.moe.wide_ep.balancing import ExpertLoad, write_load
from moewe.moe.wide_ep.balancing.replay import load_of
from moewe.moe.wide_ep.placement import affinity_of, balanced_placement
from moewe.runtime.options import engine_config
from moewe.runtime.params import SamplingParams
from moewe.runtime.plan import pack
from moewe.runtime.recording import record_routing
from moewe.telemetry import SCOPES
from tests.runtime.test_placements import skewed
from tests.support.comparison import compare_runs
from tests.support.fixtures import checkpoint, random_prompt
from tests.support.harness import Group, generate, greedy
from tests.support.native import needs_native
from tests.support.server_process import NAME, ServerProcess
from tests.support.setups import Setup

PROMPTS = [random_prompt(length, seed=length) for length in (33, 1, 17, 50)]
TOPOLOGIES = ["EP2DP1[red=3]", "EP4DP1[red=5]", "EP4DP1[domains=2+2,red=4]"]


@pytest.mark.parametrize(
    ("name", "topology"),
    [*zip(["T-DS3", "T-QW3", "T-QW3"], TOPOLOGIES), pytest.param("T-DS3", TOPOLOGIES[2], marks=pytest.mark.slow)],
)
def test_placement_by_load_gives_the_logits_of_one_rank(name: str, topology: str) -> None:
    path = checkpoint(name)
    expected = generate(path, PROMPTS, setup=Setup())
    actual = generate(path, PROMPTS, setup=Setup(topology=topology, eplb_load=pack(skewed(name), "<i8")))
    compare_runs(actual.outcomes, expected.outcomes)


@needs_native
@pytest.mark.parametrize(("name", "topology"), [("T-QW3", TOPOLOGIES[0]), ("T-DS3", TOPOLOGIES[1])])
def test_placement_by_load_is_bitwise(name: str, topology: str) -> None:
    path = checkpoint(name, dtype="bfloat16")
    params = greedy(8, logprobs=2)
    setup = Setup(topology=topology, dtype="bfloat16", eplb_load=pack(skewed(name), "<i8"))
    expected = generate(path, PROMPTS, setup=Setup(dtype="bfloat16"), params=params).outcomes
    actual = generate(path, PROMPTS, setup=setup, params=params).outcomes
    for one, other in zip(expected, actual, strict=True):
        assert one.tokens == other.tokens
        assert [(p.token_ids, p.logprobs) for p in one.logprobs] == [(p.token_ids, p.logprobs) for p in other.logprobs]


def test_a_placement_by_the_load_that_comes_is_more_even() -> None:
    """Counted in real steps: the same prompts, placed evenly in number, then by what the first run counted."""
    path = checkpoint("T-QW3")
    fullest = []
    load = b""
    for _ in range(2):
        with Group(path, Setup(topology="EP4DP1[red=4]", eplb_load=load)) as group:
            for i, prompt in enumerate(PROMPTS * 3):
                group.submit(str(i), prompt, greedy(12))
            group.run()
            by_rank = np.stack([worker.counters.expert_tokens.sum(1) for worker in group.workers])  # [W, L]
            fullest.append(float((by_rank.max(0) / by_rank.mean(0)).mean()))
            load = pack(group.rows_per_expert(), "<i8")
    assert fullest[1] < fullest[0], fullest


@pytest.mark.slow
def test_counted_bytes_between_domains_fall_where_a_trace_tells_pairs() -> None:
    """Few different tokens: whatever chose two experts before chooses both again. Recorded, placed, served, counted."""
    path, topology = checkpoint("T-QW3"), "EP4DP1[domains=2+2]"
    rng = np.random.default_rng(2)
    prompts = [rng.choice([5, 17, 60, 91], 60).tolist() for _ in range(8)]
    num_experts = skewed().shape[1]
    options = {"model": "T-QW3", "path": str(path), "skip_tokenizer_init": True, "num_blocks": 256, "dtype": "float32"}
    params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
    load = load_of(record_routing(engine_config(options), prompts, params, most_tokens=10_000))
    affinity = [affinity_of(pairs, num_experts) for pairs in load.together]
    placed = balanced_placement(load.total, num_redundant=0, domains=(0, 0, 1, 1), affinity=affinity)
    crossing = []
    for slots in (b"", pack(placed.physical_to_logical, "<i4")):
        setup = Setup(topology=topology, eplb_load=pack(load.total, "<i8"), eplb_slots=slots, keep_logits=False)
        with Group(path, setup) as group:
            run_all(group, prompts)
            between = SCOPES.index("between")
            crossing.append(sum(int(worker.counters.exchange_bytes[between]) for worker in group.workers))
    assert 0 < crossing[1] < crossing[0], crossing


def run_all(group: Group, prompts: list[list[int]]) -> None:
    for i, prompt in enumerate(prompts):
        group.submit(str(i), prompt, greedy(2))
    group.run()


@pytest.mark.spawn
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_server_shows_replicas_and_answers_as_one_rank(tmp_path: Path) -> None:
    write_load(ExpertLoad(phases={"prefill": skewed()}), tmp_path / "load.json")
    plain, view = answers_and_map()
    assert view["eplb"] == "off" and not view["expert_replicas"]
    static = ("--eplb", "static", str(tmp_path / "load.json"))
    placed, view = answers_and_map("--topology", "EP2DP1[red=3]", *static)
    assert placed == plain and view["eplb"] == f"static {tmp_path / 'load.json'}"
    assert list(view["expert_replicas"].values()) == [[0, 1]] * 3


def answers_and_map(*flags: str) -> tuple[list[list[int]], dict[str, Any]]:
    """Return what a server generates for all prompts, and what /v1/topology says."""
    limits = ("--max-num-seqs", "8", "--kv-cache-memory-bytes", "8MiB", "--skip-tokenizer-init")
    with ServerProcess(checkpoint("T-QW3"), *limits, *flags) as server:
        bodies = [{"model": NAME, "prompt": prompt, "temperature": 0, "max_tokens": 12} for prompt in PROMPTS]
        fields = {"return_token_ids": True, "ignore_eos": True}
        answers = [httpx.post(f"{server.url}/v1/completions", json=body | fields, timeout=60) for body in bodies]
        assert all(answer.status_code == 200 for answer in answers), [answer.text for answer in answers]
        view = httpx.get(f"{server.url}/v1/topology", timeout=60).json()
        return [answer.json()["choices"][0]["token_ids"] for answer in answers], view
