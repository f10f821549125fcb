"""Renders a conversation into a prompt with the checkpoint's Jinja template, which is untrusted input.

Not a tokenizer and not a parser of answers. Templates run in `text.sandbox`; what they refuse through
`raise_exception` comes out as TemplateError.
Units: messages are dicts with `role` and `content`; output is characters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jinja2

from .call_arguments import with_readable_calls
from .one_line import one_line
from .sandbox import Sandbox, TemplateError, check_size, metered

__all__ = ["ChatTemplate", "TemplateError", "check_template_kwargs"]

# The longest template seen has 30 KB; compiling takes time that is not metered.
MAX_SOURCE = 1 << 20
MOST_KWARGS, MAX_KWARGS_SIZE, MAX_KWARGS_DEPTH = 64, 1 << 16, 8
# Names that a request has fields for, and names that steer transformers' function rather than a template.
_OWN_FIELDS = ("messages", "tools", "add_generation_prompt")
# Such a template tells turns of calls by their missing content; all others would print or join None.
_ASKS_FOR_NONE = re.compile(r"content(?:'\]|\"\])?\s+is\s+(?:not\s+)?none\b")
_NO_VARIABLES = ("chat_template", "tokenize", "continue_final_message", "return_assistant_tokens_mask")


class ChatTemplate:
    """One template, compiled once; rendering is safe from any thread.

    Args:
        source: Jinja source.
        variables: names that the template may use besides `messages`, such as `bos_token`.
        problem: a reason, known already, why it cannot be used.

    Attributes:
        problem: why the source does not compile, or None.
    """

    def __init__(self, source: str, *, variables: Mapping[str, str] | None = None, problem: str | None = None) -> None:
        self.source = source
        self.problem = problem
        self._variables = dict(variables or {})
        self._template: jinja2.Template | None = None
        self._missing = None if _ASKS_FOR_NONE.search(source) else ""
        if problem is None and len(source) > MAX_SOURCE:
            self.problem = f"chat template does not compile: it has more than {MAX_SOURCE} characters"
        if self.problem is not None:
            return
        try:
            self._template = Sandbox().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            self.problem = f"chat template does not compile: {error.message} (line {error.lineno})"
        except (ValueError, RecursionError, SyntaxError, MemoryError) as error:
            self.problem = f"chat template does not compile: {one_line(error)}"

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """Return the prompt for a conversation.

        Args:
            messages: dicts with `role`, `content` (text, or a list of text parts) and whatever else the template reads.
            add_generation_prompt: end with the opening of the assistant's turn.
            tools: descriptions of functions that the template may show.
            kwargs: further variables of the template.

        Raises:
            TemplateError: the template is broken or refuses these messages.
        """
        if self._template is None:
            raise TemplateError(self.problem or "chat template does not compile")
        values: dict[str, Any] = {"documents": None, **self._variables, **kwargs}
        values["add_generation_prompt"] = add_generation_prompt
        try:
            with metered():
                return self._filled(values, messages, tools)
        except TemplateError:
            raise
        except jinja2.TemplateError as error:
            raise TemplateError(f"chat template: {one_line(error)}") from None
        except RecursionError:
            raise TemplateError("chat template: it calls itself without end") from None
        except Exception as error:  # a template can raise whatever an operation on its data raises
            raise TemplateError(f"chat template: {type(error).__name__}: {one_line(error)}") from None

    def _filled(
        self, values: dict[str, Any], messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
    ) -> str:
        """Render; where a template fails on what OpenAI lets clients leave out, with the gaps filled."""
        assert self._template is not None
        failed: Exception | None = None
        last: Any = None
        for missing, shown in ((self._missing, tools), ("", tools), ("", _described(tools) or tools)):
            given = {"messages": [_plain(message, missing) for message in messages], "tools": shown}
            if given == last:
                continue
            try:
                return _joined(self._template.generate({**values, **given}))
            except (TypeError, AttributeError, jinja2.UndefinedError) as error:
                failed, last = failed or error, given
        assert failed is not None
        raise failed


def check_template_kwargs(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables that a request hands to the template, or refuse them: plain JSON of a modest size.

    Raises:
        ValueError: one line that begins with the name of the field.
    """
    field = "chat_template_kwargs"
    if not isinstance(kwargs, Mapping):
        raise ValueError(f"{field} must be an object of names and values, got {type(kwargs).__name__}")
    if len(kwargs) > MOST_KWARGS:
        raise ValueError(f"{field} holds {len(kwargs)} names; send at most {MOST_KWARGS}")
    for name in kwargs:
        if not isinstance(name, str) or not name.isidentifier() or name.startswith("_"):
            raise ValueError(f"{field} holds the name {str(name)[:40]!r}, which no template can read; rename it")
        if name in _OWN_FIELDS:
            raise ValueError(f"{field}.{name} is not allowed; use the field of the request")
        if name in _NO_VARIABLES:
            raise ValueError(f"{field}.{name} is not a variable of a template; leave it out")
    size = _json_size(kwargs, 0)
    if size > MAX_KWARGS_SIZE:
        raise ValueError(f"{field} is larger than {MAX_KWARGS_SIZE} characters; send less")
    return dict(kwargs)


def _json_size(value: Any, depth: int) -> int:
    """Count the characters of plain JSON, roughly; refuse what is none, and what is nested without end."""
    if depth > MAX_KWARGS_DEPTH:
        raise ValueError(f"chat_template_kwargs is nested more than {MAX_KWARGS_DEPTH} levels deep; flatten it")
    if value is None or type(value) in (bool, float):
        return 4
    if type(value) is int:
        return value.bit_length() // 3 + 1
    if type(value) is str:
        return len(value) + 2
    if isinstance(value, (list, tuple)):
        return 2 + sum(_json_size(item, depth + 1) for item in value)
    if isinstance(value, Mapping) and all(type(key) is str for key in value):
        return 2 + sum(len(key) + 4 + _json_size(item, depth + 1) for key, item in value.items())
    raise ValueError(f"chat_template_kwargs holds a {type(value).__name__}; send plain JSON")


def _joined(pieces: Iterable[str]) -> str:
    parts: list[str] = []
    size = 0
    for piece in pieces:
        size += len(piece)
        check_size(size)
        parts.append(piece)
    return "".join(parts)


def _plain(message: Mapping[str, Any], missing: str | None) -> dict[str, Any]:
    """Text parts become one text, a missing content becomes `missing`, JSON arguments of calls a mapping.

    So templates work whichever of them they were written for.
    """
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(part["text"] for part in content)
    return with_readable_calls({**message, "content": missing if content is None else content})


def _described(tools: Sequence[Mapping[str, Any]] | None) -> list[Mapping[str, Any]]:
    """Return tools in which every function has a description, if only an empty one."""
    found = []
    for tool in tools or ():
        function = tool.get("function")
        if isinstance(function, Mapping):
            tool = {**tool, "function": {**function, "description": function.get("description") or ""}}
        found.append(tool)
    return found
