"""From options and measurements to the overlap of every plan, whichever way the plan is made."""

from __future__ import annotations

import logging
import math
from dataclasses import replace

import pytest
from msgspec.structs import replace as changed

from moewe.runtime.config import EngineConfig
from moewe.runtime.kernels import exchange_rule
from moewe.runtime.options import layout_config
from moewe.runtime.overlap import log_overlap, overlap_facts
from moewe.runtime.plan import StepPlan
from moewe.topologies import RankGrid, parse_topology
from moewe.topologies.cost import Link
from moewe.topologies.machine import GPU_CEILINGS, HOST_CEILINGS
from moewe.topologies.overlap_choice import OverlapFacts
from tests.runtime.test_scheduler_random import config_of
from tests.support.null_worker import NullEngine, make_request
from tests.topologies.test_overlap_choice import LOAD

SLOW = "EP4DP1[domains=2+2,rate=200,delay=500]"


def options(topology: str, **changes: object) -> EngineConfig:
    made = layout_config({"model": "m", "topology": topology})
    return changed(made, parallel=changed(made.parallel, **changes))


def facts(
    topology: str, *, domain_size: int = 64, measured: tuple[float, float] | None = None, **changes: object
) -> OverlapFacts:
    memory, matrix = measured or (None, None)
    grid = RankGrid(parse_topology(topology), domain_size)
    return overlap_facts(options(topology, **changes), grid, LOAD, memory_bandwidth=memory, matrix_rate=matrix)


def test_the_link_is_the_slowest_that_rows_cross() -> None:
    assert facts(SLOW).link == Link(bandwidth=2e8, latency=5e-4)
    assert facts("EP2DP1[domains=1+1,delay=70]").link == Link(bandwidth=math.inf, latency=7e-5)
    for on_one_host in ("EP4DP1", "EP4DP1[domains=2+2]"):
        assert facts(on_one_host).link is None, "cores that compute carry the rows"
    assert facts("EP16DP1", device="cuda", domain_size=8).link == GPU_CEILINGS.between
    assert facts("EP16DP1", device="cuda", domain_size=16).link == GPU_CEILINGS.within


def test_what_was_measured_goes_before_round_numbers() -> None:
    assumed, known = facts("EP2DP2").ceilings, facts("EP2DP2", measured=(1e9, 3e11)).ceilings
    assert assumed.memory_bandwidth == HOST_CEILINGS.memory_bandwidth / 4 and assumed.flops == HOST_CEILINGS.flops / 4
    assert (known.memory_bandwidth, known.flops) == (1e9, 3e11)
    assert facts("EP2DP2", device="cuda").ceilings == GPU_CEILINGS


@pytest.mark.parametrize(
    ("topology", "changes", "words"),
    [
        (SLOW, {}, "two halves in steps of some 1024 rows a rank and more"),
        ("EP4DP1[domains=2+2]", {}, "no step gains by two halves"),
        (SLOW, {"overlap": "off"}, None),
        ("EP4DP1", {}, None),
    ],
)
def test_one_line_says_from_where_on_halves_are_chosen(
    topology: str, changes: dict[str, object], words: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    rule = exchange_rule(options(topology, **changes), parse_topology(topology), has_native=True)
    log_overlap(rule, facts(topology, **changes), 4096)
    said = [record.getMessage() for record in caplog.records]
    assert (words is None and not said) or (words is not None and len(said) == 1 and words in said[0])


def plans(**known: object) -> list[StepPlan]:
    """Of two requests over two ranks: prompts, then decodes that are planned the short way."""
    base = config_of("tiny pool")
    engine = NullEngine(replace(base, exchange="hierarchical", **known), depth=1)  # type: ignore[arg-type]
    for number in range(2):
        engine.add(make_request(f"r{number}", 4, 12, ignore_eos=True))
    engine.run(50)
    return engine.plans


@pytest.mark.parametrize(("asked", "steps"), [("on", "halves"), ("off", "none"), ("auto", "shared")])
def test_every_plan_says_what_overlaps(asked: str, steps: str) -> None:
    made = plans(overlap_facts=facts("EP2DP1[domains=1+1,rate=200]", overlap=asked))
    assert {plan.header.kind for plan in made} >= {"prefill", "decode"}
    assert {plan.header.overlap for plan in made} == {steps}


def test_without_facts_nothing_overlaps() -> None:
    assert {plan.header.overlap for plan in plans()} == {"none"}
