"""Arguments that a model writes as bare text between tags, turned into JSON with the help of the tool's schema.

Not a validator: a value that does not fit its schema is passed on as a string. Texts are handed on while they come,
other values when they are whole.
Units: characters.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from .cursor import Call, Cursor, Steps
from .json_values import whole_value

_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
_JSON_KINDS = {"{": {"object"}, "[": {"array"}, '"': {"string"}, "t": {"boolean"}, "f": {"boolean"}, "n": {"null"}}
_NUMBERS = {"number", "integer"}


class ArgumentKinds:
    """What JSON types the arguments of each tool may have.

    Args:
        tools: OpenAI's list of tools, which nobody has checked.
    """

    def __init__(self, tools: Sequence[Any] = ()) -> None:
        self._properties: dict[str, Mapping[str, Any]] = {}
        for tool in tools:
            function = tool.get("function") if isinstance(tool, Mapping) else None
            parameters = function.get("parameters") if isinstance(function, Mapping) else None
            properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
            if isinstance(properties, Mapping) and isinstance(function, Mapping):
                self._properties[str(function.get("name"))] = properties

    def of(self, function: str, argument: str) -> frozenset[str]:
        """Return the types that an argument may have; none when nothing is known."""
        return frozenset(_kinds(self._properties.get(function, {}).get(argument), 0))


def _kinds(schema: Any, depth: int) -> set[str]:
    if not isinstance(schema, Mapping) or depth > 4:
        return set()
    named = schema.get("type")
    kinds = {kind for kind in (named if isinstance(named, list) else [named]) if isinstance(kind, str)}
    for part in ("anyOf", "oneOf"):
        choices = schema.get(part)
        for choice in choices[:32] if isinstance(choices, list) else ():
            kinds |= _kinds(choice, depth + 1)
    enum = schema.get("enum")
    if not kinds and isinstance(enum, list) and enum and all(isinstance(value, str) for value in enum):
        return {"string"}
    return kinds


class TaggedArguments:
    """Builds the JSON object of a call, one argument after the other.

    Args:
        call: gets the pieces.
        kinds: of all tools.
        line_breaks: the format puts one line break around each value.
    """

    def __init__(self, call: Call, kinds: ArgumentKinds, *, line_breaks: bool = False) -> None:
        self._call = call
        self._kinds = kinds
        self._line_breaks = line_breaks
        self._empty = True

    def read(self, cursor: Cursor, name: str, end: str) -> Steps[bool]:
        """Read the value of argument `name` up to the tag `end`; False when the text ends before."""
        opening = "{" if self._empty else ", "
        self._empty = False
        self._call.arguments(f"{opening}{json.dumps(name, ensure_ascii=False)}: ")
        kinds = self._kinds.of(self._call.name, name)
        if kinds == {"string"}:
            return (yield from self._read_text(cursor, end))
        parts: list[str] = []
        if not (yield from cursor.until((end,), parts.append)):
            return False
        self._call.arguments(as_json("".join(parts), kinds, line_breaks=self._line_breaks))
        return True

    def close(self) -> None:
        """End the object."""
        self._call.arguments("{}" if self._empty else "}")

    def _read_text(self, cursor: Cursor, end: str) -> Steps[bool]:
        self._call.arguments('"')
        first, held = self._line_breaks, ""

        def out(text: str) -> None:
            nonlocal first, held
            if first:
                first, text = False, text.removeprefix("\n")
            text = held + text
            held = "\n" if self._line_breaks and text.endswith("\n") else ""
            self._call.arguments(json.dumps(text.removesuffix(held), ensure_ascii=False)[1:-1])

        if not (yield from cursor.until((end,), out)):
            return False
        self._call.arguments('"')
        return True


def as_json(text: str, kinds: frozenset[str], *, line_breaks: bool = False) -> str:
    """Return a bare value as JSON: as it stands where it is JSON of a type in `kinds` (any if empty), else a string.

    Example:
        >>> as_json("5", frozenset({"integer"})), as_json("5", frozenset({"string", "null"}))
        ('5', '"5"')
    """
    bare = _PYTHON_WORDS.get(text.strip(), text.strip()) if kinds else text.strip()
    value = whole_value(bare)
    if value is not None:
        kind = _JSON_KINDS.get(value[0], _NUMBERS)
        if not kinds or kind & (kinds - {"string"}) or "string" not in kinds:
            return value
    if line_breaks:
        text = text.removeprefix("\n").removesuffix("\n")
    return json.dumps(text, ensure_ascii=False)
