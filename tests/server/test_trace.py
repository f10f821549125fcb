"""Step traces at the server: the file, the table that is read from it, the route, and the command."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from rich.console import Console

from moewe.runtime.messages import Traced, TracedStep
from moewe.runtime.plan import pack
from moewe.server.client.asking import NoAnswerError
from moewe.server.http import trace_routes
from moewe.server.state import ServerState
from moewe.server.trace import command
from moewe.server.trace.chrome import TraceFacts, chrome_trace
from moewe.server.trace.command import trace
from moewe.server.trace.shares import engine_lines, read_shares, shares_table
from moewe.telemetry import StepMarks
from moewe.telemetry.step_marks import ATTENTION, EXPERTS, INPUTS, NO_LAYER, RESULTS, WAIT
from tests.server.test_top import Pages, small_server
from tests.support.asking import error_of, fake, get, post
from tests.support.fake_replicas import connect, make_state, with_server
from tests.support.traces import check_trace

FACTS = TraceFacts(version="1", model="gull", topology="EP2DP1")
MS = 1_000_000  # ns


def marks(waited_from: int, *times: int) -> bytes:
    """A step that began at the first of `times` [ms] and has a part up to each of the others."""
    looks = iter(time * MS for time in times)
    made = StepMarks(waited_from * MS, lambda: next(looks))
    made.mark(INPUTS)
    for layer in range(2):
        made.layer = layer
        for part in (ATTENTION, WAIT, EXPERTS):
            made.mark(part)
    made.layer = NO_LAYER
    made.mark(RESULTS)
    return made.packed()


def traced(num_ranks: int = 2, is_full: bool = False) -> Traced:
    """Two steps of 9 ms each, 2 ms apart, in which ranks wait for plans."""
    steps = []
    for step, began in ((5, 100), (6, 111)):
        own = marks(began - 2, began, *range(began + 2, began + 10))
        steps.append(TracedStep(step=step, phase="decode", rows=(3,) * num_ranks, marks=(own,) * num_ranks))
    engine = np.array([(0, 5, 98, 99), (1, 5, 99, 100), (2, 5, 100, 109), (3, 5, 109, 110)])
    engine[:, 2:] *= MS
    return Traced(trace_id=1, steps=tuple(steps), engine=pack(engine, "<i8"), is_full=is_full)


def test_the_file_is_a_trace_whose_parts_fill_their_steps() -> None:
    document = json.loads(chrome_trace([traced(), traced(3)], 2, "", FACTS))
    check_trace(document, num_ranks=[2, 3], num_steps=[2, 2])
    about = document["otherData"]
    assert about["ended_early"] == "" and about["steps"] == [2, 2] and about["began_ns"] == 98 * MS
    events = [event for event in document["traceEvents"] if event["ph"] == "X" and event["tid"] == 1]
    waited, step, first = events[0], events[1], events[2]
    assert (waited["name"], waited["ts"], waited["dur"]) == ("wait for plan", 0.0, 2000.0)
    assert (step["name"], step["cat"], step["dur"]) == ("decode step", "step", 9000.0)
    assert step["args"] == {"step": 5, "phase": "decode", "rows": 3}
    assert (first["name"], first["cat"], first["ts"], first["dur"]) == ("inputs", "host", 2000.0, 2000.0)
    layers = [event["args"].get("layer") for event in events[2:10]]
    assert layers == [None, 0, 0, 0, 1, 1, 1, None]
    names = {
        event["args"]["name"] for event in document["traceEvents"] if event["ph"] == "M" and "name" in event["args"]
    }
    assert names == {"replica 0", "replica 1", "engine", "rank 0", "rank 1", "rank 2"}


def test_nanoseconds_are_kept() -> None:
    looks = iter((1_000_000_001, 1_000_000_001 + 1_234_567))
    made = StepMarks(clock=lambda: next(looks))
    made.mark(RESULTS)
    step = TracedStep(step=0, phase="mixed", rows=(0,), marks=(made.packed(),))
    document = json.loads(chrome_trace([Traced(trace_id=1, steps=(step,), engine=b"")], 1, "", FACTS))
    (whole, part) = (event for event in document["traceEvents"] if event["ph"] == "X")
    assert whole["dur"] == part["dur"] == 1234.567 and whole["ts"] == 0


def test_why_it_ended_early_is_told() -> None:
    document = json.loads(chrome_trace([traced(is_full=True), None], 9, "no step within 1 s", FACTS))
    reason = document["otherData"]["ended_early"]
    assert reason == "no step within 1 s; replica 0 had as many marks as a trace may hold; replica 1 gave no trace"
    assert document["otherData"]["steps"] == [2, 0]
    empty = json.loads(chrome_trace([Traced(trace_id=1, steps=(), engine=b"")], 9, "", FACTS))
    assert [event["ph"] for event in empty["traceEvents"]] == ["M"] * 3


def shown(data: bytes, width: int = 100) -> str:
    console = Console(width=width)
    with console.capture() as seen:
        console.print(shares_table(read_shares(data)))
    return seen.get()


def test_shares_are_of_steps_and_what_was_waited_for_them() -> None:
    shares = read_shares(chrome_trace([traced()], 2, "", FACTS))
    assert [rank.name for rank in shares.ranks] == ["0.0", "0.1"]
    rank = shares.ranks[1]
    assert (rank.num_steps, rank.step_ms, rank.total_ms) == (2, 18.0, 22.0)
    assert rank.per_step("attention") == 2.0 and rank.share("attention") == pytest.approx(4 / 22)
    assert sum(rank.parts.values()) == pytest.approx(rank.total_ms)
    assert engine_lines(shares) == ["engine 0: plan 0.500, hand over 0.500, collect 4.500, book 0.500 ms a step"]
    lines = shown(chrome_trace([traced()], 2, "", FACTS)).splitlines()
    assert lines[0].split() == ["ms", "a", "step,", "share", "rank", "0.0", "rank", "0.1"]
    assert ["attention", "2.000", "18%", "2.000", "18%"] in [line.split() for line in lines]
    assert lines[-1].split() == ["all", "11.000", "100%", "11.000", "100%"]


def test_of_many_ranks_the_mean_and_the_ends_are_shown() -> None:
    lines = shown(chrome_trace([traced(64), traced(64)], 2, "", FACTS), width=80).splitlines()
    assert lines[0].split()[-3:] == ["mean", "least", "most"] and max(map(len, lines)) <= 80
    assert ["experts", "2.000", "18%", "2.000", "18%", "(0.0)", "2.000", "18%", "(0.0)"] in [x.split() for x in lines]


GOOD = json.loads(chrome_trace([traced()], 2, "", FACTS))


def changed(change: Callable[[dict[str, Any]], None]) -> bytes:
    document = json.loads(json.dumps(GOOD))
    change(document)
    return json.dumps(document).encode()


@pytest.mark.parametrize(
    "data",
    [
        b"", b"<html>", b"[]", b"null", b"{}", b"[" * 100_000,
        changed(lambda one: one.pop("traceEvents")),
        changed(lambda one: one.update(traceEvents={})),
        changed(lambda one: one.update(traceEvents=[5])),
        changed(lambda one: one["otherData"].update(steps_asked="2")),
        changed(lambda one: one["otherData"].update(steps=[True])),
        changed(lambda one: one["otherData"].update(ended_early=None)),
        changed(lambda one: one["traceEvents"][-1].update(pid=-1)),
        changed(lambda one: one["traceEvents"][-1].update(tid="1")),
        changed(lambda one: one["traceEvents"][-1].update(dur=-1)),
        changed(lambda one: one["traceEvents"][-1].update(dur="nan")),
        changed(lambda one: one["traceEvents"][-1].update(dur=10**400)),
        changed(lambda one: one["traceEvents"][-1].update(cat="other")),
        changed(lambda one: one["traceEvents"][-1].update(name="\x1b[2J")),
    ],
)  # fmt: skip
def test_what_is_no_trace_is_refused_in_one_printable_line(data: bytes) -> None:
    with pytest.raises(ValueError, match="no step trace") as error:
        read_shares(data)
    assert str(error.value).isprintable()


# --- the route -------------------------------------------------------------------------------------------------------
class Session:
    """A session of one replica that is done after so many looks, or never by itself."""

    def __init__(self, looks: int | None) -> None:
        self.num_steps, self.steps = 2, [0]
        self.traces: list[Traced | None] = [None]
        self.looks = looks
        self.stopped = self.closed = False

    @property
    def is_done(self) -> bool:
        if self.looks is not None:
            self.looks -= 1
            if self.looks <= 0:
                self.traces, self.steps = [traced()], [2]
        return self.traces[0] is not None

    def stop(self) -> None:
        self.stopped, self.looks = True, 1

    def close(self) -> None:
        self.closed = True


def tracing(session: Session, **options: Any) -> tuple[ServerState, list[int]]:
    state, asked = make_state(fake(), **options), []

    def begin(steps: int) -> Any:
        asked.append(steps)
        return session

    state.begin_trace = begin
    return state, asked


def test_a_trace_is_recorded_and_the_next_one_may_be() -> None:
    session = Session(3)
    state, asked = tracing(session)
    response = post(state, "/v1/trace?steps=2", b"")
    assert response.status_code == 200 and response.headers["content-type"] == "application/json"
    check_trace(response.json(), num_ranks=[2], num_steps=[2])
    assert response.json()["otherData"]["model"] == "gull"
    assert asked == [2] and session.closed and not session.stopped and state.trace is None
    assert get(state, "/v1/trace").json() == {"recording": False}


def test_an_idle_server_ends_it_with_what_there_is() -> None:
    session = Session(None)
    state, _ = tracing(session)
    document = post(state, "/v1/trace?steps=2&idle_timeout=0.1", b"").json()
    assert session.stopped and document["otherData"]["ended_early"] == "no step within 0.1 s: idle, replica 0"
    assert document["otherData"]["steps"] == [2]


def test_no_trace_takes_longer_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_routes, "MOST_SECONDS", 0.1)
    state, _ = tracing(Session(None))
    assert "a trace ends after" in post(state, "/v1/trace", b"").json()["otherData"]["ended_early"]


@pytest.mark.parametrize(
    "query",
    ["steps=0", "steps=1001", "steps=-1", "steps=1.5", "steps=%C2%B2", "steps=" + "9" * 9999,
     "idle_timeout=0", "idle_timeout=nan", "idle_timeout=inf", "idle_timeout=x"],
    ids=lambda query: query[:20],
)  # fmt: skip
def test_wrong_numbers_are_named(query: str) -> None:
    state, asked = tracing(Session(1))
    response = post(state, f"/v1/trace?{query}", b"")
    assert response.status_code == 400 and error_of(response)["param"] == query.partition("=")[0]
    assert not asked and len(response.text) < 500


def test_the_key_is_asked_for_and_a_server_must_be_ready() -> None:
    state, asked = tracing(Session(1), api_keys=("key",))
    assert post(state, "/v1/trace", b"").status_code == get(state, "/v1/trace").status_code == 401
    assert post(state, "/v1/trace", b"", headers={"authorization": "Bearer key"}).status_code == 200
    assert asked == [200]
    assert post(make_state(None), "/v1/trace", b"").status_code == 503


async def _until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0.01)


def test_one_trace_at_a_time_and_who_hangs_up_ends_it() -> None:
    session = Session(None)
    state, asked = tracing(session)

    async def body(client: httpx.AsyncClient) -> None:
        _, writer = await connect(client)
        writer.write(b"POST /v1/trace?steps=2 HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\n\r\n")
        await _until(lambda: state.trace is not None)
        assert (await client.get("/v1/trace")).json() == {"recording": True, "steps": 2, "recorded": [0]}
        second = await client.post("/v1/trace")
        assert second.status_code == 409 and error_of(second)["code"] == "trace_running"
        writer.close()
        await _until(lambda: session.closed)
        assert state.trace is None

    with_server(state, body)
    assert asked == [2]


# --- the command -----------------------------------------------------------------------------------------------------
def pages(status: int, data: bytes) -> Pages:
    found = Pages()
    found.by_path["/v1/trace?steps=2&idle_timeout=10.0"] = (status, data)
    return found


def test_the_command_writes_the_file_and_prints_shares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = chrome_trace([traced()], 9, "no step within 10 s: idle, replica 0", FACTS)
    path = tmp_path / "a.json"
    asked = pages(200, data)
    with small_server(asked) as url:
        assert trace({"url": (url + "/v1",), "steps": 2, "output": str(path), "api_key": "secret"}) == 0
    assert path.read_bytes() == data and set(asked.keys) == {"Bearer secret"}
    out = capsys.readouterr().out
    assert "attention" in out and f"{path}: steps 2" in out
    assert "ended before 9 steps: no step within 10 s: idle, replica 0" in out and "secret" not in out


@pytest.mark.parametrize(
    ("status", "data", "reason"),
    [
        (200, chrome_trace([Traced(trace_id=1, steps=(), engine=b"")], 2, "no step", FACTS), "is written: no step"),
        (200, b"<html>", "is no step trace"),
        (401, b"", "answers 401; give --api-key"),
        (409, b'{"error": {"message": "a trace is\\u001b[2J"}}', "answers 409: a trace is?[2J"),
        (404, b"nope", "is that a moewe server?"),
    ],
)  # fmt: skip
def test_what_gives_no_trace_is_one_line_and_no_file(tmp_path: Path, status: int, data: bytes, reason: str) -> None:
    path = tmp_path / "a.json"
    with small_server(pages(status, data)) as url, pytest.raises(NoAnswerError) as error:
        trace({"url": (url,), "steps": 2, "output": str(path)})
    assert reason in str(error.value) and str(error.value).isprintable() and not path.exists()


def test_a_terminal_sees_how_far_it_is_and_a_clean_line_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr(command, "_PROGRESS_EVERY_S", 0.01)
    asked, shown, data = Pages(), threading.Event(), chrome_trace([traced()], 2, "", FACTS)

    class Answers(dict[str, tuple[int, bytes]]):
        """The trace comes when its progress has been asked for some times."""

        def get(self, path: str, default: Any = None) -> Any:
            if path == "/v1/trace":
                if len(asked.keys) > 3:
                    shown.set()
                return 200, b'{"steps": 2, "recorded": [1, 0]}'
            assert shown.wait(10)
            return 200, data

    asked.by_path = Answers()
    with small_server(asked) as url:
        assert command.trace({"url": (url,), "steps": 2, "output": str(tmp_path / "a.json")}) == 0
    err = capsys.readouterr().err
    assert "\r1, 0 of 2 steps" in err and "\r\x1b[K" in err


def test_no_server_is_one_line() -> None:
    with pytest.raises(NoAnswerError, match="refused"):
        trace({"url": ("127.0.0.1:1",)})


@pytest.mark.parametrize(
    ("tool", "message"),
    [
        ({"url": ("a", "b")}, "2 servers are named"),
        ({"steps": 1001}, "--steps 1001 is not allowed; use 1 to 1000"),
        ({"idle_timeout": float("nan")}, "--idle-timeout nan is not allowed"),
        ({"output": "/nowhere/at/all.json"}, "--output /nowhere/at/all.json cannot be written"),
        ({"output": "/"}, "cannot be written"),
        ({"url": ("ftp://x",)}, "URL 'ftp://x' is no URL"),
    ],
)
def test_mistakes_are_named(tool: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        trace(tool)
    assert message in str(error.value)
