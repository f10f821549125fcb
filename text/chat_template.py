"""Renders a conversation into a prompt with the checkpoint's Jinja template, which is untrusted input.

Not a tokenizer and not a parser of answers. Templates run in `text.sandbox`; what they refuse through
`raise_exception` comes out as TemplateError.
Units: messages are dicts with `role` and `content`; output is characters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jinja2

from .sandbox import Sandbox, TemplateError, check_size, metered, one_line

__all__ = ["ChatTemplate", "TemplateError"]


class ChatTemplate:
    """One template, compiled once; rendering is safe from any thread.

    Args:
        source: Jinja source.
        variables: names that the template may use besides `messages`, such as `bos_token`.

    Attributes:
        problem: why the source does not compile, or None.
    """

    def __init__(self, source: str, *, variables: Mapping[str, str] | None = None) -> None:
        self.source = source
        self.problem: str | None = None
        self._variables = dict(variables or {})
        self._template: jinja2.Template | None = None
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
        values: dict[str, Any] = {**self._variables, **kwargs, "tools": tools}
        values |= {"messages": [_plain(m) for m in messages], "add_generation_prompt": add_generation_prompt}
        try:
            with metered():
                return _joined(self._template.generate(values))
        except TemplateError:
            raise
        except jinja2.TemplateError as error:
            raise TemplateError(f"chat template: {one_line(error)}") from None
        except RecursionError:
            raise TemplateError("chat template: it calls itself without end") from None
        except Exception as error:  # a template can raise whatever an operation on its data raises
            raise TemplateError(f"chat template: {type(error).__name__}: {one_line(error)}") from None


def _joined(pieces: Iterable[str]) -> str:
    parts: list[str] = []
    size = 0
    for piece in pieces:
        size += len(piece)
        check_size(size)
        parts.append(piece)
    return "".join(parts)


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """Text parts become one text, a missing content an empty one: templates written for strings work with both."""
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(part["text"] for part in content)
    return {**message, "content": "" if content is None else content}
