"""Fields that ask for structured output: what they become, and what is refused before anything is queued."""

from __future__ import annotations

import json
from typing import Any

import pytest

from moewe.runtime.params import SamplingParams, StructuredSpec
from moewe.server.errors import ApiError
from moewe.server.intake.structured import with_thinking
from moewe.server.protocol.structured_fields import asked_structure
from moewe.text.parsers import OutputFormat
from tests.support.asking import HI, error_of, fake, post
from tests.support.fake_replicas import make_state

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
OPENAI = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True, "description": "d"}}
TEXT = json.dumps(SCHEMA)


@pytest.mark.parametrize(
    ("fields", "field", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format", "json_object", ""),
        ({"response_format": OPENAI}, "response_format.json_schema.schema", "json", TEXT),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": False}}},
            "response_format.json_schema.schema",
            "json",
            TEXT,
        ),
        ({"guided_json": SCHEMA}, "guided_json", "json", TEXT),
        ({"guided_json": TEXT}, "guided_json", "json", TEXT),
        ({"guided_regex": "a+"}, "guided_regex", "regex", "a+"),
        ({"guided_choice": ["a", "b"]}, "guided_choice", "choice", '["a", "b"]'),
        ({"guided_grammar": 'start: "a"'}, "guided_grammar", "grammar", 'start: "a"'),
        ({"structured_outputs": {"json": SCHEMA}}, "structured_outputs.json", "json", TEXT),
        ({"structured_outputs": {"regex": "a+"}}, "structured_outputs.regex", "regex", "a+"),
        ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs.choice", "choice", '["a"]'),
        ({"structured_outputs": {"grammar": "g"}}, "structured_outputs.grammar", "grammar", "g"),
        (
            {"structured_outputs": {"json_object": True, "regex": None, "disable_fallback": False}},
            "structured_outputs.json_object",
            "json_object",
            "",
        ),
        ({"response_format": {"type": "text"}, "guided_regex": "a"}, "guided_regex", "regex", "a"),
    ],
)
def test_every_spelling_is_read(fields: dict[str, Any], field: str, kind: str, text: str) -> None:
    asked = asked_structure(**fields)
    assert asked is not None
    assert (asked.field, asked.spec) == (field, StructuredSpec(kind=kind, text=text))


def test_nothing_asked_leaves_the_text_free() -> None:
    assert asked_structure() is None
    assert asked_structure(response_format={"type": "text"}, guided_json=None) is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "name": 3}}},
            "response_format.json_schema.name",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": "yes"}}},
            "response_format.json_schema.strict",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": [1]}}},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "schemas": {}}}},
            "response_format.json_schema.schemas",
        ),
        ({"guided_json": 3}, "guided_json"),
        ({"guided_regex": ["a"]}, "guided_regex"),
        ({"guided_choice": "a"}, "guided_choice"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", ""]}, "guided_choice"),
        ({"guided_grammar": {}}, "guided_grammar"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": "a"}, "structured_outputs"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp"),
        ({"structured_outputs": {"regex": "a", "structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs.regex"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs.regex",
        ),
    ],
)
def test_what_is_malformed_or_twice_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        asked_structure(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    ("fields", "param", "word"),
    [
        ({"guided_regex": "foo**"}, "guided_regex", "repeats"),
        ({"guided_json": {"type": "object", "properties": {"a": "bar"}}}, "guided_json", "properties.a"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strng"}}}},
            "response_format.json_schema.schema",
            "strng",
        ),
        ({"structured_outputs": {"json": {"$ref": "#/nowhere"}}}, "structured_outputs.json", "#/nowhere"),
        ({"guided_json": {"not": {}}}, "guided_json", 'what "not" asks for cannot be held; leave it out'),
        ({"guided_json": {"maximum": 10**400}}, "guided_json", "number out of range"),
        ({"guided_grammar": "nonsense"}, "guided_grammar", "Expected"),
    ],
)
def test_bad_grammars_never_reach_an_engine(fields: dict[str, Any], param: str, word: str) -> None:
    replicas = fake()
    state = make_state(replicas)
    try:
        response = post(state, "/v1/completions", {"model": "gull", "prompt": "a", **fields})
        assert response.status_code == 400
        error = error_of(response)
        assert (error["param"], error["code"]) == (param, "invalid_grammar")
        assert word in error["message"] and "\n" not in error["message"]
        assert not replicas.submitted
    finally:
        state.grammar_check.close()


def test_a_sound_grammar_goes_to_the_engine_as_it_was_sent() -> None:
    replicas = fake()
    state = make_state(replicas)
    try:
        assert post(state, "/v1/chat/completions", HI | {"response_format": OPENAI, "max_tokens": 2}).status_code == 200
        assert [params.structured for _, params, _ in replicas.submitted.values()] == [
            StructuredSpec(kind="json", text=TEXT)
        ]
    finally:
        state.grammar_check.close()


@pytest.mark.parametrize(
    ("reasoning", "prompt", "expected"),
    [
        (None, "a", ("", "", False)),
        ("qwen3", "<|im_start|>assistant\n", ("<think>", "</think>", False)),
        ("qwen3", "assistant\n<think>\n", ("<think>", "</think>", True)),
        ("qwen3", "assistant\n<think>\n\n</think>\n\n", ("", "", False)),
        ("deepseek_r1", "assistant", ("<think>", "</think>", True)),
        ("gpt_oss", "<|start|>assistant", ("", "<|channel|>final<|message|>", True)),
    ],
)
def test_a_grammar_waits_for_thinking(reasoning: str | None, prompt: str, expected: tuple[str, str, bool]) -> None:
    params = SamplingParams(structured=StructuredSpec(kind="regex", text="a"))
    spec = with_thinking(params, OutputFormat(reasoning=reasoning), prompt).structured
    assert spec is not None
    assert (spec.thinking_start, spec.thinking_end, spec.thinking) == expected
    assert with_thinking(SamplingParams(), OutputFormat(reasoning=reasoning), prompt).structured is None
