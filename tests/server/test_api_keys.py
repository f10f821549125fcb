"""API keys: where they come from, that every route wants one (P-SEC-01), and that none is ever shown."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import httpx
import pytest
from starlette.routing import Route

from moewe.server.commands.serve import server_options
from moewe.server.http.app import build_app, build_routes
from moewe.server.http.guard import OPEN_PATHS
from moewe.server.http.keys import KEY_VARIABLE, MOST_FILE_BYTES, KeyCheck, gather_keys
from moewe.server.options import ServerOptions
from moewe.server.state import ServerState
from tests.support.asking import fake
from tests.support.fake_replicas import connect, make_state, with_server

KEY, OTHER = "s3cret-of-the-first", "s3cret-of-the-second"
METHODS = ("GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE", "TRACE", "CONNECT", "get", "NONSENSE")
WRONG: tuple[list[tuple[bytes, bytes]], ...] = (
    [],
    [(b"authorization", b"")],
    [(b"authorization", b"Bearer")],
    [(b"authorization", b"Bearer ")],
    [(b"authorization", b"Bearer wrong")],
    [(b"authorization", KEY.encode())],
    [(b"authorization", b"Basic " + KEY.encode())],
    [(b"authorization", b"Bearer " + KEY[:-1].encode())],
    [(b"authorization", b"Bearer " + KEY.encode() + b"x")],
    [(b"authorization", b"Bearer " + KEY.upper().encode())],
    [(b"authorization", f"Bearer {KEY}, Bearer {OTHER}".encode())],
    [(b"authorization", b"Bearer " + KEY.encode()), (b"authorization", b"Bearer wrong")],
    [(b"x-api-key", KEY.encode()), (b"cookie", b"key=" + KEY.encode())],
    [(b"authorization", "Bearer \u00e9\u00df".encode())],
    [(b"x-forwarded-for", b"127.0.0.1"), (b"x-original-url", b"/health"), (b"x-http-method-override", b"GET")],
)


def routes_of(state: ServerState) -> list[str]:
    """Return the path of every route that the application has, its parameters filled in."""
    routes = build_routes(state).routes
    assert all(isinstance(route, Route) for route in routes)  # no mount hides others
    return sorted({route.path.replace("{name:path}", "gull") for route in routes if isinstance(route, Route)})


def spellings(path: str) -> Iterator[str]:
    yield path
    yield from (f"/{path}", f"{path}/", f"{path}//", f"{path}?key={KEY}", f"{path};a", f"{path}%00", f"{path}%20")
    yield from (path.upper(), path.title(), f"/.{path}", f"/health/..{path}", f"/static/..{path}", f"/health{path}")
    yield from (
        path.replace("/", "//"),
        path.replace("/", "%2f"),
        path.replace("/", "\\"),
        f"/{path[1:].encode().hex()}",
    )
    yield from (f"/%{ord(path[1]):02x}{path[2:]}" if len(path) > 1 else "/%2f", f"http://moewe{path}", f"/api{path}")


async def status_of(app: Any, method: str, target: str, headers: list[tuple[bytes, bytes]]) -> int:
    """Return the status of a request whose path reaches the application exactly as written, as uvicorn unquotes it."""
    path, _, query = target.partition("?")
    scope: dict[str, Any] = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
        "path": unquote(path), "raw_path": path.encode(), "root_path": "", "query_string": query.encode(),
        "headers": headers, "client": ("10.0.0.9", 1), "server": ("moewe", 80), "state": {},
    }  # fmt: skip
    statuses: list[int] = []
    bodies = [b'{"model": "gull", "prompt": "a"}']

    async def receive() -> MutableMapping[str, Any]:
        if not bodies:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": bodies.pop(), "more_body": False}

    async def send(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    await app(scope, receive, send)
    (status,) = statuses
    return status


# --- P-SEC-01 ---------------------------------------------------------------------------------------------------------
def test_every_route_by_every_method_and_spelling_wants_a_key() -> None:
    state = make_state(fake(), api_keys=(OTHER, KEY))
    app, paths = build_app(state), routes_of(state)
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/metrics", "/v1/topology"} <= set(paths)

    async def run() -> int:
        tried = 0
        for target in {spelling for path in [*paths, "/docs", "/openapi.json", "*"] for spelling in spellings(path)}:
            for method in METHODS:
                status = await status_of(app, method, target, [])
                is_open = unquote(target.partition("?")[0]) in OPEN_PATHS and method in ("GET", "HEAD")
                assert status == (200 if is_open else 401), (method, target, status)
                tried += 1
        return tried

    assert asyncio.run(run()) > 1000
    assert not state.hub.num_live


def test_nothing_but_one_whole_key_lets_in() -> None:
    state = make_state(fake(), api_keys=(OTHER, KEY))
    app = build_app(state)

    async def run() -> None:
        for path in routes_of(state):
            if path not in OPEN_PATHS:
                for headers in WRONG:
                    assert await status_of(app, "GET", path, headers) == 401, (path, headers)
                    assert await status_of(app, "POST", path, headers) == 401, (path, headers)
        for key in (OTHER, KEY):
            for scheme in ("Bearer ", "bearer ", "BEARER  "):
                right = [(b"authorization", (scheme + key).encode())]
                assert await status_of(app, "GET", "/v1/models", right) == 200
                assert await status_of(app, "POST", "/v1/completions", right) == 200
                assert await status_of(app, "POST", "/v1/completions/", right) == 404

    asyncio.run(run())


def test_open_paths_are_the_probes_and_the_pages_and_tell_nothing() -> None:
    pages = {"/", "/docs", *(f"/static/{name}" for name in ("chat.css", "chat.js", "docs.css", "icon.svg"))}
    assert {"/health", "/ready", *pages} == OPEN_PATHS

    async def run(client: httpx.AsyncClient) -> str:
        answers = [await client.get(path) for path in sorted(OPEN_PATHS)]
        assert all(answer.status_code == 200 for answer in answers)
        return "".join(answer.text for answer in answers)

    text = with_server(make_state(fake(), api_keys=(KEY,)), run)
    assert "gull" not in text and KEY not in text


@pytest.mark.parametrize(
    "line",
    ["GET //v1/models HTTP/1.1", "GET http://moewe/v1/models HTTP/1.1", "GET http://moewe/health HTTP/1.1",
     "OPTIONS * HTTP/1.1", "GET /health/../v1/models HTTP/1.1", "GET /%2e/v1/models HTTP/1.1",
     "GET /v1/models#/health HTTP/1.1", "POST / HTTP/1.1", "HEAD /v1/models HTTP/1.0"],
)  # fmt: skip
def test_no_request_line_gets_around_the_door(line: str) -> None:
    async def run(client: httpx.AsyncClient) -> bytes:
        reader, writer = await connect(client)
        writer.write(f"{line}\r\nhost: moewe\r\nconnection: close\r\n\r\n".encode())
        answer = await asyncio.wait_for(reader.read(), 5)
        writer.close()
        return answer

    assert with_server(make_state(fake(), api_keys=(KEY,)), run).split()[1] == b"401"


def test_the_time_of_a_comparison_does_not_end_at_the_first_key(monkeypatch: pytest.MonkeyPatch) -> None:
    import hmac

    compared: list[tuple[bytes, bytes]] = []
    real = hmac.compare_digest

    def counting(given: bytes, known: bytes) -> bool:
        compared.append((given, known))
        return real(given, known)

    monkeypatch.setattr("moewe.server.http.keys.hmac.compare_digest", counting)
    check = KeyCheck([KEY, OTHER, "third"])
    for key, right in ((KEY, True), ("third", True), ("", False), ("x" * 9999, False)):
        compared.clear()
        assert check.accepts([(b"authorization", f"Bearer {key}".encode())]) is right
        assert len(compared) == 3 and {len(side) for pair in compared for side in pair} == {32}


# --- never shown ------------------------------------------------------------------------------------------------------
def test_keys_are_neither_in_logs_nor_in_answers_nor_in_what_is_printed(caplog: pytest.LogCaptureFixture) -> None:
    async def run(client: httpx.AsyncClient) -> str:
        answers = []
        for key in (KEY, KEY + "x", OTHER):
            headers = {"authorization": f"Bearer {key}"}
            for path in ("/v1/models", "/nothing", "/metrics", f"/v1/models?api_key={key}", "/v1/topology"):
                answers.append(await client.get(path, headers=headers))
            answers.append(await client.post("/v1/completions", headers=headers, content=b"{"))
        return "".join(f"{answer.text}{answer.headers}" for answer in answers)

    with caplog.at_level(logging.DEBUG):
        options = server_options({"api_keys": (KEY, OTHER)})
        text = with_server(make_state(fake(), api_keys=options.api_keys), run)
        logging.getLogger("moewe").info("options: %s %r", options, {"all": options})
    ours = [record.getMessage() for record in caplog.records if not record.name.startswith(("httpx", "httpcore"))]
    shown = "\n".join([text, *ours, str(options)])
    assert "/v1/topology" in shown and "2 API keys" in shown
    assert KEY not in shown and OTHER not in shown


# --- where they come from ---------------------------------------------------------------------------------------------
def key_file(tmp_path: Path, text: str | bytes, mode: int = 0o600) -> str:
    path = tmp_path / "keys"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    path.chmod(mode)
    return str(path)


def test_flags_and_file_are_taken_together_and_the_environment_alone(tmp_path: Path) -> None:
    file = key_file(tmp_path, f"# of the team\n\n  {KEY}  \r\n{OTHER}\n{KEY}")
    environment = {KEY_VARIABLE: "env-key", "PATH": "x"}
    assert gather_keys(("flag-key",), file, environment) == ("flag-key", KEY, OTHER)
    assert environment == {"PATH": "x"}  # nobody inherits it, used or not
    assert gather_keys((), file, {KEY_VARIABLE: "env-key"}) == (KEY, OTHER)
    assert gather_keys((), None, {KEY_VARIABLE: "env-key"}) == ("env-key",)
    assert gather_keys((), None, {}) == ()


def test_a_flag_is_warned_of_softly_and_an_open_file_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    gather_keys((), key_file(tmp_path, KEY), {})
    assert not caplog.records
    gather_keys((), key_file(tmp_path, KEY, 0o640), {})
    gather_keys((KEY,), None, {})
    first, second = (record.getMessage() for record in caplog.records)
    assert "chmod 600" in first and "list of processes" in second and KEY not in first + second


@pytest.mark.parametrize("text", ["", "# nothing\n\n", "two words\n", "k\u00e9y\n", b"\xff\xfe", "a\x00b", "x" * 4097])
def test_a_file_without_usable_keys_is_refused_without_showing_it(tmp_path: Path, text: str | bytes) -> None:
    with pytest.raises(ValueError, match="--api-key-file") as refusal:
        gather_keys((), key_file(tmp_path, text), {})
    assert "two words" not in str(refusal.value) and "xxx" not in str(refusal.value)


def test_files_that_cannot_be_read_or_are_no_keys_are_refused(tmp_path: Path) -> None:
    for path, says in ((tmp_path / "none", "No such file"), (tmp_path, "directory")):
        with pytest.raises(ValueError, match=says):
            gather_keys((), str(path), {})
    with pytest.raises(ValueError, match="larger than"):
        gather_keys((), key_file(tmp_path, b"a\n" * MOST_FILE_BYTES), {})


@pytest.mark.parametrize("key", ["", " ", "a b", "a\n", "\u00e9"])
def test_keys_that_no_header_can_carry_are_refused(key: str) -> None:
    with pytest.raises(ValueError, match="--api-key is not a key"):
        gather_keys((key,), None, {})
    with pytest.raises(ValueError, match=KEY_VARIABLE):
        gather_keys((), None, {KEY_VARIABLE: key})


def test_options_hold_the_keys_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    assert server_options({}).api_keys == (KEY,)
    assert server_options({}).api_keys == ()
    assert json.dumps(repr(ServerOptions(api_keys=(KEY,)))).count(KEY) == 0
