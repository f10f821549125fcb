"""Replicas behind one door: balanced, supervised, and gone when closed."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time

import numpy as np
import pytest

from moewe.models.config import ModelConfig, RotaryConfig
from moewe.runtime.balance import EXPECTED_OUTPUT_TOKENS, least_loaded, token_work
from moewe.runtime.config import CacheOptions, EngineConfig, ModelOptions, ParallelOptions, ScheduleOptions
from moewe.runtime.messages import Abort, Delta, Failed, FromEngine, Outputs, Stats, Submit, ToEngine
from moewe.runtime.params import SamplingParams
from moewe.runtime.plan import pack
from moewe.runtime.processes import channel
from moewe.runtime.processes.channel import channel_pair
from moewe.runtime.processes.group import GroupParts
from moewe.runtime.processes.launch import ThreadMember
from moewe.runtime.prompts import packed
from moewe.runtime.replica import Replica, Silence
from moewe.runtime.replicas import ReplicaLost, ReplicaSet
from moewe.runtime.resolve import Resolved
from moewe.topologies import KVGroup, ModelFootprint, parse_topology
from tests.support import fake_worker
from tests.support.fake_worker import Trouble
from tests.support.polling import finish


def fake_resolved(topology, **schedule):
    config = EngineConfig(
        model=ModelOptions(model="fake", path="/nowhere", skip_tokenizer_init=True, max_model_len=400),
        parallel=ParallelOptions(topology=topology, ranks="threads", threads=1),
        cache=CacheOptions(num_blocks=32),
        schedule=ScheduleOptions(max_num_seqs=8, **schedule),
    )
    model = ModelConfig(
        family="fake", num_layers=2, hidden_size=8, vocab_size=fake_worker.VOCAB_SIZE, num_heads=1, num_kv_heads=1,
        head_dim=8, attention_scale=1.0, dense_width=8, rotary=RotaryConfig(theta=1e4, rotary_dim=8), norm_eps=1e-6,
        max_position_embeddings=400, dtype="float32",
    )  # fmt: skip
    numbers = {name: 0 for name in ModelFootprint.__dataclass_fields__ if name not in ("name", "kv_groups")}
    kv_groups = (KVGroup(name="full", kind="full", bytes_per_token=1),)
    return Resolved(
        config=config, topology=parse_topology(topology), model=model, budget=None, fixed_max_model_len=True, cpus=(),
        footprint=ModelFootprint(name="fake", kv_groups=kv_groups, **numbers), asked=config,
    )  # fmt: skip


def start(topology="EP2DP2", trouble=None, made=None, **schedule):
    parts = GroupParts(make_worker=fake_worker.factory(trouble, made))
    return ReplicaSet.start(fake_resolved(topology, **schedule), engines="threads", parts=parts)


@pytest.fixture
def replicas():
    found = start()
    found.wait_ready(30)
    yield found
    found.close()


def greedy(max_tokens, **params):
    return SamplingParams(temperature=0, max_tokens=max_tokens, **params)


def test_requests_get_their_tokens_from_all_replicas(replicas):
    for i in range(20):
        replicas.submit(f"r{i}", packed([10 * i, 10 * i + 1]), greedy(5 + i))
    told, ended = finish(replicas, 20)
    assert set(ended.values()) == {"length"}
    for i in range(20):
        assert told[f"r{i}"] == list(range(10 * i + 2, 10 * i + 7 + i))
    deadline, rows = time.monotonic() + 10, sum(2 + 4 + i for i in range(20))  # of prompts, and of all tokens but one
    while sum(s.num_step_tokens for s in replicas.stats()) < rows and time.monotonic() < deadline:
        replicas.poll(0.1)
    assert sum(s.num_step_tokens for s in replicas.stats()) == rows
    assert all(0 < sum(s.step_tokens) <= s.num_steps for s in replicas.stats())
    assert all(stats.num_steps > 0 for stats in replicas.stats())
    assert [len(stats.ranks) for stats in replicas.stats()] == [2, 2]
    assert len(replicas.ready) == 2


def test_abort_ends_a_request_once_and_its_id_is_free_again(replicas):
    replicas.submit("a", packed([1]), greedy(300, ignore_eos=True))
    with pytest.raises(ValueError, match="already in use"):
        replicas.submit("a", packed([1]), greedy(3))
    replicas.abort("a")
    replicas.abort("unknown")
    _, ended = finish(replicas, 1)
    assert ended == {"a": "abort"}
    replicas.submit("a", packed([1]), greedy(3))
    assert finish(replicas, 1)[1] == {"a": "length"}


def test_a_replica_with_a_full_queue_is_passed_over():
    """Seventeen each: sixteen slots and one that waits. By work alone the second replica would get all but one."""
    found = start(max_queued_requests=1)
    try:
        found.wait_ready(30)
        found.submit("long", packed([1]), greedy(300, ignore_eos=True))
        for number in range(33):
            found.submit(f"short {number}", packed([1]), greedy(3))
        _, ended = finish(found, 34)
        assert set(ended.values()) == {"length"}
    finally:
        found.close()


def test_request_that_cannot_fit_is_answered_and_the_rest_goes_on(replicas):
    replicas.submit("long", packed(list(range(500))), greedy(3))
    replicas.submit("fine", packed([1]), greedy(3))
    _, ended = finish(replicas, 2)
    assert ended == {"long": "error", "fine": "length"}


def test_lost_rank_ends_its_replica_and_tells_its_requests():
    replicas = start("EP2DP1", Trouble(rank=1, step=5))
    replicas.wait_ready(30)
    for name in "ab":
        replicas.submit(name, packed([1]), greedy(100))
    _, ended = finish(replicas, 2)
    assert set(ended.values()) == {"error"}
    assert replicas.failure.rank == 1
    assert "rank 1 failed: RuntimeError: the fake worker broke" in replicas.failure.reason
    with pytest.raises(ReplicaLost, match="rank 1 failed"):
        replicas.submit("c", packed([1]), greedy(3))
    assert replicas.drained
    replicas.close()


def test_start_that_fails_says_why():
    replicas = start("EP2DP1", Trouble(rank=0, step=-1, do="value_error"))
    with pytest.raises(ValueError, match="shard=7 is missing"):
        replicas.wait_ready(30)
    replicas.close()
    replicas = start("EP2DP1", Trouble(rank=0, step=-1))
    with pytest.raises(ReplicaLost, match="rank 0 failed"):
        replicas.wait_ready(30)
    replicas.close()


def test_wait_ready_gives_up():
    replicas = start("EP1DP1", Trouble(rank=0, step=-1, do="nap"))
    with pytest.raises(TimeoutError, match=r"not ready after 0\.2 s"):
        replicas.wait_ready(0.2)
    replicas.close()


def test_drain_finishes_what_runs_and_refuses_more():
    replicas = start("EP1DP2", Trouble(delay_s=0.01))
    replicas.wait_ready(30)
    for i in range(4):
        replicas.submit(f"r{i}", packed([1]), greedy(20))
    replicas.drain()
    replicas.submit("late", packed([1]), greedy(20))
    told, ended = finish(replicas, 5)
    assert ended == {"r0": "length", "r1": "length", "r2": "length", "r3": "length", "late": "error"}
    assert [len(told[f"r{i}"]) for i in range(4)] == [20] * 4
    deadline = time.monotonic() + 10
    while not replicas.drained and time.monotonic() < deadline:
        replicas.poll(0.1)
    assert replicas.drained
    assert replicas.failure is None
    replicas.close()


def test_close_ends_running_requests_and_leaves_nothing():
    gc.collect()
    before, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    replicas = start("EP2DP2", Trouble(delay_s=0.01))
    replicas.wait_ready(30)
    replicas.submit("a", packed([1]), greedy(300))
    replicas.close()
    replicas.close()
    assert [(delta.request_id, delta.finish_reason) for delta in replicas.poll(0) if delta.finish_reason] == [
        ("a", "error")
    ]
    with pytest.raises(ReplicaLost):
        replicas.submit("b", packed([1]), greedy(3))
    del replicas
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
    assert threading.active_count() == threads


def test_event_loop_gets_deltas_and_failures():
    replicas = start("EP2DP1", Trouble(rank=0, step=30))
    got, failures, ready = [], [], []

    async def serve():
        loop = asyncio.get_running_loop()
        replicas.attach(loop, got.extend, failures.append, lambda: ready.append(True))
        await loop.run_in_executor(None, replicas.wait_ready, 30)
        replicas.submit("a", packed([1]), greedy(5))
        while not any(delta.finish_reason for delta in got):
            await asyncio.sleep(0.01)
        replicas.submit("b", packed([1]), greedy(300))
        while not failures:
            await asyncio.sleep(0.01)
        replicas.close()

    asyncio.run(asyncio.wait_for(serve(), 60))
    assert ready == [True]
    assert [token for delta in got if delta.request_id == "a" for token in delta.token_ids] == [2, 3, 4, 5, 6]
    assert got[-1].request_id == "b"
    assert got[-1].finish_reason == "error"
    assert len(failures) == 1


def test_idle_client_that_does_not_poll_keeps_the_engine(replicas):
    time.sleep(2.5)
    replicas.submit("a", packed([1]), greedy(3))
    assert finish(replicas, 1)[1] == {"a": "length"}


# --- one replica -----------------------------------------------------------------------------------------------------
class FakeMember(ThreadMember):
    def __init__(self, channel):
        self.channel, self.pid, self.ended = channel, os.getpid(), None

    def exit_reason(self):
        return self.ended

    def kill(self):
        self.ended = "killed"


@pytest.fixture
def replica():
    ours, theirs = channel_pair(FromEngine, ToEngine)
    found = Replica(0, "replica 0", FakeMember(ours), watched=True, on_loading=None)
    yield found, theirs
    ours.close()
    theirs.close()


def submit(request_id, num_prompt_tokens, max_tokens):
    prompt = pack(np.zeros(num_prompt_tokens))
    return Submit(request_id=request_id, prompt_token_ids=prompt, params=greedy(max_tokens, ignore_eos=True))


def test_outstanding_work_falls_as_tokens_come(replica):
    ours, engine = replica
    ours.submit(submit("a", 100, 50))
    ours.submit(submit("b", 10, 5))
    assert ours.outstanding == 165
    engine.send(Outputs(deltas=(Delta(request_id="a", token_ids=(1,)), Delta(request_id="stranger", token_ids=(1,)))))
    assert [delta.request_id for delta in ours.pump()] == ["a"]
    assert ours.outstanding == 64
    engine.send(Outputs(deltas=(Delta(request_id="a", token_ids=(1, 2)), Delta(request_id="b", finish_reason="stop"))))
    ours.pump()
    assert ours.outstanding == 47
    assert not ours.owes("b")


def test_end_of_the_channel_is_a_loss_with_the_reason(replica):
    ours, engine = replica
    ours.submit(submit("a", 1, 5))
    engine.close()
    ours.member.ended = "process 7 was killed by SIGKILL"
    (delta,) = ours.pump()
    assert delta == Delta(
        request_id="a", finish_reason="error", error="replica 0: the engine is lost: process 7 was killed by SIGKILL"
    )
    assert not ours.lives
    assert ours.pump() == []


def test_what_finds_the_channel_full_is_answered_or_said_later(replica, monkeypatch):
    ours, engine = replica
    monkeypatch.setattr(channel, "MAX_PENDING_BYTES", 0)
    number = 0
    while not ours.member.channel.pending_bytes:  # until the kernel takes no more and something stays queued
        ours.submit(submit(f"r{number}", 30_000, 5))
        number += 1
    ours.submit(submit("late", 1, 5))
    ours.abort("r0")
    (delta,) = ours.pump()
    assert (delta.request_id, delta.finish_reason) == ("late", "error") and "busy" in delta.error
    assert not ours.owes("late") and ours.owes("r0")
    heard = []
    while not any(isinstance(message, Abort) for message in heard):
        heard += engine.receive_ready()
        assert ours.pump() == []
    assert [m.request_id for m in heard if isinstance(m, Submit)] == [f"r{i}" for i in range(number)]


def test_silent_engine_is_lost(replica):
    ours, engine = replica
    ours.submit(submit("a", 1, 5))
    engine.send(Stats(num_running=0, num_waiting=0, num_preemptions=0, num_steps=0))
    ours.pump()
    now = time.monotonic()
    for quarter in range(39):
        assert ours.check(now + quarter / 4) == []
    assert [delta.finish_reason for delta in ours.check(now + 12)] == ["error"]
    assert "no sign of life" in ours.failure.reason
    assert ours.member.ended == "killed"


def test_time_in_which_nobody_listened_does_not_count():
    silence = Silence(0.0)
    silence.pass_time(1000.0)
    assert silence.seconds <= 1.0


def test_failure_message_is_kept(replica):
    ours, engine = replica
    engine.send(Failed(reason="rank 3 is lost", rank=3))
    ours.pump()
    assert ours.failure == Failed(reason="replica 0: rank 3 is lost", rank=3)


# --- balance ---------------------------------------------------------------------------------------------------------
def test_least_loaded_living_replica_is_chosen():
    assert least_loaded([5, 3, 3], [True, True, True]) == 1
    assert least_loaded([5, 3, 3], [True, False, True]) == 2
    assert least_loaded([5], [False]) == -1


def test_token_work_counts_prompt_and_expected_output():
    assert token_work(100, greedy(20)) == 120
    assert token_work(100, SamplingParams(max_tokens=None)) == 100 + EXPECTED_OUTPUT_TOKENS
    assert token_work(100, greedy(5000)) == 100 + EXPECTED_OUTPUT_TOKENS
    assert token_work(100, greedy(5000, ignore_eos=True)) == 5100
