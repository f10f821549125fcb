"""The door: no body read beyond the limit, no work for a client that is gone."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import pytest

from moewe.server.state import ServerState
from tests.support.fake_replicas import (
    FakeReplicas,
    ask,
    connect,
    make_state,
    on_the_wire,
    says,
    tokenizer,
    with_server,
)
from tests.support.scraped import sums


def replicas(count: int = 2000, pause: float = 0.01) -> FakeReplicas:
    return FakeReplicas(tokenizer(), lambda prompt: [70] * count, pause=pause)


async def raw(client: httpx.AsyncClient, request: bytes) -> bytes:
    reader, writer = await connect(client)
    writer.write(request)
    await writer.drain()
    answer = await asyncio.wait_for(reader.read(), 5)  # the server closes the connection
    writer.close()
    return answer


def test_announced_body_beyond_the_limit_is_refused_unread() -> None:
    state = make_state(replicas(), max_body_bytes=1000)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 50000000\r\n\r\n"
    answer = with_server(state, lambda client: raw(client, head))
    assert answer.startswith(b"HTTP/1.1 413") and b"1000 bytes" in answer


def test_unannounced_body_beyond_the_limit_is_cut_off() -> None:
    state = make_state(replicas(), max_body_bytes=1000)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
    answer = with_server(state, lambda client: raw(client, head + b"400\r\n" + b"x" * 0x400 + b"\r\n"))
    assert answer.startswith(b"HTTP/1.1 413")
    metrics = state.metrics.totals.errors
    assert metrics[413] == 1


@pytest.mark.parametrize("target", [b"http://a/health", b"HTTP://a:80/health", b"/health"])
def test_a_target_may_be_a_whole_url(target: bytes) -> None:
    head = b"GET " + target + b" HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"
    answer = with_server(make_state(replicas()), lambda client: raw(client, head))
    assert answer.startswith(b"HTTP/1.1 200"), answer


def test_a_whole_url_gets_nobody_around_the_key() -> None:
    state = make_state(replicas(), api_keys=("secret",))
    for target in (b"http://health/v1/models", b"http://a/v1/models", b"http:///v1/models"):
        head = b"GET " + target + b" HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"
        assert with_server(state, lambda client, head=head: raw(client, head)).startswith(b"HTTP/1.1 401")


def test_a_body_framed_in_two_ways_is_refused_and_what_follows_is_not_read() -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 4\r\ntransfer-encoding: chunked\r\n\r\n"
    hidden = b"0\r\n\r\nGET /version HTTP/1.1\r\nhost: a\r\n\r\n"
    answer = with_server(make_state(replicas()), lambda client: raw(client, head + hidden))
    assert answer.startswith(b"HTTP/1.1 400") and b"exclude each other" in answer and answer.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_hangs_up_is_aborted_within_a_second(stream: bool) -> None:
    fakes = replicas()
    state = make_state(fakes, max_model_len=4096)

    async def run(client: httpx.AsyncClient) -> float:
        _, writer = await connect(client)
        writer.write(on_the_wire({"model": "gull", "prompt": "a", "max_tokens": 2000, "stream": stream}))
        await asyncio.sleep(0.2)
        assert fakes.num_running == 1
        gone = time.monotonic()
        writer.close()
        while fakes.num_running or state.hub.num_calls:
            await asyncio.sleep(0.01)
        return time.monotonic() - gone

    assert with_server(state, run) < 1.0
    assert len(fakes.aborted) == 1 and state.metrics.totals.finished["abort"] == 1


def test_counters_equal_what_clients_counted() -> None:
    tokens = tokenizer()
    fakes = FakeReplicas(tokens, says("the sea and the gull"), ends=True)
    state = make_state(fakes)

    async def run(client: httpx.AsyncClient) -> tuple[dict[str, int], str]:
        usage = {"prompt_tokens": 0, "completion_tokens": 0, "stop": 0, "length": 0}
        for i in range(6):
            limit = {"max_tokens": 2} if i % 2 else {}
            body = {"model": "gull", "prompt": ["hi", "you"][i % 2], **limit}
            answer = (await client.post("/v1/completions", json=body)).json()
            for name in ("prompt_tokens", "completion_tokens"):
                usage[name] += answer["usage"][name]
            usage[answer["choices"][0]["finish_reason"]] += 1
        assert (await client.post("/v1/completions", json={"model": "gull", "prompt": [9999]})).status_code == 400
        return usage, (await client.get("/metrics")).text

    usage, text = with_server(state, run)
    values = sums(text, "reason", "status")
    assert values["moewe_prompt_tokens_total"] == usage["prompt_tokens"]
    assert values["moewe_generation_tokens_total"] == usage["completion_tokens"]
    assert values["moewe_requests_finished_total|stop"] == usage["stop"] == 3
    assert values["moewe_requests_finished_total|length"] == usage["length"] == 3
    assert values["moewe_requests_finished_total|abort"] == values["moewe_requests_finished_total|error"] == 0
    assert values["moewe_request_errors_total|400"] == 1
    assert values["moewe_requests_running"] == values["moewe_kv_usage_ratio"] == 0
    assert values["moewe_time_to_first_token_seconds_count"] == 6


def test_too_many_live_requests_are_asked_to_come_again() -> None:
    state = make_state(replicas())

    async def run(client: httpx.AsyncClient) -> list[httpx.Response]:
        body = {"model": "gull", "prompt": ["a"] * 100, "max_tokens": 50}
        first = asyncio.ensure_future(client.post("/v1/completions", json=body))
        while state.hub.num_live < 100:
            await asyncio.sleep(0.01)
        late = [await client.post("/v1/completions", json=body | {"prompt": "a", "stream": s}) for s in (False, True)]
        return [await first, *late, await client.post("/v1/completions", json=body | {"prompt": "a", "max_tokens": 1})]

    served, *late, again = with_server(state, run)
    assert served.status_code == again.status_code == 200
    for response in late:
        assert response.status_code == 429 and int(response.headers["retry-after"]) > 0
        error = response.json()["error"]
        assert (error["code"], error["type"]) == ("queue_full", "rate_limit_error")
        assert "100 prompts run or wait already" in error["message"] and "--max-queued-requests" in error["message"]
    assert state.hub.num_live == state.hub.num_calls == 0


def test_more_prompts_at_once_than_can_ever_wait_are_refused() -> None:
    state = make_state(replicas())
    response = ask(state, "POST", "/v1/completions", json={"model": "gull", "prompt": ["a"] * 101, "max_tokens": 1})
    assert response.status_code == 400 and "send at most 100 at once" in response.json()["error"]["message"]
    assert state.hub.num_live == state.hub.num_calls == 0


def test_long_prompts_do_not_hold_up_the_event_loop() -> None:
    state = make_state(replicas(pause=0.0), max_model_len=4096)
    tokens: Any = state.tokenizer
    encode = tokens.encode

    def slow(text: str, add_special_tokens: bool = True) -> list[int]:
        time.sleep(0.5)
        return list(encode(text, add_special_tokens))

    tokens.encode = slow

    async def run(client: httpx.AsyncClient) -> float:
        slow_one = asyncio.ensure_future(
            client.post("/v1/completions", json={"model": "gull", "prompt": "a", "max_tokens": 1})
        )
        await asyncio.sleep(0.1)
        start = time.monotonic()
        assert (await client.get("/health")).status_code == 200
        took = time.monotonic() - start
        assert (await slow_one).status_code == 200
        return took

    assert with_server(state, run) < 0.3


def test_prompt_without_a_single_token_is_refused() -> None:
    tokens = tokenizer()
    tokens._config["add_bos_token"] = False
    state: ServerState = make_state(FakeReplicas(tokens, says("a")))
    for prompt in ("", [""], ["a", ""]):
        response = ask(state, "POST", "/v1/completions", json={"model": "gull", "prompt": prompt, "max_tokens": 1})
        assert response.status_code == 400 and "no token" in response.json()["error"]["message"]


async def everything(reader: asyncio.StreamReader) -> bytes:
    """Return what comes until the connection ends; a reset after the answer (ours crossed it) is an end too."""
    text = b""
    while True:
        try:
            piece = await reader.read(1 << 16)
        except ConnectionResetError:
            return text
        if not piece:
            return text
        text += piece


@pytest.mark.parametrize("drip", [False, True], ids=["a pause", "a byte now and then"])
def test_body_that_never_comes_is_given_up(drip: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moewe.server.http.guard.BODY_PAUSE_S", 0.3)
    state = make_state(replicas())

    async def run(client: httpx.AsyncClient) -> bytes:
        reader, writer = await connect(client)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 100\r\n\r\n{")
        answer = asyncio.ensure_future(everything(reader))
        while drip and not answer.done():
            writer.write(b" ")
            await asyncio.sleep(0.1)
        text = await asyncio.wait_for(answer, 5)
        writer.close()
        return text

    answer = with_server(state, run)
    assert answer.startswith(b"HTTP/1.1 408") and b"connection: close" in answer and b"too slowly" in answer
