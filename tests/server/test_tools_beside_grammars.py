"""A grammar and tools in one request: what the engine is told, what is refused, and how the answer is read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from moewe.runtime.params import StructuredSpec
from tests.server.test_tools import CHAT, MARK, model, state_of
from tests.support.asking import error_of, post
from tests.support.tool_templates import ARGUMENTS, TEMPLATES, TOOLS, assistant, output_of

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
ASKED = {**CHAT, "tools": TOOLS, "response_format": FORMAT}


def told(name: str, output: str = "{}", **fields: Any) -> tuple[StructuredSpec, dict[str, Any]]:
    """Return what the engine was told, and the choice that came back."""
    state = state_of(name, output)
    try:
        response = post(state, "/v1/chat/completions", ASKED | fields)
        assert response.status_code == 200, response.text
        ((_, params, _),) = state.hub.replicas.submitted.values()
        return params.structured, response.json()["choices"][0]
    finally:
        state.grammar_check.close()


def refusal(name: str, **fields: Any) -> dict[str, Any]:
    state = state_of(name, "{}")
    try:
        response = post(state, "/v1/chat/completions", ASKED | fields)
        assert response.status_code == 400 and not state.hub.replicas.submitted
        return error_of(response)
    finally:
        state.grammar_check.close()


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "glm45", "deepseek_v31", "kimi_k2", "mistral"])
def test_a_model_may_call_or_answer_by_the_schema(name: str) -> None:
    turn = assistant([("find_birds", ARGUMENTS)], "", "Hm.")
    spec, choice = told(name, output_of(TEMPLATES[name], turn))
    assert spec.kind == "json" and json.loads(spec.text) == SCHEMA
    assert spec.call_start in output_of(TEMPLATES[name], turn) and MARK.fullmatch(spec.call_start)
    assert spec.thinking_end in ("</think>", "[/THINK]")
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == ARGUMENTS
    _, choice = told(name, '{"a": 1}')
    assert choice["message"]["content"] == '{"a": 1}' and "tool_calls" not in choice["message"]


def test_with_gpt_oss_a_call_stands_before_the_channel_of_the_answer() -> None:
    spec, choice = told("gpt_oss", output_of(TEMPLATES["gpt_oss"], assistant([("now", {})], "", "Hm.")))
    assert (spec.call_start, spec.thinking, spec.thinking_end) == ("", True, "<|channel|>final<|message|>")
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["now"]


@pytest.mark.parametrize("name", ["llama3_json", "llama4_pythonic"])
def test_where_a_call_may_begin_as_an_answer_does_both_are_refused(name: str) -> None:
    error = refusal(name)
    assert error["param"] == "tools" and "no single token opens" in error["message"]
    assert "response_format.json_schema.schema and tools exclude each other" in error["message"]


def test_a_mark_of_several_tokens_is_refused() -> None:
    replicas = model("hermes", "{}")
    state = state_of("hermes", "{}")
    replicas.tokenizer = state.tokenizer = model("llama3_json", "{}").tokenizer  # it has no token <tool_call>
    response = post(state, "/v1/chat/completions", ASKED)
    assert response.status_code == 400 and error_of(response)["param"] == "tools"


def test_a_demanded_call_holds_no_text_and_none_is_no_tool() -> None:
    spec, _ = told("llama3_json", '[{"name": "now", "parameters": {}}]', tool_choice="required")
    assert "find_birds" in spec.text and spec.call_start == ""
    spec, _ = told("llama3_json", "{}", tool_choice="none")
    assert json.loads(spec.text) == SCHEMA and spec.call_start == ""
    bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strng"}}}
    for choice in ("required", "auto"):
        error = refusal("hermes", response_format=bad, tool_choice=choice)
        assert (error["param"], error["code"]) == ("response_format.json_schema.schema", "invalid_grammar")
