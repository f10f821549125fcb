"""A real server at its limits: a pool smaller than a prompt, and a full queue."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.support.chain import chain
from tests.support.server_process import NAME, ServerProcess

pytestmark = pytest.mark.spawn

BLOCK_BYTES = 2 * 2 * 2 * 16 * 16 * 4  # layers, k and v, heads, head size, tokens, bytes of a float32
ASKED = {"model": NAME, "prompt": "x", "temperature": 0}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """Ten blocks of 16 tokens, two requests at once, three in the queue."""
    flags = ("--kv-cache-memory-bytes", str(10 * BLOCK_BYTES), "--max-num-seqs", "2", "--max-queued-requests", "3")
    model = chain(["a", "b", "c"], loop=True, chat_template="{{ messages[0].content }}").path
    with ServerProcess(model, *flags, topology="EP1DP1") as server:
        yield server


def send(server: ServerProcess, *, prompts: int, max_tokens: int) -> socket.socket:
    """Post a completion and return its connection, unread."""
    body = json.dumps(ASKED | {"prompt": ["x"] * prompts, "max_tokens": max_tokens, "ignore_eos": True})
    connection = socket.create_connection(("127.0.0.1", server.port))
    head = f"POST /v1/completions HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    connection.sendall((head + body).encode())
    return connection


def read_all(connection: socket.socket) -> str:
    """Return what comes until the server closes."""
    with connection:
        return b"".join(iter(lambda: connection.recv(65536), b"")).decode()


def test_a_prompt_larger_than_the_pool_is_refused_and_the_next_one_served(server: ServerProcess) -> None:  # P-KV-01
    started = time.monotonic()
    with pytest.raises(openai.BadRequestError, match="10 KV blocks of 16 tokens") as caught:
        server.client().completions.create(**(ASKED | {"prompt": "x" * 200}), max_tokens=1)
    assert caught.value.code == "context_length_exceeded"
    assert server.client().completions.create(**ASKED, max_tokens=5).choices[0].text == "abcab"
    assert time.monotonic() - started < 10
    assert httpx.get(f"{server.url}/v1/models").json()["data"][0]["max_model_len"] == 160


def test_a_chat_without_a_limit_fills_the_context(server: ServerProcess) -> None:  # P-API-08
    for count, left in ((156, 4), (159, 1), (160, 0)):
        asked = {"model": NAME, "messages": [{"role": "user", "content": "x" * count}], "temperature": 0}
        if not left:
            with pytest.raises(openai.BadRequestError, match="160 tokens"):
                server.client().chat.completions.create(**asked)
            continue
        answer = server.client().chat.completions.create(**asked)
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (count, left)
        assert answer.choices[0].finish_reason == "length"


def test_slots_and_queue_may_be_full_and_the_next_one_comes_again(server: ServerProcess) -> None:
    """Two run and three wait, however they come; one more is told to come again, and six at once never fit."""
    client = server.client()
    engine = httpx.get(f"{server.url}/v1/topology").json()["replicas"][0]["ranks"][0]["pid"]
    os.kill(engine, signal.SIGSTOP)  # for a moment, so that nothing ends meanwhile
    try:
        busy = send(server, prompts=5, max_tokens=150)
        time.sleep(0.3)
        for stream in (False, True):
            with pytest.raises(openai.RateLimitError, match="5 prompts run or wait already") as caught:
                client.completions.create(**ASKED, max_tokens=1, stream=stream)
            assert caught.value.code == "queue_full" and int(caught.value.response.headers["retry-after"]) > 0
    finally:
        os.kill(engine, signal.SIGCONT)
    head, _, body = read_all(busy).partition("\r\n\r\n")
    assert head.startswith("HTTP/1.1 200")
    assert [len(choice["text"]) for choice in json.loads(body)["choices"]] == [150] * 5
    assert client.completions.create(**ASKED, max_tokens=1).choices[0].text == "a"
    with pytest.raises(openai.BadRequestError, match="at most 5 at once"):
        client.completions.create(model=NAME, prompt=["x"] * 6, max_tokens=1)
    assert server.counters()["moewe_requests_finished_total|error"] == 0
