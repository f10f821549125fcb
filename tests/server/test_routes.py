"""Routes as clients see them: shapes of answers, order of streams, refusals with field, value and fix."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from moewe.runtime.messages import Delta
from moewe.server.state import Phase, ServerState

from tests.support.fake_replicas import FakeReplicas, ask, make_state, says, tokenizer, with_server

HI = {"model": "gull", "messages": [{"role": "user", "content": "hi"}]}


def fake(text: str = "the sea", **kwargs: Any) -> FakeReplicas:
    return FakeReplicas(tokenizer(), says(text), **kwargs)


def post(state: ServerState, path: str, body: Any, **kwargs: Any) -> httpx.Response:
    return ask(state, "POST", path, **({"content": body} if isinstance(body, bytes) else {"json": body}), **kwargs)


def get(state: ServerState, path: str, **kwargs: Any) -> httpx.Response:
    return ask(state, "GET", path, **kwargs)


def events(response: httpx.Response) -> list[Any]:
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    return [json.loads(line[6:]) if line != "data: [DONE]" else "DONE" for line in lines]


def error_of(response: httpx.Response) -> dict[str, Any]:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


# --- answers ---------------------------------------------------------------------------------------------------------
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


# --- streams ---------------------------------------------------------------------------------------------------------
def test_chat_stream_has_one_identity_a_role_and_one_end() -> None:
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


def test_usage_chunk_comes_last_and_only_on_request() -> None:
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
    response = post(make_state(fake()), "/v1/completions", body | {"stream": False})
    assert response.status_code == 400 and error_of(response)["param"] == "stream_options"


def test_stop_string_across_tokens_leaves_nothing_of_it_in_a_stream() -> None:
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


def test_failure_in_a_stream_is_an_event_and_no_end() -> None:
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


def test_failure_without_stream_is_a_server_error() -> None:
    replicas = fake(pause=0.05)
    state = make_state(replicas)
    submit = replicas.submit

    def failing(request_id: str, *args: Any) -> None:
        submit(request_id, *args)
        state.hub.on_delta(Delta(request_id=request_id, finish_reason="error", error="logits were not finite"))

    replicas.submit = failing  # type: ignore[method-assign]
    response = post(state, "/v1/completions", {"model": "gull", "prompt": "x"})
    assert response.status_code == 500 and "not finite" in error_of(response)["message"]


# --- log-probabilities -----------------------------------------------------------------------------------------------
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


# --- lengths ---------------------------------------------------------------------------------------------------------
def ids(count: int) -> list[int]:
    return [5] * count


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_prompt_and_output_must_fit_the_context(path: str) -> None:
    def body(count: int, **fields: Any) -> dict[str, Any]:
        if path == "/v1/completions":
            return {"model": "gull", "prompt": ids(count), **fields}
        return {"model": "gull", "messages": [{"role": "user", "content": "x" * count}], **fields}

    replicas = FakeReplicas(tokenizer(), lambda prompt: [5] * 100)
    state = make_state(replicas, template="{{ messages[0].content }}", max_model_len=64)
    for request in (body(64), body(60, max_tokens=10), body(200)):
        response = post(state, path, request)
        assert response.status_code == 400
        assert error_of(response)["code"] == "context_length_exceeded"
        assert "64" in error_of(response)["message"]
    assert "70" in error_of(post(state, path, body(60, max_tokens=10)))["message"]
    assert post(state, path, body(60, max_tokens=4)).status_code == 200


def test_without_max_tokens_the_context_may_be_filled() -> None:
    replicas = FakeReplicas(tokenizer(), lambda prompt: [5] * 100)
    state = make_state(replicas, max_model_len=64)
    body = post(state, "/v1/completions", {"model": "gull", "prompt": ids(60)}).json()
    assert (body["usage"]["completion_tokens"], body["choices"][0]["finish_reason"]) == (4, "length")
    assert (
        post(state, "/v1/completions", {"model": "gull", "prompt": ids(6)}).json()["usage"]["completion_tokens"] == 16
    )


def test_newer_name_of_max_tokens_is_obeyed() -> None:
    body = post(make_state(fake()), "/v1/chat/completions", HI | {"max_completion_tokens": 3}).json()
    assert body["usage"]["completion_tokens"] == 3
    response = post(make_state(fake()), "/v1/chat/completions", HI | {"max_completion_tokens": 3, "max_tokens": 5})
    assert response.status_code == 400 and error_of(response)["param"] == "max_completion_tokens"


def test_pool_is_named_when_it_sets_the_limit() -> None:
    response = post(make_state(fake(), max_model_len=160), "/v1/completions", {"model": "gull", "prompt": ids(200)})
    assert "10 KV blocks of 16 tokens" in error_of(response)["message"]


# --- refusals --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b'{"model":', "Invalid JSON"),
        (b"", "Invalid JSON"),
        (b"[]", "JSON object"),
        (b'{"model":"gull","prompt":"a\\ud800b"}', "surrogate"),
        (b'{"model":"gull","prompt":"a","user":"\\ud800"}', "surrogate"),
        (b'{"model":"gull","prompt":"a","temperature":NaN}', "temperature"),
        ({"prompt": "a", "temperature": "hot"}, "temperature"),
        ({"prompt": "a", "temperature": -1}, "temperature"),
        ({"prompt": "a", "top_p": 0}, "top_p"),
        ({"prompt": "a", "top_k": -2}, "top_k"),
        ({"prompt": "a", "stop": [""]}, "stop"),
        ({"prompt": "a", "stop": ["x"] * 17}, "stop"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 1.5}, "max_tokens"),
        ({"prompt": "a", "n": 0}, "n=0"),
        ({"prompt": "a", "n": 2}, "n=2"),
        ({"prompt": "a", "n": True}, "n=True"),
        ({"prompt": "a", "echo": True}, "echo"),
        ({"prompt": "a", "logit_bias": {"5": 1}}, "logit_bias"),
        ({"prompt": "a", "presence_penalty": 0.5}, "presence_penalty"),
        ({"prompt": "a", "max_token": 1}, "'max_tokens'"),
        ({"prompt": "a", "zzz": 1}, "zzz"),
        ({"prompt": "a", "stream": True, "stream_options": {"include_usag": True}}, "include_usage"),
        ({}, "prompt"),
        ({"prompt": ""}, None),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [[1, 2], "a", 3]}, "prompt.2"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": [0, 600]}, "600"),
        ({"prompt": [5279552648203111001]}, "5279552648203111001"),
        ({"prompt": [-1]}, "-1"),
        ({"prompt": [1.5]}, "1.5"),
        ({"prompt": [True]}, "True"),
    ],
)
def test_mistakes_in_completions_are_named(body: Any, named: str | None) -> None:
    state = make_state(fake())
    if isinstance(body, dict):
        body = {"model": "gull"} | body
    response = post(state, "/v1/completions", body)
    if named is None:  # the tokenizer puts BOS there
        assert response.status_code == 200
        return
    assert response.status_code == 400
    assert named in error_of(response)["message"] and "\n" not in error_of(response)["message"]
    assert error_of(response)["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"messages": "hi"}, "messages"),
        ({"messages": []}, "messages"),
        ({}, "messages"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "role"),
        ({"messages": [{"role": "user"}]}, "content"),
        ({"messages": [{"role": "user", "content": 5}]}, "content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "image_url"),
        ({"messages": [{"role": "user", "content": "a", "contents": "b"}]}, "contents"),
        (HI | {"tools": [{"type": "function"}]}, "tools"),
        (HI | {"response_format": {"type": "json_object"}}, "response_format"),
        (HI | {"top_logprobs": 2}, "top_logprobs"),
        (HI | {"chat_template": "{{ 1 }}"}, "chat_template"),
        (HI | {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ],
)
def test_mistakes_in_chats_are_named(body: dict[str, Any], named: str) -> None:
    response = post(make_state(fake()), "/v1/chat/completions", {"model": "gull"} | body)
    assert response.status_code == 400
    assert named in error_of(response)["message"]


def test_fields_that_change_nothing_are_taken() -> None:
    body = HI | {
        "user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "n": 1, "presence_penalty": 0,
        "frequency_penalty": 0.0, "logit_bias": {}, "tools": None, "response_format": {"type": "text"}, "max_tokens": 1,
        "parallel_tool_calls": True,
    }  # fmt: skip
    assert post(make_state(fake()), "/v1/chat/completions", body).status_code == 200


def test_connection_stays_usable_after_a_mistake() -> None:
    async def run(client: httpx.AsyncClient) -> list[int]:
        bodies = [b'{"model":', json.dumps({"model": "gull", "prompt": "a", "max_tokens": 1}).encode()]
        headers = {"content-type": "application/json"}
        return [(await client.post("/v1/completions", content=body, headers=headers)).status_code for body in bodies]

    assert with_server(make_state(fake()), run) == [400, 200]


def test_wrong_content_type_is_named() -> None:
    response = post(make_state(fake()), "/v1/completions", b"{}", headers={"content-type": "text/plain"})
    assert response.status_code == 400 and "content-type" in error_of(response)["message"]


@pytest.mark.parametrize("model", ["nope", None, "../../etc/passwd", "a\x00b"])
def test_unknown_model_names_those_served(model: str | None) -> None:
    response = post(
        make_state(fake()), "/v1/completions", {"prompt": "a"} | ({} if model is None else {"model": model})
    )
    assert response.status_code == 404
    assert error_of(response)["code"] == "model_not_found" and "'gull', 'moewe'" in error_of(response)["message"]


def test_no_template_and_broken_templates() -> None:
    for template, text in [(None, "no chat template"), ("{{ messages[0].content ", "does not compile"),
                           ("{{ raise_exception('roles must alternate') }}", "roles must alternate")]:  # fmt: skip
        state = make_state(fake(), template=template)
        response = post(state, "/v1/chat/completions", HI)
        assert response.status_code == 400 and text in error_of(response)["message"]
        assert post(state, "/v1/completions", {"model": "gull", "prompt": "a", "max_tokens": 1}).status_code == 200


def test_without_tokenizer_only_ids_are_served() -> None:
    state = make_state(FakeReplicas(None, lambda prompt: [5] * 20))
    body = post(state, "/v1/completions", {"model": "gull", "prompt": [1, 2], "max_tokens": 2}).json()
    assert body["usage"]["completion_tokens"] == 2
    for path, request in [("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", HI),
                          ("/v1/completions", {"prompt": [1], "stop": "a"})]:  # fmt: skip
        assert post(state, path, {"model": "gull"} | request).status_code == 400


# --- other routes ----------------------------------------------------------------------------------------------------
def test_models_are_listed_under_every_name() -> None:
    state = make_state(fake())
    assert [card["id"] for card in get(state, "/v1/models").json()["data"]] == ["gull", "moewe"]
    assert get(state, "/v1/models/moewe").json()["max_model_len"] == 64
    assert get(state, "/v1/models/nope").status_code == 404
    assert get(state, "/v1/models/../../etc/passwd").status_code == 404


def test_topology_shows_ranks_slots_and_processes() -> None:
    state = make_state(fake())
    view = get(state, "/v1/topology").json()
    assert view["topology"] == "EP2DP1[adp=2,atp=1,red=0]" and view["num_ranks"] == 2
    ranks = view["replicas"][0]["ranks"]
    assert [(rank["slots"], rank["experts"], rank["pid"]) for rank in ranks] == [
        ([0, 2], [0, 1], 11),
        ([2, 4], [2, 3], 12),
    ]
    drawing = get(state, "/v1/topology", params={"format": "text"}).text
    assert "slots 2-3" in drawing and "EP2DP1" in drawing
    assert get(state, "/v1/topology", params={"format": "png"}).status_code == 400


def test_phases_of_health_and_readiness() -> None:
    state = make_state(None)
    assert get(state, "/health").status_code == 200 and get(state, "/ready").status_code == 503
    assert get(state, "/v1/topology").json()["replicas"][0]["ranks"][0]["slots"] == [0, 2]
    response = post(state, "/v1/completions", {"model": "gull", "prompt": "a"})
    assert response.status_code == 503 and int(response.headers["retry-after"]) > 0
    assert error_of(response)["code"] == "loading"
    assert get(state, "/v1/models").status_code == 503
    state = make_state(fake())
    assert get(state, "/health").json() == {"status": "ok"} and get(state, "/ready").status_code == 200
    state.enter(Phase.DRAINING)
    assert get(state, "/health").status_code == 200 and get(state, "/ready").status_code == 503
    assert post(state, "/v1/completions", {"model": "gull", "prompt": "a"}).status_code == 503
    state.problem = "rank 1 was killed"
    state.enter(Phase.FAILED)
    assert get(state, "/health").status_code == 503 and "rank 1" in get(state, "/health").json()["reason"]
    state.enter(Phase.READY)
    assert state.phase is Phase.FAILED


def test_unknown_paths_and_methods_answer_with_error_objects() -> None:
    state = make_state(fake())
    assert error_of(get(state, "/v1/nothing"))["code"] == "not_found"
    response = get(state, "/v1/completions")
    assert response.status_code == 405 and "not served" in error_of(response)["message"]
    assert get(state, "/version").json()["version"]
