"""JSON schemas: mistakes are named with their place; what is sound passes, whatever its properties are called."""

from __future__ import annotations

from typing import Any

import pytest

from moewe.text.json_schema import SchemaError, check_schema

SOUND: list[Any] = [
    True, {}, {"type": ["string", "null"]}, {"$defs": {"a b/c~d": {}}, "$ref": "#/$defs/a%20b~1c~0d"}, {"$ref": "#"},
    {"properties": {"type": {"type": "string"}, "pattern": {"enum": ["**"]}, "$ref": {"const": {"type": "strng"}}}},
    {"anyOf": [{"items": {"pattern": "^a$"}}, {"prefixItems": [True, {}]}]}, {"enum": [{"type": "strng"}]},
    {"patternProperties": {"^a+$": {"type": "integer"}}}, {"default": {"$ref": "http://x"}}, {"items": [{}, True]},
    {"anyOf": [{"type": "null"}], "properties": {"a": {"$ref": "#/anyOf/0"}}},
]  # fmt: skip
WRONG: list[tuple[Any, str]] = [
    ([], "the schema must be a schema"),
    ({"type": "strng"}, "type='strng' is no type of JSON; use one of array"),
    ({"type": ["string", 3]}, "type=3 is no type"),
    ({"properties": {"a": "bar"}}, "properties.a must be a schema (an object, true or false), got 'bar'"),
    ({"properties": ["a"]}, "properties must be an object with a schema for each name, got list"),
    ({"anyOf": {"type": "string"}}, "anyOf must be a list of schemas, got dict"),
    ({"items": {"properties": {"a": {"type": "str"}}}}, "items.properties.a.type='str'"),
    ({"not": 3}, "not must be a schema"),
    ({"pattern": "foo**"}, "pattern is not a regular expression that can be used: '*' repeats"),
    ({"pattern": 3}, "pattern must be a regular expression, got 3"),
    ({"patternProperties": {"(": {}}}, "patternProperties is not a regular expression"),
    ({"$ref": "#/$defs/none"}, "$ref='#/$defs/none' names nothing in this schema"),
    ({"$ref": "http://example.com/schema"}, "is not a place in this schema"),
    ({"$ref": "other.json#/a"}, "is not a place in this schema"),
    ({"$ref": 3}, "$ref=3 is not a place"),
    ({"$ref": "#name"}, "is an anchor"),
    ({"anyOf": [{}], "properties": {"a": {"$ref": "#/anyOf/1"}}}, "properties.a.$ref='#/anyOf/1' names nothing"),
    ({"x-guidance": {"lenient": True}}, "x-guidance is not allowed"),
]


@pytest.mark.parametrize("schema", SOUND, ids=str)
def test_sound_schemas_pass(schema: Any) -> None:
    check_schema(schema)


@pytest.mark.parametrize(("schema", "message"), WRONG, ids=[message for _, message in WRONG])
def test_mistakes_are_named_with_their_place(schema: Any, message: str) -> None:
    with pytest.raises(SchemaError) as caught:
        check_schema(schema)
    assert message in str(caught.value)


def test_depth_is_no_danger() -> None:
    schema: dict[str, Any] = {"type": "strng"}
    for _ in range(5000):
        schema = {"items": schema}
    with pytest.raises(SchemaError, match="is no type of JSON"):
        check_schema(schema)
