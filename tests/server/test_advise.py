"""`/v1/topology/advice`, the windows behind it with their log, and `moewe advise` on a server and on a log."""

from __future__ import annotations

import asyncio
import json
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from moewe.runtime import auto_topology
from moewe.server.advise.command import advise, asked
from moewe.server.client.asking import NoAnswerError
from moewe.server.commands.serve import server_options
from moewe.server.http.advising import Advising
from moewe.server.http.layout_change import FAILED, ChangeStatus
from moewe.server.http.serve import Server
from moewe.server.state import ServerState
from moewe.topologies.advisor.advisor import Advisor
from moewe.topologies.advisor.records import Advice, AdviceError
from moewe.topologies.advisor.trace import WindowLine, encode, read_trace, replay
from tests.runtime.test_observed import replicas
from tests.server.test_top import Pages, small_server
from tests.support.asking import fake, get
from tests.support.fake_replicas import make_state
from tests.topologies.advisor.test_advisor import INSIDE, SHM, crossing, facts, window
from tests.topologies.advisor.test_trace import written


@contextmanager
def serving(body: str) -> Iterator[str]:
    pages = Pages()
    pages.by_path["/v1/topology/advice"] = (200, body.encode())
    with small_server(pages) as root:
        yield root


@pytest.fixture
def state(tmp_path: Path) -> ServerState:
    return make_state(fake(), advice_log=str(tmp_path / "advice.jsonl"), advice_interval_s=30.0)


def test_advice_is_there_before_the_first_window(state: ServerState) -> None:
    view = get(state, "/v1/topology/advice").json()
    assert view["verdict"] == "observing" and view["topology"] == view["advised"] == "EP2DP1[adp=2,atp=1,red=0]"
    assert "one takes 30 s" in view["reason"] and view["candidates"] == []


def test_windows_lead_to_advice_a_log_and_metrics(state: ServerState, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Advising, "_facts", lambda *_: facts(INSIDE, [SHM, crossing(1e-3, "")]))
    advising = Advising(state)
    advising.begin(None, state.ready, 10.0)  # type: ignore[arg-type]
    began = advising._window._began  # type: ignore[union-attr]
    state.metrics.replicas = replicas(40)
    for turn in (0.5, 29.0, 30.5, 45.0, 61.0):
        asyncio.run(advising.turn(began + turn))
    view = get(state, "/v1/topology/advice").json()
    assert (view["number"], view["verdict"]) == (2, "idle"), view["reason"]
    lines = [line for _, line in read_trace(Path(state.options.advice_log or ""))]
    assert [type(line).__name__ for line in lines] == ["FactsLine", "WindowLine", "WindowLine"]
    assert isinstance(lines[1], WindowLine) and lines[1].advice is not None and lines[1].advice.candidates
    text = state.metrics.render().decode()
    assert 'moewe_advice{verdict="idle"} 1.0' in text and 'moewe_advice_windows_total{verdict="observing"} 1.0' in text


def test_a_change_that_failed_begins_the_window_anew(state: ServerState, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Advising, "_facts", lambda *_: facts(INSIDE, [SHM]))
    server = Server(state, None, None)  # type: ignore[arg-type]
    server._advising.begin(None, state.ready, 10.0)  # type: ignore[arg-type]
    window = server._advising._window
    assert window is not None
    window._began -= 29.0
    state.metrics.replicas = replicas(40)
    status = ChangeStatus(before="EP2DP1", after="EP1DP2", way="in turns", turns=2, state=FAILED)
    server._on_changed(status, None, 0.0)  # type: ignore[arg-type]
    assert window.age(time.monotonic()) < 29.0
    seen = window.end(replicas(43), np.zeros((0, 0)), time.monotonic(), 1e9)
    assert seen.num_steps == 3


def test_an_advisor_that_fails_is_silent_from_then_on(state: ServerState, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Advising, "_facts", lambda *_: facts(INSIDE, [SHM]))
    monkeypatch.setattr(Advisor, "observe", lambda *_: 1 / 0)
    advising = Advising(state)
    advising.begin(None, state.ready, 10.0)  # type: ignore[arg-type]
    asyncio.run(advising.turn(advising._window._began + 31))  # type: ignore[union-attr]
    assert state.advice is None and advising._window is None
    asyncio.run(advising.turn(0.0))


def test_a_full_disk_and_a_killed_server_leave_a_log_that_replays(
    state: ServerState, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Advising, "_facts", lambda *_: facts(INSIDE, [SHM, crossing(1e-3, "")]))
    path = Path(state.options.advice_log or "")
    path.write_bytes(b'\n{"record":"window","se')
    advising = Advising(state)
    advising.begin(None, state.ready, 10.0)  # type: ignore[arg-type]
    began, size = advising._window._began, path.stat().st_size  # type: ignore[union-attr]
    state.metrics.replicas = replicas(40)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, limits[1]))
    try:
        asyncio.run(advising.turn(began + 31))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.stat().st_size == size + 100 and "advice is not written" in caplog.text
    asyncio.run(advising.turn(began + 62))
    again = list(replay(path, read_trace(path)))
    assert [one.line for one in again] == [4, 5] and all(one.is_same for one in again)
    assert "line 2 was not written to its end" in caplog.messages[-1]


def test_a_log_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--advice-log .* cannot be written"):
        server_options({"advice_log": str(tmp_path / "none" / "file")})
    with pytest.raises(ValueError, match="advice_interval_s"):
        server_options({"advice_interval_s": 0.1})


def test_the_machine_is_seen_with_the_domains_that_it_emulates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_topology, "recall", lambda device: ())
    config = make_state(fake()).config
    named = msgspec.structs.replace(config.parallel, domains="2+2,rate=50,delay=9", topology="EP2DP2")
    machine = auto_topology.machine_of(
        msgspec.structs.replace(config, parallel=named), gpus=None, cores=8, host_bytes=4096
    )
    assert (machine.num_devices, machine.domain_size, machine.memory_bytes) == (4, 2, 1024)
    assert (machine.domains, machine.rate, machine.delay, machine.is_shared) == ((2, 2), 50, 9, False)
    by_topology = msgspec.structs.replace(config.parallel, topology="EP4DP2[domains=2+2,delay=7]")
    found = auto_topology.emulated_domains(by_topology)
    assert found is not None and (found.domains, found.delay) == ((2, 2, 2, 2), 7)
    for wrong in ("2", "2+3", "x", "2+2,speed=1", "2+2,red=1", "9" * 9 + "+1"):
        with pytest.raises(ValueError, match="domains="):
            auto_topology.domains_of(wrong)


def test_a_server_is_asked_and_answers_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    advisor = Advisor(facts(INSIDE, [SHM, crossing(1e-3, "")]))
    advice = [advisor.observe(window(advisor.facts)) for _ in range(3)][-1]
    with serving(msgspec.json.encode(advice).decode()) as root:
        assert advise({"url": (root,)}) == 0
        shown = capsys.readouterr().out
        assert shown.startswith("EP2DP2: change to EP4DP1: decode reads") and "* EP2DP2" in shown and "1.7" in shown
        assert advise({"url": (root,), "json": True}) == 0
        assert msgspec.json.decode(capsys.readouterr().out, type=Advice) == advice


@pytest.mark.parametrize("body", ["", "[]", '{"number": 1}', "[" * 100_000, '{"number": "x"}'])
def test_what_is_no_advice_is_said_to_be_none(body: str) -> None:
    with serving(body) as root, pytest.raises(NoAnswerError, match="no advice"):
        asked(f"{root}/v1/topology/advice", {})


def test_texts_of_a_server_do_not_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    advice = Advice(number=1, time=1.0, topology="\x1b[2J", verdict="stay", advised="x", gain=0.0, reason="a\x1b]0;b\n")
    with serving(msgspec.json.encode(advice).decode()) as root:
        advise({"url": (root,)})
    assert "\x1b" not in capsys.readouterr().out


def test_a_log_is_replayed_and_differences_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "advice.jsonl"
    written(path)
    assert advise({"trace": str(path)}) == 0
    assert "5 windows; the same advice as in the log" in capsys.readouterr().out
    path.write_bytes(path.read_bytes().replace(b'"rows":70', b'"rows":50'))
    assert advise({"trace": str(path), "json": True}) == 1
    assert [json.loads(line)["same"] for line in capsys.readouterr().out.splitlines()].count(False) >= 1
    path.write_bytes(b"\n")
    with pytest.raises(AdviceError, match="no window"):
        advise({"trace": str(path)})
    with pytest.raises(ValueError, match="leave out one"):
        advise({"trace": "x", "url": ("y",)})
    assert encode(WindowLine(seen=window(facts(INSIDE, [SHM])))).endswith(b"\n")


def test_two_servers_are_not_asked_at_once() -> None:
    options: dict[str, Any] = {"url": ("a", "b")}
    with pytest.raises(ValueError, match="2 servers"):
        advise(options)
