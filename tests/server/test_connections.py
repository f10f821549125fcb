"""What one connection may hold: a place, time for its header, time to read; and who is beyond the limits."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from moewe.runtime.messages import Delta
from moewe.server.answers.completion import CompletionAnswer
from tests.support.asking import events, fake, post
from tests.support.fake_replicas import FakeReplicas, connect, make_state, on_the_wire, tokenizer, with_server

HEALTH = b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n"
MODELS = b"GET /v1/models HTTP/1.1\r\nhost: a\r\n\r\n"


async def rest(reader: asyncio.StreamReader, within: float = 5.0) -> bytes:
    """Return what comes until the server ends the connection."""
    try:
        return await asyncio.wait_for(reader.read(), within)
    except ConnectionResetError:
        return b""


@pytest.mark.parametrize("sent", [b"", b"GET /v1/mod", b"GET / HTTP/1.1\r\nhost: a\r\n"])
def test_a_header_that_does_not_come_ends_the_connection(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moewe.server.http.connections.HEADER_TIMEOUT_S", 0.3)

    async def run(client: httpx.AsyncClient) -> bytes:
        reader, writer = await connect(client)
        answer = asyncio.ensure_future(rest(reader))
        for byte in sent or b"\r":
            if answer.done():
                break
            writer.write(bytes([byte]) if sent else b"")
            await asyncio.sleep(0.02)  # a byte now and then is no header
        return await answer

    assert with_server(make_state(fake()), run) == b""


def test_a_further_request_must_come_whole_too_and_a_long_answer_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moewe.server.http.connections.HEADER_TIMEOUT_S", 0.3)
    slow = FakeReplicas(tokenizer(), lambda prompt: [70] * 50, pause=0.02)

    async def run(client: httpx.AsyncClient) -> tuple[bytes, bytes]:
        reader, writer = await connect(client)
        writer.write(on_the_wire({"model": "gull", "prompt": "a", "max_tokens": 40}))
        first = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
        await asyncio.sleep(0.6)  # between requests the keep-alive time counts, not the header's
        writer.write(MODELS)
        await asyncio.wait_for(reader.readuntil(b"HTTP/1.1 200"), 5)
        writer.write(b"GET /v1/mod")
        return first, await rest(reader)

    first, second = with_server(make_state(slow), run)
    assert first.startswith(b"HTTP/1.1 200") and b'"object":"list"' in second


def test_connections_beyond_the_limit_are_told_and_probes_are_not_refused() -> None:
    state = make_state(fake(), limit_concurrency=3)

    async def run(client: httpx.AsyncClient) -> tuple[bytes, bytes, bytes]:
        idle = [await connect(client) for _ in range(3)]  # they hold their places and ask nothing
        await asyncio.sleep(0.1)
        answers = []
        for asked in (MODELS, HEALTH.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")):
            reader, writer = await connect(client)
            writer.write(asked)
            answers.append(await rest(reader))
            writer.close()
        for _, writer in idle:
            writer.close()
        await asyncio.sleep(0.1)
        reader, writer = await connect(client)
        writer.write(MODELS)
        return answers[0], answers[1], await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)

    refused, probe, after = with_server(state, run)
    head, _, body = refused.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503") and b"retry-after" in head and b"x-request-id" in head
    assert json.loads(body)["error"]["code"] == "too_many_connections" and b"--limit-concurrency" in body
    assert probe.startswith(b"HTTP/1.1 200") and after.startswith(b"HTTP/1.1 200")


def test_far_beyond_the_limit_nobody_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moewe.server.http.connections.MOST_TOLD", 1)

    async def run(client: httpx.AsyncClient) -> bytes:
        held = [await connect(client) for _ in range(2)]
        await asyncio.sleep(0.1)
        reader, writer = await connect(client)
        answer = await rest(reader)
        for _, each in held:
            each.close()
        writer.close()
        return answer

    assert with_server(make_state(fake(), limit_concurrency=1), run) == b""


@pytest.mark.parametrize("head", [b"x-long: " + b"a" * 70_000, b"\r\n".join(b"x-%d: a" % i for i in range(9000))])
def test_a_header_of_more_than_64_kib_is_refused(head: bytes) -> None:
    async def run(client: httpx.AsyncClient) -> bytes:
        reader, writer = await connect(client)
        writer.write(b"GET /health HTTP/1.1\r\nhost: a\r\n" + head)
        return await rest(reader)

    answer = with_server(make_state(fake()), run)
    assert answer == b"" or answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 431"))


@pytest.mark.parametrize(
    "sent", [b"\x16\x03\x01\x00\xa5", b"GET /health HTTP/1.1\r\n\r\n", b"GET /\xe9 HTTP/1.1\r\n\r\n"]
)
def test_what_is_no_request_gets_an_error_object_and_the_end(sent: bytes) -> None:
    async def run(client: httpx.AsyncClient) -> bytes:
        reader, writer = await connect(client)
        writer.write(sent + b"\r\n\r\n")
        return await rest(reader)

    head, _, body = with_server(make_state(fake()), run).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400") and b"connection: close" in head
    error = json.loads(body)["error"]
    assert error["code"] == "bad_request" and "no well-formed HTTP/1.1 request" in error["message"]


def test_a_client_that_reads_nothing_is_cut_off_and_its_request_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moewe.server.http.connections.WRITE_TIMEOUT_S", 0.5)
    fakes = FakeReplicas(tokenizer(), lambda prompt: [70] * 4000, pause=0.0)
    state: Any = make_state(fakes, max_model_len=4096)

    async def run(client: httpx.AsyncClient) -> None:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, (client.base_url.host, client.base_url.port))
        asked = on_the_wire({"model": "gull", "prompt": ["a"] * 30, "max_tokens": 4000, "stream": True})
        await asyncio.get_running_loop().sock_sendall(sock, asked)
        while not state.hub.num_calls:
            await asyncio.sleep(0.01)
        while state.hub.num_calls or fakes.num_running:  # the test's own time limit ends a failure
            await asyncio.sleep(0.05)
        sock.close()

    with_server(state, run)
    assert state.metrics.totals.finished["abort"] > 0


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
def test_events_on_the_wire_are_those_of_the_application(path: str, version: bytes) -> None:
    body: dict[str, Any] = {"model": "gull", "max_tokens": 5, "stream": True}
    body |= {"prompt": "a"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
    expected = [without_head(event) for event in events(post(make_state(fake()), path, body))]

    async def run(client: httpx.AsyncClient) -> bytes:
        reader, writer = await connect(client)
        asked = on_the_wire(body).replace(b"/v1/completions", path.encode()).replace(b"HTTP/1.1", b"HTTP/" + version)
        for closing in (b"", b"connection: close\r\n") if version == b"1.1" else (b"",):
            writer.write(asked.replace(b"host: a\r\n", b"host: a\r\n" + closing))
        return await rest(reader)

    answers = with_server(make_state(fake()), run).split(b"HTTP/1.1 200")[1:]
    assert len(answers) == (2 if version == b"1.1" else 1)  # after a stream the connection takes another request
    for answer in answers:
        head, _, data = answer.partition(b"\r\n\r\n")
        assert (b"transfer-encoding: chunked" in head.lower()) is (version == b"1.1")
        text = joined(data) if version == b"1.1" else data
        assert [without_head(event) for event in events(httpx.Response(200, content=text))] == expected


def without_head(event: Any) -> Any:
    return event if event == "DONE" else event["choices"]


def joined(chunks: bytes) -> bytes:
    """Return the body that is sent in chunks; no chunk but the last is empty."""
    body, size = b"", -1
    while size:
        length, _, chunks = chunks.partition(b"\r\n")
        size = int(length, 16)
        assert chunks[size : size + 2] == b"\r\n"
        body, chunks = body + chunks[:size], chunks[size + 2 :]
    assert chunks == b""
    return body


def test_an_answer_that_breaks_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events are written where deltas of all streams arrive: an exception there must reach no other stream."""
    made = CompletionAnswer.text_events

    def text_events(self: CompletionAnswer, index: int, delta: Delta) -> bytes:
        if self.shape.prompts[0] == [7]:
            raise ValueError("this one cannot be written")
        return made(self, index, delta)

    monkeypatch.setattr(CompletionAnswer, "text_events", text_events)
    state = make_state(fakes := fake("the sea is wide", pause=0.01))

    held: list[Delta] = []

    def both(deltas: Sequence[Delta]) -> None:
        held.extend(deltas)
        if len({delta.request_id for delta in held}) == 2:  # the first of both in one piece, the broken one before
            state.hub.on_deltas(sorted(held, key=lambda delta: fakes.submitted[delta.request_id][0] != [7]))
            fakes.on_deltas = state.hub.on_deltas

    fakes.on_deltas = both

    async def run(client: httpx.AsyncClient) -> list[bytes]:
        connections = [await connect(client) for _ in range(2)]
        for (_, writer), prompt in zip(connections, ([7], [8]), strict=True):
            asked = on_the_wire({"model": "gull", "prompt": prompt, "max_tokens": 4, "stream": True})
            writer.write(asked.replace(b"host: a\r\n", b"host: a\r\nconnection: close\r\n"))
        return list(await asyncio.gather(*(rest(reader) for reader, _ in connections)))

    broken, whole = with_server(state, run)
    assert b"data: " not in broken and b"data: [DONE]" in whole
    assert not state.hub.num_calls and state.metrics.totals.finished["abort"] == 1
