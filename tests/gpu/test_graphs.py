"""The whole runtime with its decode steps captured and replayed, on a device that records: the bits of eager steps."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moewe.moe.wide_ep.exchanges import PaddedExchange
from moewe.moe.wide_ep.exchanges.links import Link
from moewe.moe.wide_ep.exchanges.rehearsed_link import RehearsedLink
from moewe.moe.wide_ep.exchanges.thread_links import ThreadMeetings
from moewe.runtime.graphs import starting
from moewe.runtime.graphs.ladder import GraphLadder, token_classes
from moewe.runtime.params import SamplingParams
from tests.gpu.test_wired import SMALL, SMALLER
from tests.support.fixtures import checkpoint, random_prompt
from tests.support.harness import Group, greedy
from tests.support.numerics import assert_same
from tests.support.recorded_graphs import RecordedLink, RecordingDevice, recorded_launches
from tests.support.setups import Setup

SETUP = replace(SMALL, num_blocks=12, max_num_seqs=4, keep_logits=False)
PROMPTS = [random_prompt(length, seed=length) for length in (6, 1, 3)]


def out_of_memory(number: int) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


class Devices:
    """Of all ranks of the groups that a test makes; from the `num_healthy`th on they capture nothing.

    Steps then run eagerly with as many rows, for torch's products depend on their number.
    """

    def __init__(self) -> None:
        self.num_healthy = 100
        self.late = False
        self.rows: tuple[int, ...] = (4,)
        self.made: list[RecordingDevice] = []

    @property
    def num_replays(self) -> int:
        return sum(graph.num_replays for device in self.made for graph in device.graphs)


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[Devices]:
    found = Devices()

    numbers = itertools.count()

    def device(config: Any) -> RecordingDevice:
        made = RecordingDevice(None if next(numbers) < found.num_healthy else out_of_memory)
        found.made.append(made)
        return made

    def ladder(config: Any, exchange: str, max_model_len: int) -> GraphLadder:
        return GraphLadder(rows=found.rows, tokens=token_classes(max_model_len), exchange=exchange)

    link = ThreadMeetings.link

    def recorded(self: ThreadMeetings, ranks: Sequence[int], rank: int) -> Link:
        return RehearsedLink(RecordedLink(link(self, ranks, rank), late=found.late))

    monkeypatch.setattr(starting, "graph_device", device)
    monkeypatch.setattr(starting, "ladder_of", ladder)
    monkeypatch.setattr(ThreadMeetings, "link", recorded)
    monkeypatch.setattr(PaddedExchange, "_check", lambda *_: None)  # on a GPU nobody looks
    with recorded_launches(monkeypatch):
        yield found


class Run:
    """What a group made of some prompts: tokens, and of every rank KV and counters."""

    def __init__(
        self,
        path: Path,
        setup: Setup,
        params: SamplingParams,
        prompts: Sequence[Sequence[int]] = PROMPTS,
    ) -> None:
        with Group(path, setup) as group:
            outcomes = [group.submit(f"request-{i}", prompt, params) for i, prompt in enumerate(prompts)]
            group.run()
            self.tokens = [outcome.tokens for outcome in outcomes]
            self.num_decodes = sum(step.kind == "decode" for step in group.steps)
            self.counters = [worker.counters for worker in group.workers]
            self.kv = [tensor.clone() for worker in group.workers for own in worker.storage._tensors for tensor in own]
        assert not any(outcome.error for outcome in outcomes)


def assert_equal(graphed: Run, eager: Run) -> None:
    assert graphed.tokens == eager.tokens
    for own, other in zip(graphed.kv, eager.kv, strict=True):
        assert_same(own, other)
    for ours, theirs in zip(graphed.counters, eager.counters, strict=True):
        for name in (
            "expert_tokens",
            "expert_decode_tokens",
            "tokens",
            "steps",
            "bytes_moved",
            "flops",
            "exchange_bytes",
        ):
            np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name), name)


def both(devices: Devices, path: Path, setup: Setup, params: SamplingParams, **more: Any) -> tuple[Run, Run]:
    """Run with graphs and without."""
    graphed = Run(path, setup, params, **more)
    devices.num_healthy = 0
    return graphed, Run(path, setup, params, **more)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["T-GOS", "T-DS3"])
def test_replays_have_the_bits_the_kv_and_the_counts_of_eager_steps(name: str, devices: Devices) -> None:
    """Three sequences in graphs of four rows, of which the last is nobody's."""
    graphed, eager = both(devices, checkpoint(name, **SMALLER[name]), SETUP, greedy(3))
    assert devices.num_replays == graphed.num_decodes > 0
    assert_equal(graphed, eager)


@pytest.mark.slow
def test_chance_and_penalties_work_on_the_logits_of_a_replay(devices: Devices) -> None:
    params = SamplingParams(
        max_tokens=6, temperature=0.8, top_p=0.9, seed=3, ignore_eos=True, presence_penalty=0.5, logprobs=2
    )
    graphed, eager = both(devices, checkpoint("T-MIX", **SMALLER["T-MIX"]), SETUP, params)
    assert devices.num_replays == graphed.num_decodes
    assert_equal(graphed, eager)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num_prompts", "payload", "num_healthy"), [("T-DS3", 1, "fp8", 2), ("T-MIX", 3, "auto", 1)],
    ids=["one-without-rows", "one-without-a-graph"],
)  # fmt: skip
def test_two_ranks_keep_step(
    name: str, num_prompts: int, payload: str, num_healthy: int, devices: Devices, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows travel as late as they may in a replay; of a model with shared experts these run meanwhile."""
    setup = replace(SETUP, topology="EP2DP1", exchange="padded", exchange_payload=payload)
    devices.num_healthy, devices.late = num_healthy, True
    graphed, eager = both(devices, checkpoint(name, **SMALLER[name]), setup, greedy(3), prompts=PROMPTS[:num_prompts])
    for graph in (graph for device in devices.made for graph in device.graphs):
        dispatches, answers = graph.meanwhile()[::2], graph.meanwhile()[1::2]
        assert dispatches and len(answers) == len(dispatches)
        assert all(names.count("linear") == (2 if name == "T-DS3" else 0) for names in dispatches)
    assert devices.num_replays == num_healthy * graphed.num_decodes > 0
    assert_equal(graphed, eager)
    assert "4 rows of up to 16 tokens cannot be captured and run eagerly: CUDA out of memory" in caplog.text
