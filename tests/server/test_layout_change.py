"""A change of layout while requests run, with engines that are threads over fake ranks: no request is lost."""

from __future__ import annotations

import asyncio
import errno
import itertools
import threading
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

import pytest

from moewe.runtime.fleet import Fleet
from moewe.runtime.launcher import Launcher
from moewe.runtime.messages import Delta
from moewe.runtime.new_layout import NewLayout
from moewe.runtime.processes.group import GroupParts
from moewe.runtime.processes.launch import ThreadMember
from moewe.runtime.prompts import packed
from moewe.runtime.replica import Replica
from moewe.runtime.replicas import ReplicaSet
from moewe.runtime.resolve import Resolved
from moewe.server.errors import ApiError
from moewe.server.http import layout_change
from moewe.server.http.layout_change import ChangeStatus, LayoutChanger
from moewe.server.state import Phase
from moewe.topologies import Topology
from moewe.topologies.advisor.turns import BESIDE, IN_TURNS, beside, in_turns
from tests.runtime.test_replicas import fake_resolved, greedy
from tests.support import fake_worker
from tests.support.fake_replicas import make_state
from tests.support.fake_worker import Trouble

_Found = TypeVar("_Found")


def started(
    resolved: Resolved, good: int = 99, delay_s: float = 0.0, gate: threading.Event | None = None, first: int = 0
) -> ReplicaSet:
    """Make a set of fake engines, of which `first` begin at once.

    Their steps take `delay_s`; of their ranks the first `good` can load, once `gate` is open.
    """
    numbers, make = itertools.count(), fake_worker.factory(Trouble(delay_s=delay_s))

    def some(*args: Any) -> Any:
        if gate is not None:
            gate.wait(10)
        if next(numbers) >= good:
            time.sleep(0.3 if good else 0.0)  # others are ready by then
            raise ValueError("no room")
        return make(*args)

    return ReplicaSet.start(resolved, engines="threads", parts=GroupParts(make_worker=some), first=first)


class Bench:
    """A fleet of fake engines, a state, and requests that arrive all the time.

    Args:
        before: the layout that runs.
        way: how it is changed.
        start: of a new set.
        delay_s: of a step of the old one.
    """

    def __init__(self, before: str, way: str, start: Callable[..., ReplicaSet] = started, delay_s: float = 0.0) -> None:
        self.resolved = fake_resolved(before)
        self.fleet = Fleet(started(self.resolved, delay_s=delay_s, first=self.resolved.topology.dp))
        self.old = self.fleet.current
        self.told: dict[str, list[int]] = {}
        self.ended: dict[str, str] = {}
        self.changes: list[tuple[ChangeStatus, str]] = []
        self.losses: list[str] = []
        self.at_failure: list[ReplicaSet] = []  # what serves when the change says that it has failed
        self.state = make_state(None, allow_apply=True)
        self.state.hub.on_deltas = self.take  # type: ignore[method-assign]
        self.state.latest_stats = self.fleet.stats
        self.changer = LayoutChanger(
            self.state, self.fleet, self.resolved, self.lost,
            lambda status, running, _: self.changes.append((status, running.topology.short())), start,
        )  # fmt: skip
        self.way = way

    def planned(self, running: Resolved, topology: Topology, **_: Any) -> NewLayout:
        turns = beside if self.way == BESIDE else partial(in_turns, is_shared=True)
        resolved = fake_resolved(topology.long())
        return NewLayout(resolved=resolved, way=self.way, turns=turns(running.topology, topology))

    def take(self, deltas: Any) -> None:
        delta: Delta
        for delta in deltas:
            self.told.setdefault(delta.request_id, []).extend(delta.token_ids)
            if delta.finish_reason is not None:
                self.ended[delta.request_id] = delta.finish_reason

    def lost(self, failed: Any) -> None:
        self.losses.append(failed.reason)

    async def serve(self) -> None:
        self.old.wait_ready(30)
        self.old.attach(asyncio.get_running_loop(), self.take, self.lost)
        self.state.begin(self.old.ready)

    async def change(self, to: str) -> ChangeStatus:
        """Change the layout while requests come; return how it ended."""
        await self.serve()
        number = 0
        status = await self.changer.begin(to)
        assert isinstance(status, ChangeStatus)
        while status.state == layout_change.RUNNING or number < 40:
            if status.state == layout_change.FAILED and not self.at_failure:
                self.at_failure = list(self.fleet.sets)
            self.fleet.submit(f"r{number}", packed([number]), greedy(5))
            number += 1
            await asyncio.sleep(0.01)
        self.at_failure = self.at_failure or list(self.fleet.sets)
        await asyncio.wait_for(self.changer._task, 30)  # type: ignore[arg-type]
        while len(self.ended) < number:
            await asyncio.sleep(0.01)
        assert set(self.ended.values()) == {"length"} and not self.losses
        assert all(self.told[f"r{i}"] == list(range(i + 1, i + 6)) for i in range(number))
        return status

    def run(self, to: str, monkeypatch: pytest.MonkeyPatch) -> ChangeStatus:
        return self.play(self.change(to), monkeypatch)

    def play(self, scene: Coroutine[Any, Any, _Found], monkeypatch: pytest.MonkeyPatch) -> _Found:
        monkeypatch.setattr(layout_change, "new_layout", self.planned)
        monkeypatch.setattr(layout_change, "with_ends", lambda resolved, *_: resolved)
        try:
            return asyncio.run(asyncio.wait_for(scene, 60))
        finally:
            for each in self.fleet.sets:
                each.close()


@pytest.mark.parametrize(
    ("before", "way", "after"),
    [("EP1DP3", IN_TURNS, "EP1DP2"), ("EP4DP1", BESIDE, "EP2DP2")],
)
def test_every_request_gets_its_tokens_while_the_layout_changes(
    before: str, way: str, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(before, way)
    status = bench.run(after, monkeypatch)
    assert (status.state, status.turn, status.way) == ("done", status.turns, way)
    assert status.turns == (1 if way == BESIDE else 2)
    assert [name for _, name in bench.changes] == [after] and len(bench.fleet.sets) == 1
    assert bench.fleet.current is not bench.old and bench.old.drained
    assert bench.state.config.parallel.topology == bench.fleet.current.resolved.config.parallel.topology
    text = bench.state.metrics.render().decode()
    assert f'topology="{after}[' in text and 'moewe_topology_changes_total{outcome="done"} 1.0' in text


def not_started(*_: Any) -> Any:
    raise OSError(errno.EAGAIN, "Resource temporarily unavailable")


@pytest.mark.parametrize(("before", "way", "after"), [("EP1DP2", BESIDE, "EP2DP1"), ("EP1DP4", IN_TURNS, "EP2DP2")])
def test_a_process_that_the_system_refuses_fails_the_change_alone(
    before: str, way: str, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(before, way, not_started)
    status = bench.run(after, monkeypatch)
    assert (status.state, status.reason) == ("failed", "BlockingIOError: [Errno 11] Resource temporarily unavailable")
    assert bench.at_failure == bench.fleet.sets == [bench.old] and len(bench.old.ready) == bench.resolved.topology.dp
    assert 'moewe_topology_changes_total{outcome="failed"} 1.0' in bench.state.metrics.render().decode()


def test_a_layout_that_cannot_start_again_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench("EP1DP4", IN_TURNS, not_started)

    async def scene() -> ChangeStatus:
        await bench.serve()
        monkeypatch.setattr(bench.old, "_spawn", not_started)
        await bench.changer.begin("EP2DP2")
        await asyncio.wait_for(bench.changer._task, 10)  # type: ignore[arg-type]
        assert bench.changer.status is not None
        return bench.changer.status

    assert bench.play(scene(), monkeypatch).state == "failed"
    (why,) = bench.losses
    assert "could not start again: BlockingIOError" in why


@pytest.mark.parametrize(
    ("before", "way", "after", "good"),
    [
        ("EP1DP4", IN_TURNS, "EP2DP2", 0),
        pytest.param("EP1DP4", IN_TURNS, "EP2DP2", 2, marks=pytest.mark.slow),
        ("EP2DP2", BESIDE, "EP4DP1", 0),
        ("EP2DP1", BESIDE, "EP1DP2", 1),
    ],
    ids=["in turns", "in the second turn", "beside", "one of two beside"],
)
def test_a_layout_that_cannot_start_leaves_the_old_one_as_it_was(
    before: str, way: str, after: str, good: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(before, way, partial(started, good=good, delay_s=0.02))
    status = bench.run(after, monkeypatch)
    assert status.state == "failed" and "no room" in status.reason
    assert bench.at_failure == bench.fleet.sets == [bench.old] and len(bench.old.ready) == bench.resolved.topology.dp
    assert list(map(id, bench.state.ready)) == list(map(id, bench.old.ready)), "what /v1/topology shows is what runs"
    assert [name for _, name in bench.changes] == [before]
    assert 'moewe_topology_changes_total{outcome="failed"} 1.0' in bench.state.metrics.render().decode()


def test_a_change_that_waits_for_a_long_request_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(layout_change, "_TELL_S", 0.1)
    bench = Bench("EP2DP1", BESIDE, delay_s=0.02)

    async def scene() -> None:
        await bench.serve()
        bench.fleet.submit("long", packed([1]), greedy(390, ignore_eos=True))
        ending = asyncio.ensure_future(bench.changer._end(bench.old, (0,)))
        while "waits for requests on replicas 0 of EP2DP1" not in caplog.text:
            await asyncio.sleep(0.01)
        bench.fleet.abort("long")
        await ending

    bench.play(scene(), monkeypatch)


def test_requests_go_on_while_processes_take_their_time_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[bool] = []

    def join(member: ThreadMember, timeout: float) -> bool:
        threads.append(threading.current_thread() is threading.main_thread())
        return joined(member, timeout)

    joined = ThreadMember.join
    bench = Bench("EP2DP1", BESIDE)

    async def scene() -> None:
        await bench.serve()
        monkeypatch.setattr(ThreadMember, "join", join)
        await bench.changer._end(bench.old, (0,))
        assert threads and not any(threads)

    bench.play(scene(), monkeypatch)


def test_streams_go_on_and_time_counts_while_processes_are_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """The start of an engine waits until the event loop has brought tokens: on that loop it would wait for ever."""
    gate = threading.Event()
    bench = Bench("EP2DP1", BESIDE, delay_s=0.005)
    replica = Launcher.replica
    waited: list[bool] = []

    def slow(launcher: Launcher, resolved: Resolved, index: int) -> Any:
        waited.append(gate.wait(10))
        return replica(launcher, resolved, index)

    async def scene() -> None:
        await bench.serve()
        bench.fleet.submit("stream", packed([1]), greedy(390, ignore_eos=True))
        monkeypatch.setattr(Launcher, "replica", slow)
        status = await bench.changer.begin("EP1DP2")
        seconds = []
        while len(bench.told.get("stream", ())) < 20:
            await asyncio.sleep(0.01)
            view = bench.changer.view()
            assert view is not None and view["state"] == layout_change.RUNNING
            seconds.append(view["seconds"])
        assert 0 < seconds[0] < seconds[-1]
        gate.set()
        while not bench.fleet.sets[0].stats():
            await asyncio.sleep(0.01)
        bench.fleet.abort("stream")
        await asyncio.wait_for(bench.changer._task, 10)  # type: ignore[arg-type]
        assert status.state == "done" and waited == [True, True]

    bench.play(scene(), monkeypatch)


def test_engines_that_begin_as_the_server_ends_end_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The change is over before anybody sees the engine that a thread is starting."""
    gate, begins = threading.Event(), threading.Event()
    bench = Bench("EP2DP1", BESIDE)
    replica = Launcher.replica
    begun: list[Replica] = []

    def slow(launcher: Launcher, resolved: Resolved, index: int) -> Replica:
        begins.set()
        gate.wait(10)
        begun.append(replica(launcher, resolved, index))
        return begun[-1]

    async def scene() -> None:
        await bench.serve()
        monkeypatch.setattr(Launcher, "replica", slow)
        await bench.changer.begin("EP1DP2")
        while not begins.is_set():
            await asyncio.sleep(0.01)
        bench.changer.close()
        new = bench.changer._new
        assert new is not None and bench.fleet.sets[0] is new
        new._closed = True  # as `close` does first
        gate.set()
        while not begun or begun[0].member.exit_reason() is None:
            await asyncio.sleep(0.01)
        assert not new.stats() and len(begun) == 2
        new._closed = False

    bench.play(scene(), monkeypatch)


def test_a_server_that_began_to_end_while_a_change_was_planned_begins_none(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench("EP2DP1", BESIDE)

    def planned(*args: Any, **more: Any) -> NewLayout:
        bench.state.enter(Phase.DRAINING)
        return Bench.planned(bench, *args, **more)

    async def scene() -> None:
        await bench.serve()
        with pytest.raises(ApiError, match="shutting down"):
            await bench.changer.begin("EP1DP2")
        assert not bench.changer.is_running and bench.changer.view() is None

    bench.planned = planned  # type: ignore[method-assign]
    bench.play(scene(), monkeypatch)


def test_a_server_that_ends_while_a_set_begins_ends_that_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    bench = Bench("EP2DP1", BESIDE, partial(started, gate=gate))

    async def scene() -> None:
        await bench.serve()
        await bench.changer.begin("EP1DP2")
        while bench.changer._new is None or not bench.changer._new.stats():
            await asyncio.sleep(0.01)
        assert bench.fleet.sets == [bench.old], "it takes no requests yet"
        bench.changer.close()
        gate.set()
        assert bench.fleet.sets == [bench.changer._new, bench.old]

    bench.play(scene(), monkeypatch)


def test_a_replica_that_is_lost_during_a_change_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    bench = Bench("EP2DP1", BESIDE, partial(started, gate=gate), delay_s=0.02)

    async def lose(number: int) -> None:
        bench.fleet.current._replicas[number].member.kill()
        while not bench.losses:
            await asyncio.sleep(0.01)
        assert [f"replica {number}: " in reason for reason in bench.losses] == [True]
        bench.losses.clear()

    async def scene() -> None:
        await bench.serve()
        bench.fleet.submit("long", packed([1]), greedy(390, ignore_eos=True))
        await bench.changer.begin("EP1DP2")
        gate.set()
        while bench.fleet.current is bench.old:
            await asyncio.sleep(0.01)
        await lose(1)  # a new one, while the old one finishes what it has
        assert bench.changer.is_running and not bench.old.drained
        bench.fleet.abort("long")
        await asyncio.wait_for(bench.changer._task, 10)  # type: ignore[arg-type]
        gate.clear()
        await bench.changer.begin("EP2DP1")
        await lose(0)  # one that a change started, while the next one starts others
        bench.changer.close()
        gate.set()

    bench.play(scene(), monkeypatch)
