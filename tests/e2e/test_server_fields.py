"""Fields of sampling, echo, choices and tokens of a real server on random weights, asked by the openai package."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
import torch

from tests.support import small_tokenizers
from tests.support.fixtures import VOCAB_SIZE, checkpoint, copy_checkpoint, edit_json, reference_logits
from tests.support.server_process import NAME, ServerProcess

pytestmark = [pytest.mark.spawn, pytest.mark.slow]

MODEL = "T-MIX"
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
PROMPT = [5, 9, 7, 3]
GREEDY: dict[str, Any] = {"model": NAME, "prompt": PROMPT, "temperature": 0}
IDS = {"extra_body": {"return_token_ids": True, "ignore_eos": True}}
BESIDE = {"return_token_ids": True, "ignore_eos": True}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    path = copy_checkpoint(checkpoint(MODEL))
    small_tokenizers.write(path, "byte_level", chat_template=TEMPLATE)
    edit_json(path / "generation_config.json", {"eos_token_id": 2})
    flags = ("--max-num-seqs", "8", "--kv-cache-memory-bytes", "8MiB", "--max-n", "16")
    with ServerProcess(path, *flags) as server:
        yield server


def ids_of(server: ServerProcess, **fields: Any) -> list[list[int]]:
    """The ids of each choice."""
    body = GREEDY | BESIDE | fields
    response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    return [choice["token_ids"] for choice in response.json()["choices"]]


# --- P-API-01 ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("new", [0, 1])
def test_echo_with_logprobs_is_as_the_reference_says(server: ServerProcess, new: int) -> None:
    answer = server.client().completions.create(**GREEDY, max_tokens=new, echo=True, logprobs=1)
    logprobs = answer.choices[0].logprobs
    logits = reference_logits(checkpoint(MODEL), PROMPT).log_softmax(-1)
    tokens = [*PROMPT, int(logits[-1].argmax())][: 4 + new]
    expected = [float(logits[place, token]) for place, token in enumerate(tokens[1:])]
    assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
    assert logprobs.token_logprobs[1:] == pytest.approx(expected, abs=1e-4)
    best = [max(top.values()) for top in logprobs.top_logprobs[1:]]
    assert best == pytest.approx([float(row.max()) for row in logits[: 3 + new]], abs=1e-4)
    assert len(logprobs.tokens) == len(logprobs.text_offset) == 4 + new
    assert answer.usage.completion_tokens == new and answer.usage.prompt_tokens == 4


def test_prompt_logprobs_hold_the_likeliest_and_the_own_token(server: ServerProcess) -> None:
    answer = server.client().completions.create(**GREEDY, max_tokens=1, extra_body={"prompt_logprobs": 2})
    table = answer.choices[0].prompt_logprobs
    logits = reference_logits(checkpoint(MODEL), PROMPT).log_softmax(-1)
    assert table[0] is None
    for place, entries in enumerate(table[1:]):
        assert {int(key) for key in entries} == {PROMPT[place + 1], *logits[place].topk(2).indices.tolist()}
        for key, entry in entries.items():
            assert entry["logprob"] == pytest.approx(float(logits[place, int(key)]), abs=1e-4)
            assert entry["rank"] == 1 + int((logits[place] > logits[place, int(key)]).sum())


def test_streamed_echo_adds_up_to_the_whole(server: ServerProcess) -> None:
    asked = GREEDY | {"prompt": [PROMPT, [8]], "max_tokens": 3, "echo": True, "logprobs": 1, "n": 2}
    whole = server.client().completions.create(**asked)
    texts, values = [""] * 4, [[] for _ in range(4)]  # type: ignore[var-annotated]
    for chunk in server.client().completions.create(**asked, stream=True):
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        values[choice.index] += choice.logprobs.token_logprobs if choice.logprobs else []
    assert texts == [choice.text for choice in whole.choices]
    for own, choice in zip(values, whole.choices, strict=True):
        assert own[0] is None and own[1:] == pytest.approx(choice.logprobs.token_logprobs[1:], abs=1e-4)


# --- sampling ---------------------------------------------------------------------------------------------------------
def test_choices_have_seeds_of_their_own_and_come_again(server: ServerProcess) -> None:
    asked = {"temperature": 1.0, "seed": 11, "max_tokens": 12}
    choices = ids_of(server, n=4, **asked)
    assert len({tuple(ids) for ids in choices}) == 4 and choices == ids_of(server, n=4, **asked)
    assert ids_of(server, **asked) == choices[:1], "choice 0 has the request's own seed"
    assert len({tuple(ids) for ids in ids_of(server, n=3, max_tokens=8)}) == 1, "greedy choices are equal"


def test_batches_of_prompts_with_choices(server: ServerProcess) -> None:
    asked = {"temperature": 1.0, "seed": 3, "max_tokens": 6}
    together = ids_of(server, prompt=[PROMPT, [8, 8, 4]], n=2, **asked)
    assert together == [*ids_of(server, n=2, **asked), *ids_of(server, prompt=[8, 8, 4], n=2, **asked)]


def test_bias_bans_ends_and_penalties(server: ServerProcess) -> None:
    (plain,) = ids_of(server, max_tokens=8)
    assert ids_of(server, max_tokens=3, logit_bias={"300": 100}) == [[300] * 3]
    (biased,) = ids_of(server, max_tokens=8, logit_bias={str(plain[0]): -100})
    assert plain[0] not in biased
    stop = plain[3]
    cut = plain[: plain.index(stop) + 1]
    assert ids_of(server, max_tokens=8, stop_token_ids=[stop]) == [cut]
    (longer,) = ids_of(server, max_tokens=8, stop_token_ids=[stop], min_tokens=8)
    assert len(longer) == 8 and stop not in longer
    penalised = ids_of(server, max_tokens=40, presence_penalty=2.0, frequency_penalty=2.0, repetition_penalty=50)[0]
    assert len(set(penalised)) == 40
    (first,) = ids_of(server, max_tokens=8, temperature=5.0, min_p=1.0)
    assert first == plain, "only the likeliest token is as likely as the likeliest"


def test_p_api_05_a_token_beyond_the_vocabulary_leaves_the_server_as_it_was(server: ServerProcess) -> None:
    pids = [child.pid for child in server.children]
    for bias in ({"99999": 5}, {"512": 5}, {"abc": 1}, {"-1": 1}):
        with pytest.raises(openai.BadRequestError, match=next(iter(bias))):
            server.client().completions.create(**GREEDY, max_tokens=1, logit_bias=bias)
        assert server.client().completions.create(**GREEDY, max_tokens=1).usage.completion_tokens == 1
    assert [child.pid for child in server.children if child.is_running()] == pids


def test_p_api_06_ids_that_are_none(server: ServerProcess) -> None:
    for prompt in ([0, 600], [5279552648203111001], [-1], [1.5], [[1, 2], [512]]):
        with pytest.raises(openai.BadRequestError, match="prompt"):
            server.client().completions.create(**(GREEDY | {"prompt": prompt}), max_tokens=1)
    answer = server.client().completions.create(**(GREEDY | {"prompt": [[1, 2], [3]]}), max_tokens=1)
    assert [choice.index for choice in answer.choices] == [0, 1]


def test_p_api_02_logprobs_of_what_is_left_are_valid_json(server: ServerProcess) -> None:
    response = httpx.post(f"{server.url}/v1/completions", timeout=60, json=GREEDY | {
        "max_tokens": 4, "logprobs": 5, "guided_choice": ["a"], "temperature": 1, "top_k": 1,
    })  # fmt: skip
    assert response.status_code == 200 and response.json()["choices"][0]["text"] == "a"
    json.loads(response.text, parse_constant=lambda word: pytest.fail(word))


# --- chats ------------------------------------------------------------------------------------------------------------
def test_chat_with_choices_streams_what_it_answers(server: ServerProcess) -> None:
    client, turns = server.client(), [{"role": "user", "content": "hi"}]
    asked: dict[str, Any] = {"model": NAME, "messages": turns, "max_completion_tokens": 9, "n": 3, "seed": 5,
                             "logprobs": True, "top_logprobs": 2, **IDS}  # fmt: skip
    whole = client.chat.completions.create(**asked)
    texts, ids = [""] * 3, [[] for _ in range(3)]  # type: ignore[var-annotated]
    usage = None
    for chunk in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            ids[choice.index] += getattr(choice, "token_ids", None) or []
    assert texts == [choice.message.content for choice in whole.choices]
    assert ids == [choice.token_ids for choice in whole.choices] and [len(one) for one in ids] == [9] * 3
    assert usage == whole.usage and usage.completion_tokens == 27
    for choice in whole.choices:
        assert len(choice.logprobs.content) == 9 and all(len(e.top_logprobs) == 2 for e in choice.logprobs.content)


def test_tokens_of_a_chat_are_its_prompt(server: ServerProcess) -> None:
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "we"}]
    more = {"continue_final_message": True}
    tokens = httpx.post(f"{server.url}/tokenize", json={"messages": turns, **more}).json()
    answer = server.client().chat.completions.create(
        model=NAME, messages=turns, max_tokens=1, extra_body={**more, "return_token_ids": True}
    )
    assert answer.prompt_token_ids == tokens["tokens"] and answer.usage.prompt_tokens == tokens["count"]
    text = httpx.post(f"{server.url}/detokenize", json={"tokens": tokens["tokens"]}).json()["prompt"]
    assert text == "user: hi\nassistant: we"


def test_routes_that_are_not_there_say_what_to_use(server: ServerProcess) -> None:
    with pytest.raises(openai.NotFoundError, match="embedding model") as caught:
        server.client().embeddings.create(model=NAME, input="a")
    assert caught.value.code == "unsupported_endpoint"
    with pytest.raises(openai.NotFoundError, match="chat/completions"):
        server.client().responses.create(model=NAME, input="a")


# --- clients that leave -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("stream", [False, True])
def test_choices_of_a_client_that_leaves_are_gone_in_a_second(server: ServerProcess, stream: bool) -> None:
    before = server.counters()["moewe_requests_finished_total|abort"]
    asked = {"prompt": [PROMPT, [6, 6]], "n": 5, "max_tokens": 200, "ignore_eos": True, "stream": stream}
    body = json.dumps(GREEDY | asked | {"temperature": 1, "echo": True, "logprobs": 1})
    head = f"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: {len(body)}\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.sendall((head + body).encode())
    deadline = time.monotonic() + 5.0
    while server.counters()["moewe_requests_running"] < 8 and time.monotonic() < deadline:
        time.sleep(0.02)
    connection.close()
    server.wait_idle(within=2.0)  # a second, and the time that asking takes on a busy machine
    assert server.counters()["moewe_requests_finished_total|abort"] - before == 10


# --- P-API-19 ---------------------------------------------------------------------------------------------------------
def test_oversized_requests_are_refused_and_others_go_on(server: ServerProcess) -> None:
    with pytest.raises(openai.BadRequestError, match="--max-n"):
        server.client().completions.create(**GREEDY, n=100_000)
    waits: list[float] = []

    def others() -> None:
        for _ in range(10):
            began = time.monotonic()
            server.client().completions.create(**GREEDY, max_tokens=1)
            waits.append(time.monotonic() - began)

    thread = threading.Thread(target=others)
    thread.start()
    sent = 0

    def pieces() -> Iterator[bytes]:
        nonlocal sent
        yield b'{"model":"gull","prompt":"'
        while sent < 50 << 20:
            sent += 1 << 16
            yield b"a" * (1 << 16)

    try:
        status = httpx.post(f"{server.url}/v1/completions", content=pieces(), timeout=60,
                            headers={"content-type": "application/json"}).status_code  # fmt: skip
    except httpx.WriteError:
        status = 413  # cut off while it still wrote
    thread.join()
    assert status == 413 and sent < 40 << 20, "the rest was not read"
    assert len(waits) == 10 and max(waits) < 5.0


def test_temperature_of_next_to_nothing_is_greedy(server: ServerProcess) -> None:
    plain = ids_of(server, max_tokens=8)
    for temperature in (1e-3, 1e-6):
        assert ids_of(server, max_tokens=8, temperature=temperature, top_p=1e-4) == plain
    assert torch.tensor(plain).max() < 512


# --- bad words --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_bad_words_are_not_generated(server: ServerProcess, path: str) -> None:
    """One after the other, words of one and of two tokens that the model wrote are forbidden; streamed text as well."""
    # Only tokens of one byte, so that a text has one spelling alone.
    asked: dict[str, Any] = {"max_tokens": 60, "seed": 4, "temperature": 1.0, "ignore_eos": True}
    asked["logit_bias"] = {str(token): -100 for token in range(256, VOCAB_SIZE)}
    prompt = {"prompt": PROMPT} if path == "completions" else {"messages": [{"role": "user", "content": "hi"}]}

    def text_of(words: list[str], **fields: Any) -> str:
        body = {"model": NAME, **prompt, **asked, **fields, "bad_words": words}
        with httpx.stream("POST", f"{server.url}/v1/{path}", json=body, timeout=60) as answer:
            lines = [line.removeprefix("data: ") for line in answer.iter_lines()]
            assert answer.status_code == 200, lines
        choices = [choice for line in lines if line.startswith("{") for choice in json.loads(line)["choices"]]
        parts = [one.get("message") or one.get("delta") or one for one in choices]
        return "".join(part.get("content") or part.get("text") or "" for part in parts)

    def num_tokens(text: str) -> int:
        return int(httpx.post(f"{server.url}/tokenize", json={"prompt": text}, timeout=60).json()["count"])

    words: list[str] = []
    for size in (1, 2, 1, 2):
        text = text_of(words)
        assert not any(word in text for word in words)
        starts = (text[at : at + size] for at in range(1, len(text) - size))
        words.append(next(one for one in starts if re.fullmatch(r"[!-~]+", one) and num_tokens(one) == size))
        assert words[-1] in text
    assert not any(word in text_of(words, stream=True) for word in words)
    refused = httpx.post(f"{server.url}/v1/{path}", json={"model": NAME, **prompt, "bad_words": [" "]}, timeout=60)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "bad_words"
