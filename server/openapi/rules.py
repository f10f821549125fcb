"""What the OpenAPI document says of objects inside bodies, and of fields that only go together or never do.

Not the checks (server/protocol/requests.py, server/protocol/structured_fields.py, server/protocol/tool_fields.py): JSON
schemas that say the same, so that a client or a fuzzer that keeps to the document is not refused. What a schema cannot
say stays with the checks: whether a grammar is one, whether `max_tokens` fits the context, whether `best_of` is `n`;
see also `TOGETHER`.
Units: as OpenAI's API.
"""

from __future__ import annotations

from typing import Any

from ...text.grammar import GRAMMAR_KINDS
from ..protocol.structured_fields import FORMATS, OPTIONS
from ..protocol.tool_fields import NAME
from .answers import Schema, ref

_TEXT: Schema = {"type": "string"}
_NULL: Schema = {"type": "null"}
_OFF: Schema = {"enum": [None, False]}
_FUNCTION: Schema = {"const": "function"}
_PARAMETERS: Schema = {"type": ["object", "null"], "properties": {"type": {"const": "object"}}}
_JSON_SCHEMA: Schema = {"type": ["object", "string", "boolean"]}


def _object(required: dict[str, Schema], optional: dict[str, Schema] | None = None, **more: Any) -> Schema:
    properties = {**required, **(optional or {})}
    return {"type": "object", "required": list(required), "properties": properties, **more}


def _said(words: str, schema: Schema) -> Schema:
    """A field with what docs/api.md and /docs say of it."""
    return {**schema, "description": words}


def _given(**properties: Schema) -> Schema:
    """The fields are there and look like this."""
    return {"required": list(properties), "properties": properties}


def _if_given(**properties: Schema | bool) -> Schema:
    """The fields look like this where they are there."""
    return {"properties": properties}


def _either(*cases: Schema) -> Schema:
    return {"anyOf": list(cases)}


INNER: dict[str, Schema] = {
    "ContentPart": _object({
        "type": _said("parts of other types are refused", {"const": "text"}),
        "text": _said("joined with the others by line breaks where a template reads text alone", _TEXT),
    }),
    "ToolCall": _object(
        {"function": _said("what was called", ref("CalledFunction"))},
        {
            "type": _said("may be missing", _FUNCTION),
            "id": _said("which a message of role `tool` answers; reaches the template as sent", _TEXT),
        },
    ),
    "CalledFunction": _object(
        {"name": _said("that was called", {"type": "string", "minLength": 1})},
        {"arguments": _said(
            "the JSON text of an object, or the object; `\"\"` for none",
            {"type": ["string", "object"], "contentMediaType": "application/json"},
        )},
    ),
    "Tool": _object({
        "type": _said("the only type", _FUNCTION), "function": _said("that the model may call", ref("Function")),
    }),
    "Function": _object(
        {"name": _said("1 to 64 letters, digits or any of _ - . : /",
                       {"type": "string", "pattern": f"^{NAME.pattern}$"})},
        {
            "description": _said("for the template", {"type": ["string", "null"]}),
            "parameters": _said("a JSON schema of type `object`; gives values without quotes their types, and holds "
                                "calls that `tool_choice` forces", _PARAMETERS),
            "strict": _said("reaches the template as sent, and changes nothing else", {}),
        },
    ),
    "NamedTool": _object({
        "type": _said("the only type", _FUNCTION), "function": _said("that must be called", ref("NamedFunction")),
    }),
    "NamedFunction": _object({"name": _said("one of those in `tools`", _TEXT)}),
    "ResponseFormat": _object(
        {"type": _said("`text` asks for nothing, `json_object` for any object", {"enum": list(FORMATS)})},
        {"json_schema": _said("with the type `json_schema`, and only there", ref("JsonSchemaFormat"))},
        additionalProperties=False,
        **_either(
            _if_given(type={"enum": [one for one in FORMATS if one != "json_schema"]}, json_schema=False),
            _given(type={"const": "json_schema"}, json_schema={}),
        ),
    ),
    "JsonSchemaFormat": _object(
        {"schema": _said("a JSON schema, or its text; the text of the answer is an instance", _JSON_SCHEMA)},
        {
            "name": _said("taken without effect; may be missing", _TEXT),
            "description": _said("taken without effect", {}),
            "strict": _said("the text keeps to the schema either way", {"enum": [None, True, False]}),
        },
        additionalProperties=False,
    ),
    "StructuredOutputs": _object(
        {},
        {
            "json": _said("as `guided_json`", {"type": ["object", "string", "boolean", "null"]}),
            "regex": _said("as `guided_regex`", {"type": ["string", "null"]}),
            "choice": _said("as `guided_choice`", {
                "type": ["array", "null"], "items": {"type": "string", "minLength": 1}, "minItems": 1,
            }),
            "grammar": _said("as `guided_grammar`", {"type": ["string", "null"]}),
            "json_object": _said("true: any JSON object", {"type": ["boolean", "null"]}),
            **{name: _said("refused, but for values that ask for nothing", {"enum": list(fine)})
               for name, fine in OPTIONS.items()},
        },
        additionalProperties=False,
        **_either(*(
            {"required": [kind], "properties": dict.fromkeys(GRAMMAR_KINDS, _OFF) | {kind: {"not": _OFF}}}
            for kind in GRAMMAR_KINDS
        )),
    ),
}  # fmt: skip

_STREAM = _either(
    {"required": ["stream"], **_if_given(stream={"const": True}, prompt_logprobs=_NULL)},
    _if_given(stream=_OFF, stream_options=_NULL),
)
_OPEN_TURN = _either(_if_given(continue_final_message=_OFF), _if_given(add_generation_prompt=_OFF))
_SOME = {"type": "array", "minItems": 1}
_NONE: Schema = {"enum": [None, []]}
_TEXT_OR_PARTS = {"type": ["string", "array"]}


def _message(roles: list[str], required: dict[str, Schema], **optional: Schema) -> Schema:
    given = {"role": {"enum": roles}, **required}
    return {"required": list(given), "properties": {**given, **optional}}


# Of whole bodies and of messages: each of these holds. There are so few because tools that read such documents multiply
# the cases out: schemathesis gives up a body that has some fifty. Left out, though a schema could say it: that fields
# for structured output exclude each other, and tools.
TOGETHER: dict[str, list[Schema]] = {
    "CompletionRequest": [
        _STREAM,
        _either(_if_given(max_tokens=_either(_NULL, {"minimum": 1})), _given(echo={"const": True})),
        _either(
            _if_given(best_of=_NULL), _if_given(best_of={"const": 1}, n={"enum": [None, 1]}), _given(n={"minimum": 2})
        ),
    ],
    "ChatRequest": [
        _STREAM,
        _OPEN_TURN,
        _either(_if_given(top_logprobs=_NULL), _given(logprobs={"const": True})),
        _either(_if_given(tool_choice={"enum": [None, "none", "auto"]}), _given(tools=_SOME)),
    ],
    "TokenizeChat": [_OPEN_TURN],
    "ChatMessage": [
        _either(
            _message(
                ["system", "developer", "user"], {"content": _TEXT_OR_PARTS}, tool_calls=_NONE, tool_call_id=_NULL
            ),
            _message(["assistant"], {}, tool_call_id=_NULL),
            _message(
                ["tool"],
                {"content": _TEXT_OR_PARTS, "tool_call_id": {"type": "string", "minLength": 1}},
                tool_calls=_NONE,
            ),
        )
    ],
}


def add_rules(schemas: dict[str, Schema]) -> None:
    """Write the rules into the schemas of bodies and messages."""
    schemas |= INNER
    for name, rules in TOGETHER.items():
        schemas[name]["allOf"] = rules
    message = schemas["ChatMessage"]["properties"]
    message["content"].pop("type")
    message["content"]["anyOf"] = [_TEXT, {"type": "array", "items": ref("ContentPart")}, _NULL]
    message["tool_calls"]["anyOf"] = [{"type": "array", "items": ref("ToolCall")}, _NULL]
    for name in ("ChatRequest", "TokenizeChat"):
        turns = schemas[name]["properties"]
        turns["tools"]["anyOf"] = [{"type": "array", "items": ref("Tool")}, _NULL]
        turns["chat_template_kwargs"]["propertyNames"] = {"pattern": r"^[A-Za-z]\w*$"}
    choice = schemas["ChatRequest"]["properties"]["tool_choice"]
    del choice["type"]
    choice["anyOf"] = [{"enum": ["none", "auto", "required", None]}, ref("NamedTool")]
    for name in ("ChatRequest", "CompletionRequest"):
        properties = schemas[name]["properties"]
        properties["response_format"].pop("type")
        properties["response_format"]["anyOf"] = [ref("ResponseFormat"), _NULL]
        properties["structured_outputs"]["anyOf"] = [ref("StructuredOutputs"), _NULL]
