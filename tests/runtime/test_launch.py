"""Ranks start, answer, and end with their parent, whatever state they and it are in."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

import moewe.runtime
from moewe.runtime import engine_main
from moewe.runtime.config import CacheOptions, EngineConfig, ModelOptions, ParallelOptions, ScheduleOptions
from moewe.runtime.messages import AllocateKV, Compiled, KVAllocated, Loaded, WarmUp, WorkerFailed
from moewe.runtime.plan import RankPlan, StepHeader, StepPlan
from moewe.runtime.processes.group import Group, GroupParts
from moewe.runtime.processes.launch import EngineStart, RunDirectory
from moewe.runtime.processes.supervision import Limits, process_state
from moewe.runtime.processes.workers import PEERS_LOST, RankLost, blame
from moewe.topologies import KVGroup
from tests.support import fake_worker
from tests.support.fake_worker import Trouble

ROOT = Path(__file__).parents[2]
KV_GROUPS = (KVGroup(name="full", kind="full", bytes_per_token=1),)


def engine_start(topology="EP2DP1", ranks="processes", **schedule):
    config = EngineConfig(
        model=ModelOptions(model="fake", path="/nowhere", skip_tokenizer_init=True),
        parallel=ParallelOptions(topology=topology, ranks=ranks, threads=1),
        cache=CacheOptions(num_blocks=32),
        schedule=ScheduleOptions(**schedule),
    )
    return EngineStart(config=config, replica=0, num_layers=2, vocab_size=50, eos_token_ids=(), kv_groups=KV_GROUPS)


def fake_parts(trouble=None, made=None):
    return GroupParts(make_worker=fake_worker.factory(trouble, made), worker_module=fake_worker.MODULE)


@pytest.mark.parametrize(("eplb", "imported"), [("auto", True), ("off", False)])
def test_what_moves_experts_is_imported_before_an_engine_says_anything(monkeypatch, eplb, imported):
    """Later its client would take an import of many seconds, on a busy machine, for an engine that is gone."""
    name = "moewe.runtime.live_balance"
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.delattr(moewe.runtime, "live_balance", raising=False)
    monkeypatch.setattr(engine_main, "Group", lambda *_: SimpleNamespace(workers=None, kill=lambda: None))
    found = []

    class Loop(engine_main.EngineLoop):
        def _start_up(self, group):
            found.append(name in sys.modules)

    start = engine_start()
    parallel = msgspec.structs.replace(start.config.parallel, eplb=eplb)
    start = msgspec.structs.replace(start, config=msgspec.structs.replace(start.config, parallel=parallel))
    said = []
    client = SimpleNamespace(send=lambda message, timeout: said.append(message))
    assert Loop(client, start, fake_parts()).run() == engine_main.EXIT_STOPPED
    assert found == [imported] and len(said) == 1


@pytest.fixture
def fake_processes(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def trouble(text):
        monkeypatch.setenv("FAKE_WORKER", text)

    return trouble


def wait_for(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False


def is_gone(pid):
    return process_state(pid) in (None, "Z")


def start_group(start, trouble=None):
    group = Group(start, fake_parts(trouble))
    expect(group, Loaded)
    group.workers.broadcast(AllocateKV(num_blocks=32))
    expect(group, Compiled)
    group.workers.broadcast(WarmUp())
    expect(group, KVAllocated)
    group.all_met(Limits(stall_s=start.config.schedule.stall_timeout_s))
    return group


def expect(group, kind):
    got = []
    while len(got) < group.workers.num_ranks:
        got += [message for message in group.workers.receive(10.0) if isinstance(message, kind)]
    return got


def idle_plan(step, num_ranks):
    header = StepHeader(step=step, epoch=0, kind="idle", bucket=0, exchange="local")
    return StepPlan(header=header, ranks=(RankPlan(),) * num_ranks)


@pytest.mark.parametrize("ranks", ["threads", pytest.param("processes", marks=pytest.mark.spawn)])
def test_group_answers_in_order_and_ends(ranks, fake_processes):
    gc.collect()  # what earlier tests left would go in between
    before = len(os.listdir("/proc/self/fd"))
    group = start_group(engine_start(ranks=ranks))
    pids = [member.pid for member in group.workers.members]
    for step in range(3):
        group.workers.submit(idle_plan(step, 2))
    assert group.workers.in_flight == 3
    assert [group.workers.collect(10.0).step for _ in range(3)] == [0, 1, 2]
    assert group.workers.in_flight == 0
    group.stop()
    if ranks == "processes":
        assert os.getpid() not in pids
        assert all(process_state(pid) is None for pid in pids)
    del group
    gc.collect()  # the map of the progress board holds a descriptor until it is collected
    assert len(os.listdir("/proc/self/fd")) == before


def test_collect_gives_up_and_can_be_asked_again():
    group = start_group(engine_start(ranks="threads"), Trouble(delay_s=0.3))
    group.workers.submit(idle_plan(0, 2))
    assert group.workers.collect(0.05) is None
    assert group.workers.collect(10.0).step == 0
    group.stop()


def test_failure_of_a_thread_rank_names_it():
    group = start_group(engine_start(ranks="threads"), Trouble(rank=1, step=2))
    with pytest.raises(RankLost, match="rank 1 failed: RuntimeError: the fake worker broke") as lost:
        for step in range(5):
            group.workers.submit(idle_plan(step, 2))
            group.workers.collect(10.0)
    assert lost.value.rank == 1
    group.kill()


def test_user_mistake_while_loading_is_passed_on_in_one_line():
    group = Group(engine_start(ranks="threads"), fake_parts(Trouble(rank=0, step=-1, do="value_error")))
    with pytest.raises(RankLost) as lost:
        expect(group, Loaded)
    assert lost.value.user_error
    assert lost.value.reason == "shard=7 is missing; fetch the checkpoint again"
    group.kill()


def test_rank_thread_that_stands_still_is_named():
    group = start_group(engine_start(ranks="threads", stall_timeout_s=1.0), Trouble(rank=0, step=1, do="hang"))
    group.workers.submit(idle_plan(0, 2))
    group.workers.submit(idle_plan(1, 2))
    assert group.workers.collect(10.0).step == 0
    with pytest.raises(RankLost, match=r"rank 0 is stuck: .* in step 1") as lost:
        group.workers.collect(10.0)
    assert lost.value.rank == 0
    group.watchdog.stop()
    for member in group.workers.members:
        member.kill()


@pytest.mark.spawn
@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_killed_or_stopped_rank_is_named_and_none_is_left(number, fake_processes):
    group = start_group(engine_start(stall_timeout_s=1.0))
    pids = [member.pid for member in group.workers.members]
    os.kill(pids[1], number)
    expected = "killed by SIGKILL" if number == signal.SIGKILL else "stopped by a signal"
    with pytest.raises(RankLost, match=expected) as lost:
        group.workers.receive(10.0)
    assert lost.value.rank == 1
    group.kill()
    assert all(process_state(pid) is None for pid in pids)


@pytest.mark.spawn
@pytest.mark.slow
def test_rank_process_that_stands_still_writes_its_stacks(fake_processes, capfd):
    fake_processes("rank=1,step=1,do=hang")
    group = start_group(engine_start(stall_timeout_s=1.0))
    for step in range(2):
        group.workers.submit(idle_plan(step, 2))
    assert group.workers.collect(10.0).step == 0
    with pytest.raises(RankLost, match="rank 1 is stuck") as lost:
        group.workers.collect(10.0)
    assert lost.value.rank == 1
    group.kill()
    assert "in strike" in capfd.readouterr().err


@pytest.mark.spawn
@pytest.mark.slow
def test_a_rank_that_ends_while_all_capture_ends_those_that_wait_for_it(fake_processes):
    fake_processes(f"rank=1,step={fake_worker.WARMING_UP},do=exit,others_wait=1")
    group = Group(engine_start(), fake_parts())
    expect(group, Loaded)
    pids = [member.pid for member in group.workers.members]
    group.workers.broadcast(AllocateKV(num_blocks=32))
    expect(group, Compiled)
    group.workers.broadcast(WarmUp())
    with pytest.raises(RankLost, match=r"rank 1 is lost: .* 9"):
        expect(group, KVAllocated)
    group.kill()
    assert all(process_state(pid) is None for pid in pids)


CPUS = sorted(os.sched_getaffinity(0))[:2]


@pytest.fixture(scope="module")
def group():
    """Two ranks that nobody has hurt, each with a processor of its own where there are two."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        made = start_group(msgspec.structs.replace(engine_start(), cpus=((CPUS[0],), (CPUS[-1],))))
    yield made
    made.stop()


@pytest.mark.spawn
def test_ranks_run_on_the_processors_they_were_given(group):
    assert [os.sched_getaffinity(member.pid) for member in group.workers.members] == [{CPUS[0]}, {CPUS[-1]}]


@pytest.mark.parametrize(
    ("topology", "cores", "expected"), [("EP2DP1", 2, True), ("EP2DP2", 3, False), ("EP4DP1", 4, True)]
)
def test_ranks_are_told_whether_all_of_the_host_have_cores(topology, cores, expected, monkeypatch):
    told = []

    def refuse(module, start, receives, threads):
        told.append(start.has_cores)
        raise OSError

    monkeypatch.setattr("moewe.runtime.processes.group.host_cores", lambda: cores)
    monkeypatch.setattr("moewe.runtime.processes.group.spawn_process", refuse)
    with pytest.raises(OSError):
        Group(engine_start(topology), fake_parts())
    assert told == [expected]


@pytest.mark.spawn
def test_ranks_ignore_what_a_terminal_sends(group):
    for member in group.workers.members:
        os.kill(member.pid, signal.SIGINT)
        os.kill(member.pid, signal.SIGTERM)
        assert os.getpgid(member.pid) != os.getpgid(0)
    group.workers.submit(idle_plan(0, 2))
    assert group.workers.collect(10.0).step == 0


PARENT = """
import sys, time
sys.path.insert(0, {root!r})
from tests.runtime.test_launch import engine_start, start_group
group = start_group(engine_start())
print(*[member.pid for member in group.workers.members], flush=True)
time.sleep(60)
"""


@pytest.mark.spawn
def test_no_rank_outlives_a_killed_parent(fake_processes):
    """Neither the one that runs nor the one that was stopped."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT.format(root=str(ROOT))], stdout=subprocess.PIPE, text=True)
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2
    os.kill(pids[0], signal.SIGSTOP)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert wait_for(lambda: all(is_gone(pid) for pid in pids))


@pytest.mark.spawn
def test_idle_ranks_use_no_processor(group):
    def used():
        ticks = 0
        for member in group.workers.members:
            fields = Path(f"/proc/{member.pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    before = used()
    time.sleep(1)
    assert used() - before < 0.05


def test_run_directory_is_private_and_goes():
    directory = RunDirectory()
    assert directory.path.stat().st_mode & 0o777 == 0o700
    directory.board_path.write_bytes(b"x")
    directory.remove()
    directory.remove()
    assert not directory.path.exists()


def report(rank, reason, user_error=False):
    return {rank: WorkerFailed(rank=rank, reason=reason, user_error=user_error)}


def test_blame_finds_the_cause_behind_its_consequences():
    broken = PEERS_LOST + "RuntimeError: connection closed by peer"
    killed = "process 7 was killed by SIGKILL"
    assert blame(report(0, broken), [None, None], final=False) is None
    assert blame(report(0, broken), [None, killed], final=False).rank == 1
    assert blame(report(0, broken) | report(2, "RuntimeError: x"), ["exited", None, "exited"], final=False).rank == 2
    assert blame(report(0, broken) | report(1, "shard", True), ["exited", None], final=False).user_error
    assert blame(report(0, broken) | report(1, broken), ["exited", "exited"], final=True).rank == 0
    assert blame({}, [None, None], final=True).rank == -1
