"""Whole models whose rows go in two halves: the bits of one rank in the bitwise class, the tokens of one elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from msgspec.structs import replace

from moewe.runtime.params import SamplingParams
from moewe.runtime.prompts import packed
from moewe.runtime.replicas import ReplicaSet
from tests.e2e.test_bitwise import PARAMS, PROMPTS, alone, assert_bitwise
from tests.runtime.test_generation import FIXTURE, READY_S, config
from tests.support.comparison import compare_runs
from tests.support.fixtures import checkpoint, reference_greedy
from tests.support.harness import Run, generate
from tests.support.native import needs_native
from tests.support.polling import finish
from tests.support.setups import Setup

FAMILIES = ["T-QW3", "T-GLM-demo", "T-DS3"]
LINKS = [
    ("EP2DP1", "all_to_all"),
    ("EP4DP1[domains=2+2]", "all_to_all"),
    ("EP4DP1[domains=2+2,rate=2000,delay=20]", "all_to_all"),
    ("EP4DP1", "padded"),
]
HALVES = [
    pytest.param(name, *link, marks=() if turn % 2 == i and name != "T-DS3" else pytest.mark.slow)
    for i, name in enumerate(FAMILIES)
    for turn, link in enumerate(LINKS)
]


def run(name: str, dtype: str, **setup: Any) -> Run:
    """All prompts at once: ranks without rows, with one, and with odd numbers of them come by themselves."""
    path = checkpoint(name, dtype="bfloat16") if dtype == "bfloat16" else checkpoint(name)
    return generate(path, PROMPTS, setup=Setup(dtype=dtype, **setup), params=PARAMS)


def rows_seen(run: Run) -> set[int]:
    return {rows for group in run.groups for step in group.steps for rows in step.rows}


@needs_native
@pytest.mark.parametrize(("name", "topology", "exchange"), HALVES)
def test_halves_give_the_bits_of_one_rank(name: str, topology: str, exchange: str) -> None:
    found = run(name, "bfloat16", topology=topology, exchange=exchange, overlap="on", max_chunk_tokens=7)
    assert {step.overlap for step in found.groups[0].steps} == {"halves"}
    seen = rows_seen(found)
    assert {0, 1} <= seen and any(rows > 1 and rows % 2 for rows in seen)
    for outcome, expected in zip(found.outcomes, alone(name, "auto"), strict=True):
        assert_bitwise(outcome, expected)


@needs_native
@pytest.mark.parametrize(
    "topology",
    [
        pytest.param("EP4DP1[domains=2+2]", marks=pytest.mark.slow),
        "EP4DP1[domains=3+1]",
        "EP2DP1[domains=1+1,delay=50]",
    ],
)
def test_domains_that_add_for_themselves_give_the_bits_they_give_without_overlap(topology: str) -> None:
    ways = {
        overlap: run("T-GLM-demo", "bfloat16", topology=topology, overlap=overlap) for overlap in ("off", "on", "auto")
    }
    for overlap, steps in (("off", "none"), ("on", "halves"), ("auto", "shared")):
        assert {step.overlap for step in ways[overlap].groups[0].steps} == {steps}
        for outcome, expected in zip(ways[overlap].outcomes, ways["off"].outcomes, strict=True):
            assert_bitwise(outcome, expected)


@pytest.mark.parametrize(
    ("name", "exchange"), [("T-QW3", "all_to_all"), ("T-DS3", "hierarchical"), ("T-QW3", "padded")]
)
def test_in_torch_halves_give_the_logits_of_one_rank(name: str, exchange: str) -> None:
    expected = run(name, "float32")
    actual = run(name, "float32", topology="EP4DP1[domains=2+2]", exchange=exchange, overlap="on")
    compare_runs(actual.outcomes, expected.outcomes)


@needs_native
def test_ranks_that_divide_heads_halve_their_own_rows() -> None:
    ways = [
        run("T-QW3", "bfloat16", topology="EP4DP1[adp=2,atp=2]", exchange="all_to_all", overlap=overlap)
        for overlap in ("off", "on")
    ]
    for one, other in zip(*(way.outcomes for way in ways), strict=True):
        assert one.tokens == other.tokens
        assert torch.equal(one.logits_of_all(), other.logits_of_all())


@pytest.mark.spawn
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("exchange", "domains"),
    [("auto", "EP4DP1[domains=2+2"), ("all_to_all", "EP2DP1[domains=1+1"), ("padded", "EP2DP1[domains=1+1")],
)
def test_processes_over_a_slowed_link_answer_as_the_reference(exchange: str, domains: str) -> None:
    made = config(checkpoint(FIXTURE), f"{domains},rate=100,delay=500]")
    replicas = ReplicaSet.start(replace(made, parallel=replace(made.parallel, exchange=exchange, overlap="on")))
    try:
        replicas.wait_ready(READY_S)
        for i, prompt in enumerate(PROMPTS):
            replicas.submit(f"r{i}", packed(prompt), SamplingParams(max_tokens=16, temperature=0, ignore_eos=True))
        told, ended = finish(replicas, len(PROMPTS), seconds=240)
        assert set(ended.values()) == {"length"}
    finally:
        replicas.close()
    for i, prompt in enumerate(PROMPTS):
        assert told[f"r{i}"] == reference_greedy(checkpoint(FIXTURE), prompt, 16), i
