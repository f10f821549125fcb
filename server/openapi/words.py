"""A JSON schema in words for people: the type of a value, and what bounds it.

Not a page (server/http/docs_page.py, server/openapi/reference.py). Units: characters.
"""

from __future__ import annotations

import json

from .answers import Schema

_LIMITS = {
    "minimum": "from {}", "exclusiveMinimum": "above {}", "maximum": "to {}", "minLength": "at least {} characters",
    "maxLength": "at most {} characters", "minItems": "at least {} entries", "maxItems": "at most {} entries",
    "maxProperties": "at most {} entries", "default": "default {}",
}  # fmt: skip


def type_of(schema: Schema) -> str:
    """Return the type of a value in words."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(type_of(one) for one in schema["anyOf"]))
    if "enum" in schema:
        return " or ".join(_value(one) for one in schema["enum"])
    if "const" in schema:
        return _value(schema["const"])
    kind = schema.get("type", "anything")
    kinds = kind if isinstance(kind, list) else [kind]
    if kinds == ["array"] and schema.get("items"):
        entry = type_of(schema["items"])
        return f"list of ({entry})" if " or " in entry else f"list of {entry}"
    return " or ".join(kinds)


def limits_of(schema: Schema) -> str:
    """Return what bounds a value, in words."""
    found = " ".join(words.format(_number(schema[name])) for name, words in _LIMITS.items() if name in schema)
    return (
        found.replace(" at ", ", at ")
        .replace(" default ", ", default ")
        .replace(" 1 entries", " 1 entry")
        .replace(" 1 characters", " 1 character")
    )


def _value(value: object) -> str:
    return repr(value) if isinstance(value, str) else json.dumps(value)


def _number(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value
