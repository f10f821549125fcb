"""docs/api.md to its last row: every object inside a body, every parameter in a URL, and what it says of others' APIs.

Not the fields of bodies (tests/server/test_fields.py). No units.
"""

from __future__ import annotations

import re
from typing import Any

import openai
import pytest
from openai.types import chat, shared_params

from moewe.server.openapi.document import document
from moewe.server.openapi.field_origins import (
    INNER_DIFFERENCES,
    INNER_NOT_OPENAI,
    INNER_NOT_VLLM,
    INNER_VLLM_OLD,
    NOT_OPENAI_OBJECTS,
    OPENAI_PACKAGE,
    inner_known_to,
)
from moewe.server.openapi.reference import reference
from tests.server.test_trace import Session, tracing
from tests.support.asking import HI, error_of, fake, post
from tests.support.fake_replicas import make_state

SCHEMAS: dict[str, Any] = document()["components"]["schemas"]
BODIES = ("CompletionRequest", "ChatRequest", "TokenizeText", "TokenizeChat", "Detokenize")
MESSAGES = (
    chat.ChatCompletionUserMessageParam, chat.ChatCompletionSystemMessageParam, chat.ChatCompletionToolMessageParam,
    chat.ChatCompletionDeveloperMessageParam, chat.ChatCompletionAssistantMessageParam,
)  # fmt: skip
# Of the openai package: the fields that it has of each of our objects.
THEIRS: dict[str, set[str]] = {
    "ChatMessage": {name for one in MESSAGES for name in one.__annotations__},
    "ContentPart": set(chat.ChatCompletionContentPartTextParam.__annotations__),
    "ToolCall": set(chat.ChatCompletionMessageFunctionToolCallParam.__annotations__),
    "CalledFunction": set(chat.chat_completion_message_function_tool_call_param.Function.__annotations__),
    "Tool": set(chat.ChatCompletionFunctionToolParam.__annotations__),
    "Function": set(shared_params.FunctionDefinition.__annotations__),
    "NamedTool": set(chat.ChatCompletionNamedToolChoiceParam.__annotations__),
    "NamedFunction": set(chat.chat_completion_named_tool_choice_param.Function.__annotations__),
    "StreamOptions": set(chat.ChatCompletionStreamOptionsParam.__annotations__),
    "ResponseFormat": set(shared_params.ResponseFormatJSONSchema.__annotations__),
    "JsonSchemaFormat": set(shared_params.response_format_json_schema.JSONSchema.__annotations__),
}


def inner_objects() -> set[str]:
    """Names of the schemas that bodies refer to, and those in turn."""
    found: set[str] = set()
    todo = list(BODIES)
    while todo:
        for name in re.findall(r"'#/components/schemas/(\w+)'", str(SCHEMAS[todo.pop()])):
            if name not in found:
                found.add(name)
                todo.append(name)
    return found


def section(title: str) -> list[list[str]]:
    """Cells of the rows below the heading that begins so."""
    (text,) = re.findall(rf"^## {re.escape(title)}.*?\n\n(.*?)(?:\n\n|\Z)", reference(), re.M | re.S)
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in text.splitlines()[2:]]


@pytest.mark.parametrize("name", sorted(inner_objects()))
def test_every_field_of_every_inner_object_has_a_row_that_says_what_it_is(name: str) -> None:
    rows = section(f"`{name}`,")
    required = SCHEMAS[name].get("required", ())
    expected = [f"`{field}` *" if field in required else f"`{field}`" for field in SCHEMAS[name]["properties"]]
    assert [row[0] for row in rows] == expected
    assert all(row[3] for row in rows), "a row does not say what the field is"


def test_no_inner_object_is_a_bare_object_with_fields_of_its_own() -> None:
    """Those with known fields are schemas with a name, so that they have rows."""
    for name in (*BODIES, *inner_objects()):
        for field, one in SCHEMAS[name]["properties"].items():
            if (name, field) != ("Function", "parameters"):  # a JSON schema, of which its type alone is looked at
                assert "properties" not in one, (name, field)


@pytest.mark.parametrize("name", sorted(inner_objects() - NOT_OPENAI_OBJECTS))
def test_fields_of_inner_objects_of_openai_are_those_of_its_package(name: str) -> None:
    ours = set(SCHEMAS[name]["properties"])
    said = {field for field in ours if inner_known_to(name, field)[0] == "yes"}
    installed = tuple(int(part) for part in openai.__version__.split(".")[:2])
    if installed >= OPENAI_PACKAGE:
        assert said <= THEIRS[name]
    if installed <= OPENAI_PACKAGE:
        assert not (ours - said) & THEIRS[name]


def test_origins_name_fields_that_there_are() -> None:
    fields = {(name, field) for name in (*BODIES, *inner_objects()) for field in SCHEMAS[name]["properties"]}
    assert fields >= INNER_NOT_OPENAI | INNER_NOT_VLLM | INNER_VLLM_OLD | set(INNER_DIFFERENCES)


def parameters() -> list[tuple[str, str, dict[str, Any]]]:
    """(METHOD path, name, schema) of each parameter in a URL."""
    return [
        (f"{method.upper()} {path}", one["name"], one)
        for path, item in document()["paths"].items()
        for method, operation in item.items()
        for one in operation.get("parameters", ())
    ]


def test_every_parameter_in_a_url_has_a_row() -> None:
    rows = section("Parameters in the URL")
    assert [(row[0], row[1].rstrip(" *")) for row in rows] == [
        (f"`{path}`", f"`{name}`") for path, name, _ in parameters()
    ]
    assert {"steps", "idle_timeout", "format", "model", "topology"} == {name for _, name, _ in parameters()}
    assert all(row[4] for row in rows)


@pytest.mark.parametrize("name", ["steps", "idle_timeout"])
def test_limits_of_a_trace_are_those_that_are_checked(name: str) -> None:
    (schema,) = [one["schema"] for path, field, one in parameters() if (path, field) == ("POST /v1/trace", name)]
    step = 1 if schema["type"] == "integer" else 0.01
    for inside, outside in ((schema["minimum"], -step), (schema["maximum"], step)):
        state, asked = tracing(Session(1))
        assert post(state, f"/v1/trace?{name}={inside}", b"").status_code == 200
        assert asked == [inside if name == "steps" else 200]
        response = post(state, f"/v1/trace?{name}={inside + outside}", b"")
        assert response.status_code == 400 and error_of(response)["param"] == name


def test_the_note_on_log_probabilities_names_what_an_answer_has() -> None:
    (note,) = re.findall(r"^## Log-probabilities of a chat\n\n(.*?)\n\n", reference(), re.M | re.S)
    entry, alternative = (re.findall(r'"(\w+)"', found) for found in re.findall(r'`\{("token".*?)\}`', note))
    answer = post(make_state(fake()), "/v1/chat/completions", HI | {"logprobs": True, "top_logprobs": 2}).json()
    logprobs = answer["choices"][0]["logprobs"]
    assert list(logprobs) == ["content", "refusal"] and len(logprobs["content"]) == answer["usage"]["completion_tokens"]
    for one in logprobs["content"]:
        assert set(one) == set(entry) and one["top_logprobs"]
        assert all(set(other) == set(alternative) for other in one["top_logprobs"])
