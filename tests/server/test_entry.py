"""Request ids in and out on every answer and in log lines, one line a request, and crashes that are counted."""

from __future__ import annotations

import json
import logging
from typing import Any

import httpx
import pytest

from moewe.server.http.entry import request_id_in
from moewe.server.state import Phase, ServerState
from moewe.telemetry.logs import JsonLines
from tests.support.asking import HI, fake
from tests.support.fake_replicas import make_state, with_server

ASKED = {"model": "gull", "prompt": "a", "max_tokens": 2}


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """Return our log lines as JSON, formatted when they were written."""
    return [json.loads(line) for line in caplog.handler.shown]  # type: ignore[attr-defined]


@pytest.fixture
def as_json(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """Have lines formatted as they come, in the task that writes them."""
    shown: list[str] = []
    form, emit = JsonLines("moewe"), caplog.handler.emit

    def emitting(record: logging.LogRecord) -> None:
        if record.name.startswith("moewe"):
            shown.append(form.format(record))
        emit(record)

    caplog.handler.shown = shown  # type: ignore[attr-defined]
    caplog.handler.emit = emitting  # type: ignore[method-assign]
    caplog.set_level(logging.DEBUG, "moewe")
    return caplog


def test_every_answer_carries_the_id_it_was_asked_with() -> None:
    state = make_state(fake(), api_keys=("k",), allowed_origins=("https://a.example",))

    async def run(client: httpx.AsyncClient) -> list[tuple[int, str]]:
        right = {"authorization": "Bearer k"}
        asked: list[tuple[str, str, dict[str, Any]]] = [
            ("GET", "/health", {}),
            ("GET", "/", {}),
            ("GET", "/v1/models", {}),
            ("GET", "/v1/models", {"headers": right}),
            ("GET", "/nothing", {"headers": right}),
            ("PUT", "/v1/models", {"headers": right}),
            ("POST", "/v1/completions", {"headers": right, "json": ASKED}),
            ("POST", "/v1/completions", {"headers": right, "json": ASKED | {"stream": True}}),
            ("POST", "/v1/completions", {"headers": right, "content": b"{"}),
            ("POST", "/v1/chat/completions", {"headers": right, "json": HI | {"model": "other"}}),
            ("OPTIONS", "/v1/models",
             {"headers": {"origin": "https://a.example", "access-control-request-method": "GET"}}),
        ]  # fmt: skip
        got = []
        for number, (method, path, more) in enumerate(asked):
            headers = {**more.pop("headers", {}), "X-Request-Id": f"asked {number}~"}
            answer = await client.request(method, path, headers=headers, **more)
            assert answer.headers.get_list("x-request-id") == [f"asked {number}~"], path
            got.append((answer.status_code, path))
        return got

    statuses = [status for status, _ in with_server(state, run)]
    assert statuses == [200, 200, 401, 200, 404, 405, 200, 200, 400, 404, 200]


@pytest.mark.parametrize("given", [None, b"", b"   ", b"a\x01b", b"x" * 129, b"a\xe9", b"a\x7f"])
def test_an_id_that_is_none_or_not_plain_is_replaced_by_a_fresh_one(given: bytes | None) -> None:
    headers = [] if given is None else [(b"x-request-id", given)]
    first, second = request_id_in(headers), request_id_in(headers)
    assert first != second and len(first) == 32 and first.isalnum()


def test_of_two_ids_neither_is_taken_and_128_characters_are_fine() -> None:
    assert request_id_in([(b"x-request-id", b"a"), (b"x-request-id", b"b")]) not in ("a", "b")
    assert request_id_in([(b"x-request-id", b"x" * 128)]) == "x" * 128


def test_lines_about_a_request_carry_its_id(as_json: pytest.LogCaptureFixture) -> None:
    state = make_state(fake())

    async def run(client: httpx.AsyncClient) -> None:
        for name in ("first", "second"):
            await client.post("/v1/completions", json=ASKED, headers={"x-request-id": name})
        await client.get("/health", headers={"x-request-id": "probe"})
        await client.get("/a%0d%0ab?key=hush", headers={"x-request-id": "odd"})

    with_server(state, run)
    said = {(line["request_id"], line["level"], " ".join(line["message"].split()[1:4])) for line in lines(as_json)
            if line["logger"] == "moewe.access"}  # fmt: skip
    assert said == {
        ("first", "info", "POST /v1/completions 200"),
        ("second", "info", "POST /v1/completions 200"),
        ("probe", "debug", "GET /health 200"),
        ("odd", "info", "GET /a%0d%0ab 404"),
    }
    runs = [line["request_id"] for line in lines(as_json) if line["message"].startswith("runs as ")]
    assert runs == ["first", "second"]
    assert "hush" not in "".join(as_json.handler.shown)  # type: ignore[attr-defined]


def test_the_line_a_request_can_be_left_out(as_json: pytest.LogCaptureFixture) -> None:
    async def run(client: httpx.AsyncClient) -> None:
        await client.get("/version")

    with_server(make_state(fake(), disable_access_log=True), run)
    assert not [line for line in lines(as_json) if line["logger"] == "moewe.access"]


def test_a_crash_is_a_500_with_the_id_that_is_logged_and_counted(as_json: pytest.LogCaptureFixture) -> None:
    state: ServerState = make_state(fake())

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("a bug")

    state.hub.open = broken  # type: ignore[method-assign]

    async def run(client: httpx.AsyncClient) -> httpx.Response:
        return await client.post("/v1/completions", json=ASKED, headers={"x-request-id": "crash"})

    response = with_server(state, run)
    assert response.status_code == 500 and response.headers["x-request-id"] == "crash"
    assert response.json()["error"]["code"] == "internal_error" and "a bug" not in response.text
    assert state.metrics.totals.errors[500] == 1
    (line,) = [line for line in lines(as_json) if "a bug" in line["message"]]
    assert line["request_id"] == "crash" and line["level"] == "error"


def test_refusals_while_loading_and_of_the_door_are_counted_once() -> None:
    state = make_state(fake(), api_keys=("k",), max_body_bytes=2000)

    async def run(client: httpx.AsyncClient) -> None:
        right = {"authorization": "Bearer k"}
        await client.post("/v1/completions", json=ASKED)
        await client.post("/v1/completions", content=b"x" * 3000, headers=right)
        state.enter(Phase.DRAINING)
        await client.post("/v1/completions", json=ASKED, headers=right)
        await client.get("/v1/nothing", headers=right)

    with_server(state, run)
    assert dict(state.metrics.totals.errors) == {401: 1, 413: 1, 503: 1}
