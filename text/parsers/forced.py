"""Calls that a request demands (`tool_choice` required or named): the JSON schema that forces them, and their reading.

Not a grammar engine. A forced answer is plain JSON whatever the family's own format: for one named function its
arguments, else a list of {"name", "parameters"}. Nothing comes before it, so no reasoning either.
Units: characters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .cursor import Call, Parser, Steps
from .json_values import read_call, read_value

_ANY_OBJECT: dict[str, Any] = {"type": "object"}


def forced_schema(tools: Sequence[Mapping[str, Any]], name: str | None, *, parallel: bool = True) -> dict[str, Any]:
    """Return the JSON schema of an answer that must call.

    Args:
        tools: OpenAI's list, checked.
        name: the function that must be called; None for any, at least one.
        parallel: with `name` None, several calls are allowed.
    """
    parameters = {tool["function"]["name"]: tool["function"].get("parameters") or _ANY_OBJECT for tool in tools}
    if name is not None:
        return dict(parameters[name])
    calls = []
    for function, schema in parameters.items():
        properties = {"name": {"const": function}, "parameters": _own(schema)}
        calls.append({"type": "object", "properties": properties, "required": ["name", "parameters"],
                      "additionalProperties": False})  # fmt: skip
    schema = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    definitions = {key: value for part in parameters.values() for key, value in _definitions(part).items()}
    if definitions:
        schema["$defs"] = definitions
    return schema if parallel else {**schema, "maxItems": 1}


def _own(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema without its definitions, which stand at the top of the whole."""
    return {key: value for key, value in schema.items() if key != "$defs"}


def _definitions(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    found = schema.get("$defs")
    return found if isinstance(found, Mapping) else {}


class ForcedCalls(Parser):
    """Reads an answer that `forced_schema` has forced; cut off, its last call is incomplete.

    Args:
        name: the function that was named, or None.
    """

    def __init__(self, name: str | None) -> None:
        super().__init__()
        self._name = name

    def _run(self) -> Steps[None]:
        cursor = self._cursor
        call = Call(self)
        if self._name is not None:
            call.named(self._name)
            if (yield from cursor.blanks()) == "{":
                call.end((yield from read_value(cursor, call.arguments)))
        elif (yield from cursor.blanks()) == "[":
            cursor.take(1)
            whole = True
            while whole:
                call = Call(self)
                whole = yield from read_call(cursor, call)
                call.end(whole)
                if not whole or (yield from cursor.blanks()) != ",":
                    break
                cursor.take(1)
        if not self.num_calls:
            yield from cursor.rest(self._text)
