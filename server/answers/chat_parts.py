"""One answer of a chat in its parts: reasoning, content and tool calls, as deltas of a stream and as a whole message.

Not parsing (text/parsers) and not chunks (server/answers/answer.py). Both modes go through the same events, so a whole
message is what the deltas of a stream add up to.
Units: characters; tokens of reasoning, counted by steps.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ...runtime.messages import Delta
from ...text.parsers import CallArguments, CallEnd, CallStart, Event, OutputParser, Reasoning, Text, merged

_SHORT = string.ascii_letters + string.digits


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How the outputs of a request are to be read.

    Attributes:
        make: a parser for one output.
        one_call: calls after the first are left out.
        short_ids: ids of calls are 9 letters and digits, as some templates demand.
    """

    make: Callable[[], OutputParser]
    one_call: bool = False
    short_ids: bool = False


@dataclass
class _Call:
    id: str
    name: str
    arguments: list[str] = field(default_factory=list)
    complete: bool = False


class ChatParts:
    """The parts of one choice.

    Args:
        reading: None takes all text as content.
    """

    def __init__(self, reading: Reading | None) -> None:
        self.reasoning_tokens = 0
        self._reading = reading
        self._parser = reading.make() if reading is not None else None
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[_Call] = []

    def take(self, delta: Delta) -> list[dict[str, Any]]:
        """Take what the engine brought; return it as deltas of a message, in order."""
        if self._parser is None:
            self._content.append(delta.text)
            return [{"content": delta.text}] if delta.text else []
        thought = self._parser.thinking
        events = self._parser.feed(delta.text)
        if thought or self._parser.thinking:
            self.reasoning_tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            events += self._parser.finish()
        deltas: list[dict[str, Any]] = []
        for event in merged(events):
            self._take(event, deltas)
        return deltas

    def message(self) -> dict[str, Any]:
        """Return the whole message. Content is null where there is none but calls or reasoning."""
        content, reasoning = "".join(self._content), "".join(self._reasoning)
        nothing = not content and bool(self._calls or reasoning)
        message: dict[str, Any] = {"role": "assistant", "content": None if nothing else content, "refusal": None}
        if reasoning:
            message |= _reasoning(reasoning)
        if self._calls:
            message["tool_calls"] = [
                _entry(call.id, {"name": call.name, "arguments": "".join(call.arguments)}) for call in self._calls
            ]
        return message

    def finish_reason(self, reason: str | None) -> str | None:
        """Return why the answer ended: `tool_calls` promises that there are calls and all are complete."""
        if reason == "stop" and self._calls and all(call.complete for call in self._calls):
            return "tool_calls"
        return reason

    def _take(self, event: Event, deltas: list[dict[str, Any]]) -> None:
        match event:
            case Text(text):
                self._content.append(text)
                deltas.append({"content": text})
            case Reasoning(text):
                self._reasoning.append(text)
                deltas.append(_reasoning(text))
            case _ if self._reading is not None and self._reading.one_call and event.index:
                return
            case CallStart(index, name):
                self._calls.append(_Call(self._new_id(), name))
                entry = _entry(self._calls[index].id, {"name": name, "arguments": ""})
                deltas.append({"tool_calls": [{"index": index, **entry}]})
            case CallArguments(index, text):
                self._calls[index].arguments.append(text)
                deltas.append({"tool_calls": [{"index": index, "function": {"arguments": text}}]})
            case CallEnd(index, complete):
                self._calls[index].complete = complete

    def _new_id(self) -> str:
        if self._reading is not None and self._reading.short_ids:
            return "".join(secrets.choice(_SHORT) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"


def _entry(call_id: str, function: dict[str, str]) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": function}


def _reasoning(text: str) -> dict[str, str]:
    """Both names: `reasoning_content` as DeepSeek and older clients have it, `reasoning` as vLLM has it now."""
    return {"reasoning_content": text, "reasoning": text}
