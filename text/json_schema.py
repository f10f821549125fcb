"""Is a JSON schema one that an answer can be held to? `check_schema` names the place of the first mistake.

Not a validator of instances and not a compiler: the grammar library says what of a sound schema it cannot do. Here is
what it would take although it is wrong (regular expressions), or refuse without saying where.
Units: paths as in an error message, `properties.name.type`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from .one_line import shorten
from .regex_syntax import RegexError, check_regex

TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
# Where schemas stand inside a schema: alone, in a list, by name.
_SINGLE = frozenset({
    "additionalItems", "additionalProperties", "contains", "contentSchema", "else", "if", "items", "not",
    "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties",
})  # fmt: skip
_LISTS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
_NAMED = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})
# Settings of the grammar library itself, which are the server's.
_RESERVED = "x-guidance"


class SchemaError(ValueError):
    """A schema that cannot be used; the text names place, value and fix."""


def check_schema(schema: Any) -> None:
    """Refuse a schema with a mistake in it.

    Raises:
        SchemaError: one line that names the place.

    Example:
        `check_schema({"properties": {"a": {"type": "strng"}}})` fails at `properties.a.type`.
    """
    todo: list[tuple[str, Any]] = [("", schema)]
    while todo:  # not recursive: a schema may nest deeper than the stack
        where, part = todo.pop()
        if isinstance(part, bool):
            continue
        if not isinstance(part, dict):
            raise SchemaError(
                f"{where or 'the schema'} must be a schema (an object, true or false), got {_shown(part)}"
            )
        _check_type(where, part)
        _check_reference(where, part, schema)
        _check_patterns(where, part)
        if _RESERVED in part:
            raise SchemaError(f"{_join(where, _RESERVED)} is not allowed; leave it out")
        todo.extend(reversed(list(_inner(where, part))))


def _inner(where: str, part: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The schemas directly inside `part`, with their places."""
    for name, value in part.items():
        here = _join(where, name)
        if name == "items" and isinstance(value, list):
            yield from ((f"{here}.{index}", entry) for index, entry in enumerate(value))
        elif name in _SINGLE:
            yield here, value
        elif name in _LISTS:
            if not isinstance(value, list):
                raise SchemaError(f"{here} must be a list of schemas, got {_shown(value)}")
            yield from ((f"{here}.{index}", entry) for index, entry in enumerate(value))
        elif name in _NAMED:
            if not isinstance(value, dict):
                raise SchemaError(f"{here} must be an object with a schema for each name, got {_shown(value)}")
            yield from ((_join(here, key), entry) for key, entry in value.items())


def _check_type(where: str, part: dict[str, Any]) -> None:
    if "type" not in part:
        return
    given = part["type"]
    for kind in given if isinstance(given, list) else [given]:
        if not isinstance(kind, str) or kind not in TYPES:
            raise SchemaError(
                f"{_join(where, 'type')}={_shown(kind)} is no type of JSON; use one of {', '.join(TYPES)}"
            )


def _check_patterns(where: str, part: dict[str, Any]) -> None:
    named = part.get("patternProperties")
    patterns = [(_join(where, "patternProperties"), text) for text in (named if isinstance(named, dict) else ())]
    if "pattern" in part:
        patterns.append((_join(where, "pattern"), part["pattern"]))
    for place, text in patterns:
        if not isinstance(text, str):
            raise SchemaError(f"{place} must be a regular expression, got {_shown(text)}")
        try:
            check_regex(text)
        except RegexError as error:
            raise SchemaError(f"{place} is not a regular expression that can be used: {error}") from None


def _check_reference(where: str, part: dict[str, Any], root: Any) -> None:
    if "$ref" not in part:
        return
    place, reference = _join(where, "$ref"), part["$ref"]
    if not isinstance(reference, str) or not reference.startswith("#"):
        raise SchemaError(
            f"{place}={_shown(reference)} is not a place in this schema; copy what it means to '#/$defs/...'"
        )
    target = root
    for step in reference[1:].split("/")[1:]:
        name = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(target, list) and name.isdecimal() and int(name) < len(target):
            target = target[int(name)]
        elif isinstance(target, dict) and name in target:
            target = target[name]
        else:
            raise SchemaError(f"{place}={_shown(reference)} names nothing in this schema; add it to $defs")
    if reference not in ("#", "#/") and not reference.startswith("#/"):
        raise SchemaError(f"{place}={_shown(reference)} is an anchor; use the form '#/$defs/name'")


def _join(where: str, name: str) -> str:
    name = shorten(name, 60)
    return f"{where}.{name}" if where else name


def _shown(value: Any) -> str:
    return shorten(type(value).__name__ if isinstance(value, (dict, list)) else repr(value), 80)
