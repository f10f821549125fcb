"""What is refused at the door: lengths, fields and models, each with field, value and fix."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from moewe.runtime.config import EngineConfig, ScheduleOptions
from moewe.text import Tokenizer
from tests.support.asking import HI, error_of, fake, post
from tests.support.fake_replicas import FakeReplicas, make_state, tokenizer, with_server
from tests.support.small_tokenizers import byte_level


# --- lengths, P-API-08 ------------------------------------------------------------------------------------------------
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


def test_more_prompts_than_one_request_may_hold_are_not_looked_at() -> None:
    state = make_state(fake())
    state.hub.most_live = 10_000
    for prompts, status in (([[5]] * 2048, 200), ([[5]] * 2049, 400), (["\ud7ff"] * 200_000, 400)):
        response = post(state, "/v1/completions", {"model": "gull", "prompt": prompts, "max_tokens": 1})
        assert response.status_code == status, response.text[:200]
        assert status == 200 or ("2048" in error_of(response)["message"] and error_of(response)["param"] == "prompt")


def test_newer_name_of_max_tokens_is_obeyed() -> None:
    body = post(make_state(fake()), "/v1/chat/completions", HI | {"max_completion_tokens": 3}).json()
    assert body["usage"]["completion_tokens"] == 3
    response = post(make_state(fake()), "/v1/chat/completions", HI | {"max_completion_tokens": 3, "max_tokens": 5})
    assert response.status_code == 400 and error_of(response)["param"] == "max_completion_tokens"


def test_pool_is_named_when_it_sets_the_limit() -> None:
    response = post(make_state(fake(), max_model_len=160), "/v1/completions", {"model": "gull", "prompt": ids(200)})
    assert "10 KV blocks of 16 tokens" in error_of(response)["message"]


# --- refusals, P-API-06, -07, -13, -15 --------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b'{"model":', "Invalid JSON"),
        (b"", "is empty"),
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
        ({"prompt": "a", "n": 129}, "n=129"),
        ({"prompt": "a", "n": True}, "n: "),
        ({"prompt": "a", "echo": "yes"}, "echo"),
        ({"prompt": "a", "logit_bias": {"5": 101}}, "logit_bias"),
        ({"prompt": "a", "presence_penalty": 2.5}, "presence_penalty"),
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
        ({"prompt": [True]}, "true"),
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
    "where",
    [lambda long: {long: 1}, lambda long: {"structured_outputs": {long: 1}},
     lambda long: {"stream": True, "stream_options": {long: 1}}],
    ids=["request", "structured_outputs", "stream_options"],
)  # fmt: skip
def test_a_name_without_end_is_cut(where: Any) -> None:
    error = error_of(post(make_state(fake()), "/v1/completions", {"model": "gull", "prompt": "a", **where("z" * 9000)}))
    assert "z" * 80 + " is not a field that this server knows" in error["message"] and len(error["message"]) < 200
    assert len(error["param"]) == 200


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/v1/completions", {"prompt": "a", "": 1}, '"" is not a field'),
        ("/v1/completions", {"prompt": "a", "x\u009b\u202e": 1}, r'"x\u009b\u202e" is not a field'),
        ("/v1/completions", {"prompt": "a", "max_tokens": 10**300}, "integer of at most 64 bits, got 1000"),
        ("/v1/completions", {"prompt": "a", "stop_token_ids": [-(10**300)]}, "stop_token_ids.0: Input should be an"),
        ("/v1/completions", {"prompt": [None]}, "prompt.0 is not a token id (an integer), got null"),
        ("/v1/completions", {"prompt": [10**300]}, "prompt.0 (of 997 bits) is no token id of this model"),
        ("/detokenize", {"tokens": [5, False]}, "tokens.1 is not a token id (an integer), got false"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": {}}]}]},
         "messages.0.content.0.text must be a string, got {}"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [None]}]}, "content.0 is null; this server"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": ["x" * 9000]}]}]},
         'of type ["xxx'),
    ],
)  # fmt: skip
def test_a_refusal_shows_what_was_sent_as_json_and_short(path: str, body: dict[str, Any], says: str) -> None:
    error = error_of(post(make_state(fake()), path, {"model": "gull"} | body))
    assert says in error["message"] and len(error["message"]) < 250 and error["message"].isprintable()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    ("data", "says"),
    [(b"", "is empty; send a JSON object"), (b" \n", "is empty"), ('\ufeff{"a": 1}'.encode(), "without one"),
     ('{"a": 1}'.encode("utf-16"), "a byte order mark; send JSON as UTF-8")],
)  # fmt: skip
def test_a_body_that_is_empty_or_begins_with_a_mark_says_so(path: str, data: bytes, says: str) -> None:
    assert says in error_of(post(make_state(fake()), path, data))["message"]


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
        (HI | {"tools": [{"type": "function"}]}, "tools.0"),
        (HI | {"response_format": {"type": "xml"}}, "response_format"),
        (HI | {"top_logprobs": 2}, "top_logprobs"),
        (HI | {"chat_template": "{{ 1 }}"}, "chat_template"),
        (HI | {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ],
)
def test_mistakes_in_chats_are_named(body: dict[str, Any], named: str) -> None:
    response = post(make_state(fake()), "/v1/chat/completions", {"model": "gull"} | body)
    assert response.status_code == 400
    assert named in error_of(response)["message"]


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], ["a", ""], [[5], []]])
def test_p_api_07_empty_prompts_without_a_first_token_are_refused(prompt: Any) -> None:
    bare = Tokenizer(byte_level(), {"eos_token": "</s>"})
    replicas = FakeReplicas(bare, lambda ids: [5] * 20)
    response = post(make_state(replicas), "/v1/completions", {"model": "gull", "prompt": prompt})
    assert response.status_code == 400 and error_of(response)["param"] == "prompt"
    assert not replicas.submitted


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


@pytest.mark.parametrize(
    ("header", "value", "word"),
    [
        ("content-encoding", "gzip", "content-encoding 'gzip'"),
        ("content-type", "application/json; charset=UTF-16", "charset 'utf-16'"),
        ("content-type", 'application/json;charset="latin-1"', "charset 'latin-1'"),
    ],
)
def test_bodies_in_other_codings_are_refused_by_name(header: str, value: str, word: str) -> None:
    response = post(make_state(fake()), "/v1/completions", b"{}", headers={header: value})
    assert response.status_code == 400 and word in error_of(response)["message"]


@pytest.mark.parametrize(
    ("header", "value"), [("content-encoding", "identity"), ("content-type", 'application/json; Charset="UTF-8"')]
)
def test_codings_that_are_read_are_taken(header: str, value: str) -> None:
    body = json.dumps({"model": "gull", "prompt": "a", "max_tokens": 1}).encode()
    assert post(make_state(fake()), "/v1/completions", body, headers={header: value}).status_code == 200


def test_a_wrong_method_names_the_right_one_and_a_long_path_is_cut() -> None:
    async def run(client: httpx.AsyncClient) -> tuple[httpx.Response, httpx.Response]:
        return await client.get("/v1/completions"), await client.get("/" + "a" * 9000)

    method, path = with_server(make_state(fake()), run)
    assert (method.status_code, path.status_code) == (405, 404)
    assert error_of(method)["message"].endswith("; use POST")
    assert len(error_of(path)["message"]) < 300


@pytest.mark.parametrize("model", ["nope", None, "../../etc/passwd", "a\x00b"])
def test_p_api_14_unknown_model_names_those_served(model: str | None) -> None:
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
    for field, asked in (("guided_regex", "a"), ("structured_outputs", {"json": {"type": "object"}})):
        response = post(state, "/v1/completions", {"model": "gull", "prompt": [1], field: asked})
        error = error_of(response)
        assert response.status_code == 400 and error["param"].partition(".")[0] == field
        assert error["message"] == f"{error['param']} needs text, but there is no tokenizer; leave it out"


def test_priority_is_refused_where_it_has_no_effect() -> None:
    state = make_state(fake())
    for path, body in (("/v1/completions", {"model": "gull", "prompt": "a"}), ("/v1/chat/completions", HI)):
        response = post(state, path, body | {"priority": 3})
        assert response.status_code == 400 and error_of(response)["param"] == "priority"
        assert "--schedule-policy priority" in error_of(response)["message"]
        assert post(state, path, body | {"priority": 0, "max_tokens": 1}).status_code == 200
    replicas = fake()
    state = make_state(replicas)
    state.config = EngineConfig(model=state.config.model, schedule=ScheduleOptions(policy="priority"))
    assert post(state, "/v1/completions", {"model": "gull", "prompt": "a", "priority": 3}).status_code == 200
    assert [priority for _, _, priority in replicas.submitted.values()] == [3]


@pytest.mark.parametrize(
    ("path", "body", "param", "said"),
    [
        ("chat/completions", {"logprobs": True, "top_logprobs": 99}, "top_logprobs", "top_logprobs=99"),
        ("completions", {"prompt": "a", "stop": ""}, "stop", 'stop=""'),
        ("completions", {"prompt": "a", "suffix": "b"}, "suffix", 'suffix="b"'),
        ("completions", {"prompt": "a", "seed": 2**64}, "seed", "2^64-1"),
        ("completions", {"prompt": "a", "temperature": "hot"}, "temperature", 'got "hot"'),
        ("completions", {"prompt": "a" * 9000, "max_tokens": 4}, "prompt", "context"),
        ("chat/completions", {"messages": [{"role": "user", "content": "a" * 9000}]}, "messages", "context"),
        ("completions", {"prompt": [1] * 9000, "max_tokens": 4}, "prompt", "4092 tokens"),
    ],
)
def test_refusals_speak_json_and_blame_the_field_that_was_sent(
    path: str, body: dict[str, Any], param: str, said: str
) -> None:
    state = make_state(fake(), max_model_len=4096)
    if "prompt" not in body:
        body = {"messages": [{"role": "user", "content": "a"}], **body}
    response = post(state, f"/v1/{path}", {"model": "gull", **body})
    assert response.status_code == 400
    error = error_of(response)
    assert error["param"] == param and said in error["message"], error


def test_what_clients_send_back_is_taken() -> None:
    state = make_state(fake())
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None}, {"role": "user", "content": "b"}]
    body = {"model": "gull", "messages": turns, "max_tokens": 1, "seed": 2**64 - 1}
    assert post(state, "/v1/chat/completions", body).status_code == 200
