"""One turn of a chat as clients send it, checked and turned into what templates read.

Not the request around it (server/protocol/requests.py) and not the template (text/chat_template.py).
Units: text, or a list of text parts.
"""

from __future__ import annotations

from typing import Any, Literal

from ..errors import invalid
from .field_table import as_json, check_inner
from .strict import Strict, described
from .tool_fields import checked_calls


class ChatMessage(Strict):
    """One turn; `content` is text or a list of text parts."""

    role: Literal["system", "developer", "user", "assistant", "tool"] = described(
        "who speaks; `developer` reaches a template that does not know it as `system`", ...
    )
    content: Any = described("text, or a list of text parts; may be null or missing for `assistant`",
                             types=["string", "array", "null"])  # fmt: skip
    name: str | None = described("of the speaker, for templates that show it")
    tool_calls: list[Any] | None = described("calls of an earlier `assistant` turn")
    tool_call_id: str | None = described("with role `tool`: the call that this answers")
    reasoning_content: str | None = described("of an earlier `assistant` turn, for templates that show it")
    reasoning: str | None = described("another name of `reasoning_content`")

    def check(self, position: int) -> dict[str, Any]:
        """Return the message as a template reads it; raise ApiError for what is not text."""
        where = f"messages.{position}."
        extra = {k: v for k, v in (self.model_extra or {}).items() if v not in (None, [])}
        check_inner(extra, type(self).model_fields, where)
        content = self.content
        if content is None and self.role == "assistant":
            content = None if self.tool_calls else ""  # so clients send back a turn that held no text
        elif isinstance(content, list):
            content = [_text_part(part, f"{where}content.{i}") for i, part in enumerate(content)]
        elif not isinstance(content, str):
            got = "nothing" if content is None else type(content).__name__
            raise invalid(f"{where}content must be text or a list of text parts, got {got}", f"{where}content")
        message = {"role": self.role, "content": content, **self._of_tools(where)}
        return message if self.name is None else {**message, "name": self.name}

    def _of_tools(self, where: str) -> dict[str, Any]:
        """Return calls, their results and reasoning of earlier turns as templates read them."""
        found: dict[str, Any] = {}
        if self.role != "tool" and self.tool_call_id is not None:
            raise invalid(f"{where}tool_call_id is only for role tool; leave it out", f"{where}tool_call_id")
        if self.role == "tool":
            if not self.tool_call_id:
                raise invalid(f"{where}tool_call_id is missing; send the id of the call", f"{where}tool_call_id")
            found["tool_call_id"] = self.tool_call_id
        if self.tool_calls and self.role != "assistant":
            raise invalid(f"{where}tool_calls is only for role assistant; leave it out", f"{where}tool_calls")
        if self.tool_calls:
            found["tool_calls"] = checked_calls(self.tool_calls, f"{where}tool_calls")
        reasoning = self.reasoning_content or self.reasoning
        if reasoning and self.role == "assistant":
            found |= {"reasoning_content": reasoning, "reasoning": reasoning}
            if not (self.tool_calls and self.content):  # its name with gpt-oss, which refuses both at once
                found["thinking"] = reasoning
        return found


def _text_part(part: Any, where: str) -> dict[str, str]:
    if not isinstance(part, dict) or part.get("type") != "text":
        kind = f"of type {as_json(part.get('type'))}" if isinstance(part, dict) else as_json(part)
        raise invalid(f"{where} is {kind}; this server reads only parts of the form type 'text' with a 'text'", where)
    text = part.get("text")
    if not isinstance(text, str):
        raise invalid(f"{where}.text must be a string, got {as_json(text)}", f"{where}.text")
    return {"type": "text", "text": text}
