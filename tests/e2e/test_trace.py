"""Step traces of real engines: every path through the layers has its parts, ranks agree, and tokens are the same."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from moewe.native.library import load
from moewe.runtime.config import CacheOptions, EngineConfig, ModelOptions, ParallelOptions, ScheduleOptions
from moewe.runtime.params import SamplingParams
from moewe.runtime.plan import StepPlan
from moewe.runtime.prompts import packed
from moewe.runtime.replicas import ReplicaSet
from moewe.server.trace.chrome import TraceFacts, chrome_trace
from moewe.telemetry import step_clock
from tests.support.fixtures import checkpoint, random_prompt
from tests.support.harness import Group, Outcome, greedy
from tests.support.polling import finish
from tests.support.server_process import NAME, ServerProcess
from tests.support.setups import Setup
from tests.support.traces import check_trace

FACTS = TraceFacts(version="1", model="m", topology="t")
STEPS = 6
HOST = {"inputs", "head", "sampling", "results"}


@contextmanager
def running(name: str, topology: str, ranks: str, dtype: str) -> Iterator[ReplicaSet]:
    replicas = ReplicaSet.start(
        EngineConfig(
            model=ModelOptions(
                model=name, path=str(checkpoint(name, dtype=dtype)), skip_tokenizer_init=True, max_model_len=512
            ),
            parallel=ParallelOptions(topology=topology, ranks=ranks, threads=1),
            cache=CacheOptions(num_blocks=64),
            schedule=ScheduleOptions(max_num_seqs=8, max_num_batched_tokens=64),
        )
    )
    try:
        replicas.wait_ready(120)
        yield replicas
    finally:
        replicas.close()


def ask(replicas: ReplicaSet, count: int = 2) -> None:
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=1, ignore_eos=True)
    for i in range(count):
        replicas.submit(str(i), packed(random_prompt(10 + i, seed=i)), params)
    told, ended = finish(replicas, count, seconds=100)
    assert set(ended.values()) == {"length"} and all(len(tokens) == 12 for tokens in told.values())


def traced(replicas: ReplicaSet, num_steps: int = STEPS) -> dict[str, Any]:
    session = replicas.trace(num_steps)
    try:
        ask(replicas)
        deadline = time.monotonic() + 30
        while not session.is_done:
            assert time.monotonic() < deadline
            replicas.poll(0.1)
        document: dict[str, Any] = json.loads(chrome_trace(session.traces, num_steps, "", FACTS))
        return document
    finally:
        session.close()


def names(document: dict[str, Any], rank: int = 0) -> set[str]:
    return {one["name"] for one in document["traceEvents"] if one["ph"] == "X" and one["tid"] == 1 + rank}


PATHS = [
    ("T-QW3", "EP1DP1", "threads", "bfloat16", {"attention", "routing", "experts"}),
    ("T-QW2", "EP1DP1", "threads", "bfloat16", {"shared"}),
    ("T-DS3", "EP2DP1", "threads", "bfloat16",
     {"attention", "routing", "dispatch", "experts", "shared", "combine", "dense"}),
    ("T-DS3", "EP2DP1[domains=1+1,delay=50]", "threads", "bfloat16", {"dispatch", "experts", "shared", "combine"}),
    ("T-QW3", "EP2DP1", "threads", "float32", {"attention", "routing", "dispatch", "experts", "combine"}),
    pytest.param("T-QW3", "EP2DP1[atp=2]", "threads", "float32", {"attention", "combine", "wait for ranks"},
                 marks=pytest.mark.slow),
    pytest.param("T-DS3", "EP2DP1", "processes", "bfloat16",
                 {"attention", "routing", "dispatch", "wait for ranks", "experts", "shared", "combine", "dense"},
                 marks=[pytest.mark.slow, pytest.mark.spawn]),
    pytest.param("T-QW3", "EP2DP2", "processes", "bfloat16", {"wait for ranks", "dispatch"},
                 marks=[pytest.mark.slow, pytest.mark.spawn]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "topology", "ranks", "dtype", "parts"), PATHS)
def test_every_path_has_its_parts_and_nothing_stays_on(
    name: str, topology: str, ranks: str, dtype: str, parts: set[str]
) -> None:
    with running(name, topology, ranks, dtype) as replicas:
        document = traced(replicas)
        session = replicas.trace(1000)  # nothing runs, so nothing is recorded
        session.stop()
        while not session.is_done:
            replicas.poll(0.1)
        session.close()
        ask(replicas)
    num_ranks, num_replicas = int(topology[2]), int(topology[5])
    check_trace(document, num_ranks=[num_ranks] * num_replicas, num_steps=[STEPS] * num_replicas)
    assert [trace.steps for trace in session.traces if trace is not None] == [()] * num_replicas
    for rank in range(num_ranks):
        wanted = parts | (HOST if rank == 0 or "atp" not in topology else {"inputs", "results"})
        assert load() is None or wanted <= names(document, rank), names(document, rank)


class TracedGroup(Group):
    """A group whose every step is traced."""

    def _submit(self, plan: StepPlan) -> None:
        header = msgspec.structs.replace(plan.header, traced=True)
        super()._submit(msgspec.structs.replace(plan, header=header))


def outcomes(group: type[Group], name: str, dtype: str, **setup: Any) -> list[Outcome]:
    with group(checkpoint(name, dtype=dtype), Setup(dtype=dtype, max_chunk_tokens=7, **setup)) as running:
        params = [greedy(8, logprobs=2), SamplingParams(max_tokens=8, temperature=0.9, seed=3, ignore_eos=True)]
        for i, length in enumerate((20, 3, 9)):
            running.submit(str(i), random_prompt(length, seed=i), params[i % 2], seed=i)
        return list(running.run().values())


@pytest.mark.parametrize(
    ("name", "dtype", "setup"),
    [
        ("T-DS3", "bfloat16", {"topology": "EP1DP1"}),
        ("T-DS3", "bfloat16", {"topology": "EP2DP1"}),
        ("T-DS3", "bfloat16", {"topology": "EP2DP1", "exchange": "all_to_all", "overlap": "on"}),
        ("T-QW3", "float32", {"topology": "EP2DP1"}),
    ],
    ids=lambda value: "-".join(value.values()) if isinstance(value, dict) else value,
)
def test_a_trace_changes_no_bit_and_without_one_nothing_is_marked(
    name: str, dtype: str, setup: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(step_clock, "StepMarks", None)  # to make any would raise
        plain = outcomes(Group, name, dtype, **setup)
    watched = outcomes(TracedGroup, name, dtype, **setup)
    for one, other in zip(plain, watched, strict=True):
        assert one.tokens == other.tokens and torch.equal(one.logits_of_all(), other.logits_of_all())
        assert [(x.token_ids, x.logprobs) for x in one.logprobs] == [(x.token_ids, x.logprobs) for x in other.logprobs]


def moewe_trace(*words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "moewe", "trace", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


@pytest.mark.slow
@pytest.mark.spawn
@pytest.mark.timeout(600)
def test_the_command_traces_a_server_at_work_an_idle_one_and_lets_go(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    with ServerProcess("demo", topology="EP2DP1") as server:
        client = server.client()
        busy = threading.Thread(
            target=client.completions.create,
            kwargs={"model": NAME, "prompt": "The gull", "max_tokens": 40, "extra_body": {"ignore_eos": True}},
        )
        work = moewe_trace(server.url, "--steps", "10", "--output", str(path))
        while not server.get("/v1/trace").json()["recording"]:
            time.sleep(0.05)
        busy.start()
        out, err = work.communicate(timeout=120)
        assert work.returncode == 0, err
        busy.join(120)
        check_trace(json.loads(path.read_text()), num_ranks=[2], num_steps=[10])
        assert "experts" in out and "rank 0.1" in out and "steps 10" in out
        path.unlink()

        idle = moewe_trace(server.url, "--idle-timeout", "0.3", "--output", str(path))
        _, err = idle.communicate(timeout=120)
        assert idle.returncode == 1 and "no step within 0.3 s: idle" in err and not path.exists()

        gone = moewe_trace(server.url, "--idle-timeout", "60", "--output", str(path))
        while not server.get("/v1/trace").json()["recording"]:
            time.sleep(0.05)
        gone.send_signal(signal.SIGINT)
        gone.communicate(timeout=20)
        assert gone.returncode == 130 and not path.exists()
        deadline = time.monotonic() + 10
        while server.get("/v1/trace").json()["recording"]:
            assert time.monotonic() < deadline
            time.sleep(0.05)
