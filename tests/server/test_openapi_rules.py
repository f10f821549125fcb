"""The OpenAPI document and the checks agree: what it allows is taken, what it forbids is a 400.

Not the limits of single fields (tests/server/test_fields.py). Units: as OpenAI's API.
"""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from moewe.server.openapi.document import document
from tests.support.asking import error_of, fake, post
from tests.support.fake_replicas import make_state

COMPLETIONS, CHAT, TOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize"
USER: dict[str, Any] = {"role": "user", "content": "hi"}
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"model": "gull", "prompt": "a"},
    CHAT: {"model": "gull", "messages": [USER]},
    TOKENIZE: {"messages": [USER]},
}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
NAMED = {"type": "function", "function": {"name": "look"}}
CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
SCHEMA = {"type": "object"}
PART = {"type": "text", "text": "hi"}

FINE: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"max_tokens": 0, "echo": True}),
    (COMPLETIONS, {"max_tokens": 16.0, "seed": -3.0, "stop_token_ids": [5.0], "logprobs": 2.0, "top_k": -1.0}),
    (COMPLETIONS, {"prompt": [5.0, 6]}), (COMPLETIONS, {"prompt": [[5.0], "a"]}),
    (COMPLETIONS, {"best_of": 1}), (COMPLETIONS, {"best_of": 2, "n": 2}), (COMPLETIONS, {"best_of": None, "n": 3}),
    (COMPLETIONS, {"stop": ["a", "b"]}), (COMPLETIONS, {"top_k": 2**31 - 1}),
    (COMPLETIONS, {"priority": 0}), (COMPLETIONS, {"logit_bias": {"511": 1}}), (COMPLETIONS, {"max_tokens": 254}),
    (COMPLETIONS, {"stream": True, "stream_options": {"include_usage": True}}),
    (COMPLETIONS, {"stream": False, "stream_options": None, "prompt_logprobs": 1}),
    (COMPLETIONS, {"response_format": {"type": "json_object"}}),
    (COMPLETIONS, {"response_format": {"type": "text"}, "guided_regex": "a"}),
    (COMPLETIONS, {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}),
    (COMPLETIONS, {"structured_outputs": {"json": SCHEMA, "regex": None, "json_object": False}}),
    (COMPLETIONS, {"structured_outputs": {"json_object": True, "disable_fallback": False}}),
    (CHAT, {"messages": [{"role": "user", "content": [PART]}]}),
    (CHAT, {"messages": [{"role": "user", "content": []}]}),
    (CHAT, {"messages": [USER | {"tool_calls": [], "tool_call_id": None, "name": None}]}),
    (CHAT, {"messages": [USER, {"role": "assistant"}]}),
    (CHAT, {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}]}),
    (CHAT, {"messages": [USER, {"role": "tool", "content": "x", "tool_call_id": "1"}]}),
    (CHAT, {"logprobs": True, "top_logprobs": 2}),
    (CHAT, {"tools": [TOOL], "tool_choice": NAMED}), (CHAT, {"tools": [TOOL], "tool_choice": "required"}),
    (CHAT, {"tools": [], "tool_choice": "auto"}), (CHAT, {"tool_choice": "none"}),
    (CHAT, {"chat_template_kwargs": {"enable_thinking": False}}),
    (CHAT, {"messages": [USER, {"role": "assistant", "content": "Well"}], "continue_final_message": True}),
    (TOKENIZE, {"tools": [TOOL], "add_generation_prompt": False}),
]  # fmt: skip
WRONG: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, {"max_tokens": 0}, "max_tokens"), (COMPLETIONS, {"max_tokens": 0, "echo": False}, "max_tokens"),
    (COMPLETIONS, {"max_tokens": 256}, "max_tokens"), (COMPLETIONS, {"max_tokens": 1.5}, "max_tokens"),
    (COMPLETIONS, {"max_tokens": True}, "max_tokens"), (COMPLETIONS, {"max_tokens": 1e300}, "max_tokens"),
    (COMPLETIONS, {"prompt": [5.5]}, "prompt"), (COMPLETIONS, {"prompt": [5] * 257}, "prompt"),
    (COMPLETIONS, {"best_of": 2}, "best_of"), (COMPLETIONS, {"best_of": 2, "n": 1}, "best_of"),
    (COMPLETIONS, {"stop": ["a", ""]}, "stop"), (COMPLETIONS, {"top_k": 2**31}, "top_k"),
    (COMPLETIONS, {"priority": 1}, "priority"), (COMPLETIONS, {"logit_bias": {"5120": 1}}, "logit_bias"),
    (COMPLETIONS, {"stream_options": {}}, "stream_options"),
    (COMPLETIONS, {"stream": False, "stream_options": {"include_usage": True}}, "stream_options"),
    (COMPLETIONS, {"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    (COMPLETIONS, {"response_format": {}}, "response_format"),
    (COMPLETIONS, {"response_format": {"type": "xml"}}, "response_format"),
    (COMPLETIONS, {"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (COMPLETIONS, {"response_format": {"type": "text", "json_schema": {"schema": SCHEMA}}},
     "response_format.json_schema"),
    (COMPLETIONS, {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
     "response_format.json_schema.schema"),
    (COMPLETIONS, {"structured_outputs": {}}, "structured_outputs"),
    (COMPLETIONS, {"structured_outputs": {"regex": None}}, "structured_outputs"),
    (COMPLETIONS, {"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
    (COMPLETIONS, {"structured_outputs": {"choice": [""]}}, "structured_outputs.choice"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages.0.content"),
    (CHAT, {"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
    (CHAT, {"messages": [{"role": "user", "content": ["hi"]}]}, "messages.0.content.0"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0"),
    (CHAT, {"messages": [USER | {"tool_call_id": "1"}]}, "messages.0.tool_call_id"),
    (CHAT, {"messages": [USER | {"tool_calls": [CALL]}]}, "messages.0.tool_calls"),
    (CHAT, {"messages": [{"role": "tool", "content": "x"}]}, "messages.0.tool_call_id"),
    (CHAT, {"messages": [{"role": "tool", "content": "x", "tool_call_id": None}]}, "messages.0.tool_call_id"),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages.0.tool_calls.0"),
    (CHAT, {"top_logprobs": 2}, "top_logprobs"), (CHAT, {"logprobs": False, "top_logprobs": 0}, "top_logprobs"),
    (CHAT, {"tools": [{}]}, "tools.0"),
    (CHAT, {"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name"),
    (CHAT, {"tool_choice": "required"}, "tool_choice"), (CHAT, {"tool_choice": NAMED}, "tool_choice"),
    (CHAT, {"tools": [TOOL], "tool_choice": "any"}, "tool_choice"),
    (CHAT, {"tools": [TOOL], "tool_choice": {}}, "tool_choice"),
    (CHAT, {"reasoning_effort": "low"}, "reasoning_effort"),
    (CHAT, {"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs"),
    (CHAT, {"messages": [USER, {"role": "assistant", "content": "Well"}], "continue_final_message": True,
            "add_generation_prompt": True}, "continue_final_message"),
    (TOKENIZE, {"tools": [{}]}, "tools.0"),
    (TOKENIZE, {"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
]  # fmt: skip


@pytest.fixture(scope="module")
def validators() -> dict[str, jsonschema.Draft202012Validator]:
    found = document(make_state(fake(), max_model_len=256))
    components = {"components": found["components"]}
    return {
        path: jsonschema.Draft202012Validator(
            {**found["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"], **components}
        )
        for path in BODIES
    }


@pytest.mark.parametrize(("path", "fields"), FINE)
def test_what_the_document_allows_is_taken(
    path: str, fields: dict[str, Any], validators: dict[str, jsonschema.Draft202012Validator]
) -> None:
    body = BODIES[path] | fields
    validators[path].validate(body)
    response = post(make_state(fake(), max_model_len=256), path, body)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(("path", "fields", "field"), WRONG)
def test_what_the_document_forbids_is_refused(
    path: str, fields: dict[str, Any], field: str, validators: dict[str, jsonschema.Draft202012Validator]
) -> None:
    body = BODIES[path] | fields
    assert not validators[path].is_valid(body)
    response = post(make_state(fake(), max_model_len=256), path, body)
    assert response.status_code == 400 and error_of(response)["param"].startswith(field), response.text


@pytest.mark.parametrize(("bos", "taken"), [(True, True), (False, False)])
def test_an_empty_prompt_is_allowed_where_the_tokenizer_begins_it(bos: bool, taken: bool) -> None:
    replicas = fake()
    replicas.tokenizer._config["add_bos_token"] = bos
    state = make_state(replicas)
    prompt = document(state)["components"]["schemas"]["CompletionRequest"]["properties"]["prompt"]
    for empty in ("", [""], ["a", ""]):
        assert jsonschema.Draft202012Validator(prompt).is_valid(empty) == taken
        status = post(state, COMPLETIONS, BODIES[COMPLETIONS] | {"prompt": empty}).status_code
        assert status == (200 if taken else 400)


def test_a_whole_number_is_an_integer_however_it_is_written() -> None:
    replicas = fake()
    state = make_state(replicas)
    assert post(state, COMPLETIONS, BODIES[COMPLETIONS] | {"prompt": [65.0, 66], "max_tokens": 2.0}).status_code == 200
    ((prompt, params, _),) = replicas.submitted.values()
    assert prompt == [65, 66] and [*map(type, prompt)] == [int, int] and type(params.max_tokens) is int
    assert post(state, "/detokenize", {"tokens": [65.0, 66]}).json() == {"prompt": "bc"}
