"""The fields of a chat that have to do with tools, checked: `tools`, `tool_choice`, and the calls of earlier turns.

Not the reading of answers (text/parsers) and not their shape (server/answers/chat_parts.py). What a tool's schema says
is not checked here: a template shows it and a parser looks up types in it.
Units: names of up to 64 characters as OpenAI has them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...text.call_arguments import call_arguments
from ..errors import invalid
from .field_table import as_json

NAME = re.compile(r"[\w.\-:/]{1,64}")


@dataclass(frozen=True, kw_only=True)
class ToolChoice:
    """What `tool_choice` asks.

    Attributes:
        mode: none, auto or required.
        name: with required, the function that must be called; None leaves it to the model.
    """

    mode: str
    name: str | None = None


def checked_tools(tools: Sequence[Any] | None) -> list[dict[str, Any]]:
    """Return the tools of a request as sent. How many there may be is checked by its body."""
    if not tools:
        return []
    for position, tool in enumerate(tools):
        where = f"tools.{position}"
        if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
            raise invalid(f"{where} is no tool; this server reads objects of type 'function' with a 'function'", where)
        function = tool["function"]
        name = function.get("name")
        if not isinstance(name, str) or not NAME.fullmatch(name):
            fix = "use 1 to 64 letters, digits or any of _ - . : /"
            raise invalid(f"{where}.function.name={as_json(name)} is not allowed; {fix}", f"{where}.function.name")
        for field, kind, called in (("description", str, "text"), ("parameters", dict, "a JSON schema, an object")):
            if function.get(field) is not None and not isinstance(function[field], kind):
                raise invalid(f"{where}.function.{field} must be {called}", f"{where}.function.{field}")
        kind = (function.get("parameters") or {}).get("type", "object")
        if kind != "object":
            place = f"{where}.function.parameters.type"
            raise invalid(f"{place}={as_json(kind)} is not allowed; arguments are an object: use object", place)
    return list(tools)


def checked_choice(choice: Any, tools: Sequence[Mapping[str, Any]]) -> ToolChoice:
    """Return what `tool_choice` asks for, `auto` where there are tools and nothing is said."""
    if choice is None or choice == "auto":
        return ToolChoice(mode="auto" if tools else "none")
    if choice == "none":
        return ToolChoice(mode="none")
    if isinstance(choice, str) and choice != "required":
        raise invalid(
            f"tool_choice={as_json(choice)} is not allowed; use none, auto, required or "
            '{"type": "function", "function": {"name": ...}}', "tool_choice",
        )  # fmt: skip
    if not tools:
        raise invalid(f"tool_choice={as_json(choice)} needs tools; send some or leave it out", "tool_choice")
    if choice == "required":
        return ToolChoice(mode="required")
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if name not in [tool["function"]["name"] for tool in tools]:
        raise invalid(f"tool_choice={as_json(choice)} names no function of tools; name one of them", "tool_choice")
    return ToolChoice(mode="required", name=name)


def checked_calls(calls: Sequence[Any], where: str) -> list[dict[str, Any]]:
    """Return the calls of an earlier turn, their arguments as templates read them."""
    return [_checked_call(call, f"{where}.{position}") for position, call in enumerate(calls)]


def _checked_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type", "function") != "function":
        raise invalid(f"{where} is no call; send an object of type 'function' with a 'function'", where)
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise invalid(f"{where}.function.name is missing; send the name that was called", f"{where}.function.name")
    if not isinstance(call.get("id", ""), str):
        raise invalid(f"{where}.id must be text", f"{where}.id")
    try:
        arguments = call_arguments(function.get("arguments", ""))
    except ValueError as error:
        place = f"{where}.function.arguments"
        raise invalid(f"{place} {error}; send the JSON text of the call, or leave the call out", place) from None
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}
