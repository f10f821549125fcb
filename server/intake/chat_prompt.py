"""The text of a conversation by the model's template, for chats and for /tokenize.

Not the template's own rules (text/chat_template.py) and not tokenising (server/intake/token_ids.py).
Units: characters.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from ...text import ChatTemplate, TemplateError, check_template_kwargs
from ..errors import invalid
from ..protocol.field_table import as_json
from ..protocol.requests import OpenTurn
from ..state import ServerState

EFFORT = "reasoning_effort"


def template_of(state: ServerState) -> ChatTemplate:
    """Return the template in use, or refuse."""
    if state.tokenizer is None:
        raise invalid("the server runs without a tokenizer (--skip-tokenizer-init); use /v1/completions with token ids")
    if state.template is None:
        raise invalid(
            "this model has no chat template; start the server with --chat-template FILE, or use /v1/completions",
            code="no_chat_template",
        )
    return state.template


def template_options(template: ChatTemplate, kwargs: Mapping[str, Any] | None, effort: str | None) -> dict[str, Any]:
    """Return the further variables of the template. `effort` has no effect with one that does not read it: a 400."""
    try:
        options = check_template_kwargs(kwargs or {})
    except ValueError as error:
        raise invalid(str(error), "chat_template_kwargs") from None
    if effort is None:
        return options
    if not reads(template, EFFORT):
        raise invalid(
            f"{EFFORT}={as_json(effort)} has no effect: the model's chat template does not read it; leave it out",
            EFFORT,
        )
    if options.get(EFFORT, effort) != effort:
        raise invalid(f"{EFFORT} and chat_template_kwargs.{EFFORT} differ; send one of them", EFFORT)
    return {**options, EFFORT: effort}


def reads(template: ChatTemplate, name: str) -> bool:
    """Return True when the template's source holds `name` as a word."""
    return re.search(rf"\b{name}\b", template.source) is not None


def render(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    request: OpenTurn,
    options: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]] = (),
) -> str:
    """Return the prompt of a conversation.

    Args:
        template: of the model.
        messages: as `ChatMessage.check` gives them.
        request: says whether the assistant's turn is opened, or the last one left open.
        options: see `template_options`.
        tools: for the template to show.

    Raises:
        ApiError: 400, the template is broken or refuses these messages.
    """
    turns = [dict(message) for message in messages]
    if not reads(template, "developer"):
        for turn in turns:  # OpenAI's newer name; a template that only knows the older one would leave it out
            turn["role"] = "system" if turn["role"] == "developer" else turn["role"]
    keep_open = bool(request.continue_final_message)
    add_prompt = request.add_generation_prompt is not False and not keep_open
    mark = f"open{secrets.token_hex(8)}"
    if keep_open:
        turns[-1]["content"] = _marked(turns[-1]["content"] or "", mark)
    try:
        text = template.render(turns, add_generation_prompt=add_prompt, tools=list(tools) or None, **options)
    except TemplateError as error:
        raise invalid(str(error), "messages", "chat_template_error") from None
    if not keep_open:
        return text
    if text.count(mark) != 1:
        field = "continue_final_message"
        raise invalid(f"{field} is not possible: the model's chat template does not show the last message as it is; "
                      "leave it out", field)  # fmt: skip
    return text[: text.index(mark)]


def _marked(content: Any, mark: str) -> Any:
    """Return the content with `mark` where it ends."""
    if isinstance(content, str):
        return content + mark
    return [*content[:-1], {"type": "text", "text": content[-1]["text"] + mark}] if content else mark
