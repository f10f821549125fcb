"""Routes as clients see them: shapes of answers, order of streams, log-probabilities."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from moewe.runtime import messages
from moewe.runtime.messages import Delta
from tests.support.asking import HI, error_of, events, fake, post
from tests.support.fake_replicas import FakeReplicas, make_state, tokenizer, with_server


# --- answers ----------------------------------------------------------------------------------------------------------
def test_completion_has_text_usage_and_reason() -> None:
    replicas = fake()
    response = post(make_state(replicas), "/v1/completions", {"model": "moewe", "prompt": "hi", "max_tokens": 3})
    body = response.json()
    assert response.status_code == 200
    assert (body["object"], body["model"]) == ("text_completion", "moewe")
    assert body["choices"] == [
        {"index": 0, "text": body["choices"][0]["text"], "logprobs": None, "finish_reason": "length"}
    ]
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
    ((prompt, params, _),) = replicas.submitted.values()
    assert prompt == tokenizer().encode("hi") and params.max_tokens == 3


def test_several_prompts_give_a_choice_each() -> None:
    replicas = FakeReplicas(tokenizer(), lambda prompt: [prompt[-1]] * 9)
    ids = [tokenizer().encode(text, add_special_tokens=False) for text in ("a", "b")]
    body = post(make_state(replicas), "/v1/completions", {"model": "gull", "prompt": ids, "max_tokens": 2}).json()
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [(0, "aa"), (1, "bb")]
    assert body["usage"]["completion_tokens"] == 4
    body = post(
        make_state(replicas), "/v1/completions", {"model": "gull", "prompt": ["x", "y"], "max_tokens": 1}
    ).json()
    assert [choice["text"] for choice in body["choices"]] == ["x", "y"]
    body = post(make_state(replicas), "/v1/completions", {"model": "gull", "prompt": ids[0], "max_tokens": 1}).json()
    assert [choice["text"] for choice in body["choices"]] == ["a"]


def test_chat_answers_in_one_body() -> None:
    replicas = fake(ends=True)
    body = post(make_state(replicas), "/v1/chat/completions", HI).json()
    choice = body["choices"][0]
    assert body["object"] == "chat.completion" and body["id"].startswith("chatcmpl-")
    assert choice["message"]["role"] == "assistant" and choice["finish_reason"] == "stop"
    assert "the sea".startswith(choice["message"]["content"]) and choice["message"]["content"]
    ((prompt, params, _),) = replicas.submitted.values()
    assert params.max_tokens is None
    assert tokenizer().decode(prompt) == "<|user|>hi\n<|assistant|>"


def test_chat_prompt_of_a_template_with_bos_has_one_bos() -> None:
    replicas = fake()
    post(
        make_state(replicas, template="{{ bos_token }}{{ messages[0].content }}"),
        "/v1/chat/completions",
        HI | {"max_tokens": 1},
    )
    ((prompt, *_),) = replicas.submitted.values()
    assert prompt == [tokenizer().bos_token_id, *tokenizer().encode("hi", add_special_tokens=False)]


def test_text_parts_and_template_kwargs_reach_the_template() -> None:
    replicas = fake()
    body = HI | {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
        "chat_template_kwargs": {"mood": "dry"}, "max_tokens": 1,
    }  # fmt: skip
    state = make_state(replicas, template="{{ mood }}:{{ messages[0].content }}")
    assert post(state, "/v1/chat/completions", body).status_code == 200
    ((prompt, *_),) = replicas.submitted.values()
    assert tokenizer().decode(prompt) == "dry:a\nb"


# --- streams ----------------------------------------------------------------------------------------------------------
def test_chat_stream_has_one_identity_a_role_and_one_end() -> None:  # P-API-11
    replicas = fake(ends=True)
    whole = post(make_state(replicas), "/v1/chat/completions", HI).json()["choices"][0]["message"]["content"]
    response = post(make_state(replicas), "/v1/chat/completions", HI | {"stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, done = events(response)
    assert done == "DONE"
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["stop"]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == whole
    assert all("usage" not in chunk for chunk in chunks)


def test_usage_chunk_comes_last_and_only_on_request() -> None:  # P-API-09
    body = {
        "model": "gull",
        "prompt": ["a", "b"],
        "max_tokens": 2,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    *chunks, usage, done = events(post(make_state(fake()), "/v1/completions", body))
    assert done == "DONE" and usage["choices"] == []
    assert usage["usage"] == {"prompt_tokens": 4, "completion_tokens": 4, "total_tokens": 8}
    assert all(chunk["usage"] is None for chunk in chunks)
    assert sorted(c["choices"][0]["index"] for c in chunks if c["choices"][0]["finish_reason"]) == [0, 1]
    plain = {name: value for name, value in body.items() if name != "stream_options"}
    chunks = events(post(make_state(fake()), "/v1/completions", plain))[:-1]
    assert chunks and all(chunk["choices"] and "usage" not in chunk for chunk in chunks)
    asked = HI | {"max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, usage, _ = events(post(make_state(fake()), "/v1/chat/completions", asked))
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 2
    assert all(chunk["choices"] and chunk["usage"] is None for chunk in chunks)
    response = post(make_state(fake()), "/v1/completions", body | {"stream": False})
    assert response.status_code == 400 and error_of(response)["param"] == "stream_options"


def test_stop_string_across_tokens_leaves_nothing_of_it_in_a_stream() -> None:  # P-TOK-05
    tokens = tokenizer()
    ids = [
        token
        for part in ("A", "B", "C", "D", "E", "F", "G", "H")
        for token in tokens.encode(part, add_special_tokens=False)
    ]
    replicas = FakeReplicas(tokens, lambda prompt: ids)
    body = {
        "model": "gull",
        "prompt": "x",
        "max_tokens": 50,
        "stop": ["CDEFG"],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    *chunks, usage, _ = events(post(make_state(replicas), "/v1/completions", body))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "AB"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert usage["usage"]["completion_tokens"] == 7


def test_split_characters_come_whole() -> None:
    text = "\U0001f600\u010fab"
    replicas = fake(text + "\U0001f600")
    body = {"model": "gull", "prompt": "x", "max_tokens": len(replicas.script([])) - 1}
    whole = post(make_state(replicas), "/v1/completions", body).json()["choices"][0]["text"]
    pieces = [
        c["choices"][0]["text"]
        for c in events(post(make_state(replicas), "/v1/completions", body | {"stream": True}))[:-1]
    ]
    assert "".join(pieces) == whole == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_failure_in_a_stream_is_an_event_and_no_end() -> None:  # P-API-12
    replicas = fake("the sea and the sea", pause=0.01)
    state = make_state(replicas)

    async def run(client: httpx.AsyncClient) -> list[str]:
        lines = []
        async with client.stream(
            "POST", "/v1/completions", json={"model": "gull", "prompt": "x", "stream": True}
        ) as response:
            async for line in response.aiter_lines():
                lines.append(line)
                if len(lines) == 3:
                    state.hub.fail_all("rank 1 was killed")
        return lines

    lines = [line[6:] for line in with_server(state, run) if line]
    assert "rank 1 was killed" in json.loads(lines[-1])["error"]["message"]
    assert all(json.loads(line)["choices"][0]["finish_reason"] is None for line in lines[:-1])


@pytest.mark.parametrize(
    ("code", "status", "named"),
    [
        (None, 500, "engine_error"),
        (messages.INVALID_REQUEST, 400, None),
        (messages.INVALID_GRAMMAR, 400, "invalid_grammar"),
        (messages.GRAMMAR_STUCK, 400, "invalid_grammar"),
        (messages.QUEUE_FULL, 429, "queue_full"),
        (messages.ENGINE_BUSY, 503, "engine_busy"),
        (messages.SHUTTING_DOWN, 503, "shutting_down"),
    ],
)
def test_failure_without_stream_has_the_status_of_its_code(code: str | None, status: int, named: str | None) -> None:
    replicas = fake(pause=0.05)
    state = make_state(replicas)
    submit = replicas.submit

    def failing(request_id: str, *args: Any) -> None:
        submit(request_id, *args)
        error = Delta(request_id=request_id, finish_reason="error", error="max_queued_requests", error_code=code)
        state.hub.on_deltas([error])

    replicas.submit = failing  # type: ignore[method-assign]
    response = post(state, "/v1/completions", {"model": "gull", "prompt": "x"})
    assert response.status_code == status
    assert error_of(response)["code"] == named and error_of(response)["message"] == "max_queued_requests"
    assert ("retry-after" in response.headers) == (status in (429, 503))


# --- log-probabilities ------------------------------------------------------------------------------------------------
def test_logprobs_of_completions() -> None:
    body = {"model": "gull", "prompt": "x", "max_tokens": 2, "logprobs": 2}
    logprobs = post(make_state(fake()), "/v1/completions", body).json()["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [-0.5, -0.5]
    assert logprobs["text_offset"] == [0, len(logprobs["tokens"][0])]
    assert set(logprobs["top_logprobs"][0].values()) == {-0.25, -0.5} and len(logprobs["tokens"]) == 2
    body["logprobs"] = 0
    assert post(make_state(fake()), "/v1/completions", body).json()["choices"][0]["logprobs"]["top_logprobs"] is None


def test_logprobs_of_chat() -> None:
    body = HI | {"max_tokens": 2, "logprobs": True, "top_logprobs": 3}
    content = post(make_state(fake()), "/v1/chat/completions", body).json()["choices"][0]["logprobs"]["content"]
    assert len(content) == 2 and content[0]["logprob"] == -0.5
    assert bytes(content[0]["bytes"]).decode() == content[0]["token"]
    assert [entry["logprob"] for entry in content[0]["top_logprobs"]] == [-0.25, -0.5, -9999.0]
    chunks = events(post(make_state(fake()), "/v1/chat/completions", body | {"stream": True}))[:-1]
    streamed = [entry for c in chunks for entry in (c["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert streamed == content
