"""Arguments of an earlier call as a template reads them: a mapping, and the JSON text itself where text is wanted.

Not a parser of answers (text/parsers). Clients send arguments as JSON text. Templates that write them with `tojson` or
argument by argument need a mapping, templates that join them to text need the text; this is both.
Units: characters.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .sandbox import check_size


class CallArguments(dict[str, Any]):
    """A mapping that joins and prints as the JSON text it came from.

    Args:
        values: the arguments.
        text: as the client wrote them.
    """

    def __init__(self, values: Mapping[str, Any], text: str) -> None:
        super().__init__(values)
        self._source = text

    def __str__(self) -> str:
        return self._source

    def __add__(self, other: object) -> Any:
        return self._joined(self._source, other)

    def __radd__(self, other: object) -> Any:
        return self._joined(other, self._source)

    def _joined(self, left: object, right: object) -> Any:
        if not isinstance(left, str) or not isinstance(right, str):
            return NotImplemented
        check_size(len(left) + len(right))
        return left + right


def call_arguments(value: Any) -> CallArguments:
    """Return the arguments of a call: JSON text of an object, an object, or empty for none.

    Raises:
        ValueError: it is something else; what is wrong, without a place.
    """
    if isinstance(value, CallArguments):
        return value
    if isinstance(value, Mapping):
        return CallArguments(value, json.dumps(value, ensure_ascii=False))
    if not isinstance(value, str):
        raise ValueError(f"must be JSON text of an object, got {type(value).__name__}")
    if not value.strip():
        return CallArguments({}, "{}")
    try:
        values = json.loads(value, parse_constant=_refused)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON ({str(error)[:120]})") from None
    if not isinstance(values, dict):
        raise ValueError("is JSON, but not an object")
    return CallArguments(values, value)


def with_readable_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message whose calls have arguments that a template can read; what is no call stays as it is."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return dict(message)
    return {**message, "tool_calls": [_readable(call) for call in calls]}


def _readable(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or "arguments" not in function:
        return call
    try:
        return {**call, "function": {**function, "arguments": call_arguments(function["arguments"])}}
    except ValueError:
        return call  # a template that prints it will do


def _refused(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")
