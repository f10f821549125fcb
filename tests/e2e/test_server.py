"""A real server on a scripted checkpoint, asked by a real OpenAI client: texts, streams, hang-ups, metrics."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.support.chain import Chain, chain
from tests.support.server_process import NAME, ServerProcess

pytestmark = pytest.mark.spawn

TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
SCRIPT = ["AB", "CD", "EF", "GH", " the", " gull", "\U0001f600".encode(), "\u010f".encode(), "ab", " flies", " home"]
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def script() -> Chain:
    return chain(SCRIPT, loop=True, chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def server(script: Chain) -> Iterator[ServerProcess]:
    with ServerProcess(script.path, "--max-num-seqs", "4", "--kv-cache-memory-bytes", "64MiB") as server:
        yield server


def test_chat_streams_what_it_answers(server: ServerProcess, script: Chain) -> None:
    client = server.client()
    asked = {"model": NAME, "messages": HI, "max_tokens": len(script.token_ids), "temperature": 0}
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].message.content == script.text
    assert whole.choices[0].finish_reason == "length"
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == script.text and not any("\ufffd" in piece for piece in pieces)
    assert chunks[-1].usage == whole.usage
    # <s>, then one token a byte: the template writes BOS and the tokenizer adds no second one.
    assert whole.usage.prompt_tokens == 1 + len("user: hi\n")


def test_concurrent_streams_hold_only_whole_characters(server: ServerProcess, script: Chain) -> None:
    texts: list[str] = []

    def ask() -> None:
        stream = server.client().completions.create(
            model=NAME, prompt="x", max_tokens=len(script.token_ids), temperature=0, stream=True
        )
        pieces = [chunk.choices[0].text for chunk in stream]
        assert not any("\ufffd" in piece for piece in pieces)
        texts.append("".join(pieces))

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == [script.text] * 2


def test_stop_string_across_tokens(server: ServerProcess) -> None:  # P-TOK-05
    asked = {"model": NAME, "prompt": "x", "max_tokens": 50, "temperature": 0, "stop": ["CDEFG"]}
    whole = server.client().completions.create(**asked)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == ("AB", "stop")
    assert whole.usage.completion_tokens == 4
    streamed = [chunk.choices[0] for chunk in server.client().completions.create(**asked, stream=True)]
    assert "".join(choice.text for choice in streamed) == "AB" and streamed[-1].finish_reason == "stop"


def test_several_prompts_and_logprobs(server: ServerProcess, script: Chain) -> None:
    first, second = script.token_ids[0], script.token_ids[1]
    answer = server.client().completions.create(
        model=NAME, prompt=[[first], [second]], max_tokens=2, temperature=0, logprobs=1
    )
    assert [(choice.index, choice.text) for choice in answer.choices] == [(0, "CDEF"), (1, "EFGH")]
    assert answer.choices[0].logprobs.tokens == ["CD", "EF"]
    assert answer.choices[0].logprobs.token_logprobs == pytest.approx([0.0, 0.0], abs=1e-3)


def test_mistakes_come_back_as_openai_errors(server: ServerProcess) -> None:
    client = server.client()
    with pytest.raises(openai.NotFoundError, match=NAME):
        client.completions.create(model="nope", prompt="x")
    with pytest.raises(openai.BadRequestError, match="context holds 4096") as caught:
        client.completions.create(model=NAME, prompt="x", max_tokens=5000)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="n=0"):
        client.completions.create(model=NAME, prompt="x", n=0)
    assert client.models.list().data[0].id == NAME


@pytest.mark.parametrize("stream", [False, True])
def test_clients_that_hang_up_leave_nothing(server: ServerProcess, stream: bool) -> None:
    """P-KV-02: twelve long requests, four of them still in the queue, and all clients gone at once."""
    before = server.counters()
    body = f'{{"model":"{NAME}","prompt":"x","max_tokens":2000,"ignore_eos":true,"stream":{str(stream).lower()}}}'
    head = f"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: {len(body)}\r\n\r\n{body}"
    connections = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(12)]
    for connection in connections:
        connection.sendall(head.encode())
    names = ("moewe_requests_running", "moewe_requests_waiting")
    deadline = time.monotonic() + 3.0  # figures come twice a second; 2000 tokens take longer than this
    while (figures := [server.counters()[name] for name in names]) != [8, 4]:
        assert time.monotonic() < deadline, figures
        time.sleep(0.05)
    for connection in connections:
        connection.close()
    server.wait_idle(within=2.0)  # a second, and the time that asking takes on a busy machine
    after = server.counters()
    name = "moewe_requests_finished_total|abort"
    assert after[name] - before[name] == 12


def test_metrics_say_what_clients_counted(server: ServerProcess) -> None:
    server.wait_idle(within=2.0)
    before = server.counters()
    client = server.client()
    prompt_tokens = completion_tokens = 0
    for length in (1, 7, 30):
        usage = client.completions.create(model=NAME, prompt="x" * length, max_tokens=length, temperature=0).usage
        prompt_tokens += usage.prompt_tokens
        completion_tokens += usage.completion_tokens
    after = server.counters()
    assert after["moewe_prompt_tokens_total"] - before["moewe_prompt_tokens_total"] == prompt_tokens == 38
    assert after["moewe_generation_tokens_total"] - before["moewe_generation_tokens_total"] == completion_tokens == 38
    name = "moewe_requests_finished_total|length"
    assert after[name] - before[name] == 3
    assert after["moewe_expert_tokens_total"] > 0 and after["moewe_memory_saturation_ratio"] > 0
    assert after["moewe_unowned_expert_ids_total"] == 0


def test_topology_names_the_processes_and_what_their_links_cost(server: ServerProcess) -> None:
    replica = httpx.get(f"{server.url}/v1/topology").json()["replicas"][0]
    ranks, (cost,) = replica["ranks"], replica["links"]["exchanges"]
    assert cost["fixed_us"] > 0 and cost["between_bytes_per_second"] is None
    assert server.counters()["moewe_exchange_fixed_seconds"] == pytest.approx(1e-6 * cost["fixed_us"], abs=1e-7)
    assert {rank["pid"] for rank in ranks} <= {child.pid for child in server.children}
    assert [rank["slots"] for rank in ranks] == [[0, 2], [2, 4]]
