"""The whole runtime on a real checkpoint: the tokens of the reference, from threads and processes; no survivors."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moewe.runtime.config import CacheOptions, EngineConfig, ModelOptions, ParallelOptions, ScheduleOptions
from moewe.runtime.metrics.export import Metrics
from moewe.runtime.metrics.stats import decode_counters
from moewe.runtime.params import SamplingParams
from moewe.runtime.processes.supervision import process_state
from moewe.runtime.prompts import packed
from moewe.runtime.replicas import ReplicaLost, ReplicaSet
from moewe.runtime.session import Session
from tests.support.fixtures import checkpoint, random_prompt, reference_greedy
from tests.support.polling import finish

ROOT = Path(__file__).parents[2]
FIXTURE = "T-QW3"
READY_S = 120


def config(path, topology, ranks="processes", **schedule):
    return EngineConfig(
        model=ModelOptions(model=FIXTURE, path=str(path), skip_tokenizer_init=True, max_model_len=512),
        parallel=ParallelOptions(topology=topology, ranks=ranks, threads=1),
        cache=CacheOptions(num_blocks=64),
        schedule=ScheduleOptions(max_num_seqs=8, max_num_batched_tokens=32, **schedule),
    )


def start(topology, ranks="processes", **schedule):
    replicas = ReplicaSet.start(config(checkpoint(FIXTURE), topology, ranks, **schedule))
    try:
        replicas.wait_ready(READY_S)
    except BaseException:
        replicas.close()
        raise
    return replicas


def descendants(replicas):
    """Return the pids of all engines and ranks that are processes."""
    ranks = {pid for ready in replicas.ready for pid in ready.pids}
    return sorted({*ranks, *(replica.member.pid for replica in replicas._replicas)} - {os.getpid()})


def is_gone(pid):
    return process_state(pid) in (None, "Z")


def wait_gone(pids, seconds=10.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if all(is_gone(pid) for pid in pids):
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize(
    ("topology", "ranks"),
    [
        ("EP1DP1", "threads"),
        ("EP2DP1", "threads"),
        ("EP2DP1[atp=2]", "threads"),
        # tests/moewe/test_llm_real.py has two processes in every run
        pytest.param("EP2DP1", "processes", marks=[pytest.mark.spawn, pytest.mark.slow]),
        pytest.param("EP2DP1[atp=2]", "processes", marks=[pytest.mark.spawn, pytest.mark.slow]),
        pytest.param("EP2DP2", "processes", marks=[pytest.mark.spawn, pytest.mark.slow]),
    ],
)
def test_tokens_are_those_of_the_reference(topology, ranks):
    before = len(os.listdir("/proc/self/fd"))
    replicas = start(topology, ranks)
    pids = descendants(replicas)
    prompts = {f"r{i}": random_prompt(3 + 11 * i, seed=i) for i in range(7)}
    for name, prompt in prompts.items():
        replicas.submit(name, packed(prompt), SamplingParams(max_tokens=16, temperature=0, ignore_eos=True))
    told, ended = finish(replicas, len(prompts))
    assert set(ended.values()) == {"length"}
    for name, prompt in prompts.items():
        assert told[name] == reference_greedy(checkpoint(FIXTURE), prompt, 16), name
    deadline = time.monotonic() + 10
    while any(s.num_running or not s.num_steps for s in replicas.stats()) and time.monotonic() < deadline:
        replicas.poll(0.1)
    for stats in replicas.stats():
        assert stats.num_running == stats.num_waiting == 0
        assert [rank.used_blocks for rank in stats.ranks] == [0] * len(stats.ranks)
        assert len({bytes(rank.steps) for rank in stats.ranks}) == 1, "ranks did not keep step"
    replicas.close()
    assert all(process_state(pid) is None for pid in pids)
    assert ranks == "threads" or len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize(("topology", "slots"), [("EP4DP1", [3, 3, 2, 2]), ("EP4DP1[red=1]", [3, 3, 3, 2])])
def test_metrics_say_how_many_experts_a_rank_holds(topology, slots):  # P-LOAD-24
    replicas = ReplicaSet.start(config(checkpoint(FIXTURE, num_experts=10), topology, "threads"))
    try:
        replicas.wait_ready(READY_S)
        metrics = Metrics(version="1", model="m", topology=topology)
        metrics.set_ready(0, replicas.ready[0])
    finally:
        replicas.close()
    shown = re.findall(
        r'^moewe_expert_slots\{rank="(\d)",replica="0"\} ([\d.]+)$', metrics.render().decode(), re.MULTILINE
    )
    assert [(int(rank), float(held)) for rank, held in shown] == list(enumerate(slots))


@pytest.mark.parametrize("ranks", ["threads", pytest.param("processes", marks=[pytest.mark.spawn, pytest.mark.slow])])
def test_last_counters_come_though_the_request_was_aborted(ranks):
    replicas = start("EP2DP1", ranks)
    replicas.submit("a", packed(random_prompt(20)), SamplingParams(max_tokens=480, temperature=0, ignore_eos=True))
    while not replicas.poll(0.5):
        continue
    replicas.abort("a")
    deadline = time.monotonic() + 10

    def counted():
        stats = replicas.stats()[0]
        steps = [int(decode_counters(rank).steps.sum()) for rank in stats.ranks]
        return stats.num_running == 0 < stats.num_steps and steps == [stats.num_steps] * 2

    while not counted():
        assert time.monotonic() < deadline, replicas.stats()
        replicas.poll(0.1)
    replicas.close()


def test_a_session_counts_preemptions():
    """64 blocks of 16 tokens are few for eight sequences of 220."""
    with Session.start(config(checkpoint(FIXTURE), "EP1DP1", "threads")) as session:
        assert session.num_preemptions() == 0
        params = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)
        deltas = list(session.stream([random_prompt(20, seed=i) for i in range(8)], [params] * 8))
        assert sum(len(delta.token_ids) for _, delta in deltas) == 8 * 200
        counted = session.num_preemptions()
        assert 0 < counted == session.num_preemptions()


@pytest.mark.spawn
@pytest.mark.slow  # tests/runtime/test_launch.py kills a rank without a model
@pytest.mark.parametrize("busy", [True, False])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_lost_rank_ends_everything_within_ten_seconds(number, busy):
    replicas = start("EP2DP1", stall_timeout_s=3.0)
    pids = descendants(replicas)
    if busy:
        replicas.submit("a", packed(random_prompt(20)), SamplingParams(max_tokens=480, temperature=0, ignore_eos=True))
        while not replicas.poll(0.5):
            continue
    began = time.monotonic()
    os.kill(replicas.ready[0].pids[1], number)
    ended = finish(replicas, 1)[1] if busy else {}
    while replicas.failure is None:
        assert time.monotonic() - began < 10
        replicas.poll(0.2)
    assert time.monotonic() - began < 10
    assert ended == ({"a": "error"} if busy else {})
    assert replicas.failure.rank == 1
    assert ("SIGKILL" if number == signal.SIGKILL else "stopped by a signal") in replicas.failure.reason
    assert wait_gone(pids, 10 - (time.monotonic() - began))
    with pytest.raises(ReplicaLost):
        replicas.submit("b", packed([1]), SamplingParams())
    replicas.close()
    assert replicas._replicas[0].member.exit_code == 3


@pytest.mark.spawn
@pytest.mark.slow
def test_killed_engine_takes_its_ranks_along_and_the_other_replica_goes_on():
    replicas = start("EP2DP2")
    lost, other = replicas.ready
    os.kill(replicas._replicas[0].member.pid, signal.SIGKILL)
    while replicas.failure is None:
        replicas.poll(0.2)
    assert replicas.failure.reason.startswith("replica 0: the engine is lost: process ")
    assert wait_gone(lost.pids)
    prompt = random_prompt(9)
    replicas.submit("a", packed(prompt), SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
    assert finish(replicas, 1)[0]["a"] == reference_greedy(checkpoint(FIXTURE), prompt, 8)
    replicas.close()
    assert all(is_gone(pid) for pid in other.pids)


PARENT = """
import sys, time
sys.path.insert(0, {root!r})
from moewe.runtime.replicas import ReplicaSet
from tests.runtime.test_generation import config, descendants
replicas = ReplicaSet.start(config({path!r}, "EP2DP1"))
replicas.wait_ready(120)
print(*descendants(replicas), flush=True)
time.sleep(60)
"""


@pytest.mark.spawn
@pytest.mark.slow
@pytest.mark.parametrize("stop_a_rank", [False, True])
def test_nothing_outlives_a_killed_parent(stop_a_rank):
    program = PARENT.format(root=str(ROOT), path=str(checkpoint(FIXTURE)))
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 3
    if stop_a_rank:
        for pid in pids[-2:]:
            os.kill(pid, signal.SIGSTOP)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert wait_gone(pids)


@pytest.mark.spawn
@pytest.mark.slow
def test_mistake_in_the_checkpoint_is_the_users_and_leaves_nothing(tmp_path):
    folder = tmp_path / "broken"
    folder.mkdir()
    for file in checkpoint(FIXTURE).iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    before = len(os.listdir("/proc/self/fd"))
    replicas = ReplicaSet.start(config(folder, "EP2DP1"))
    with pytest.raises(ValueError, match="safetensors") as error:
        replicas.wait_ready(READY_S)
    assert "\n" not in str(error.value)
    replicas.close()
    assert len(os.listdir("/proc/self/fd")) == before
