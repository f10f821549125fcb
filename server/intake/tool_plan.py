"""What a chat's tools and the model's formats mean for its prompt, its sampling and the reading of its answer.

Not the check of fields (server/protocol/tool_fields.py) and not parsing (text/parsers). Tools that cannot be called are
refused rather than shown for nothing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import msgspec

from ...runtime.params import SamplingParams, StructuredSpec
from ...text.parsers import OutputFormat, OutputParser, forced_parser, forced_schema
from ..answers.chat_parts import Reading
from ..errors import invalid
from ..protocol.requests import ChatRequest
from ..protocol.tool_fields import ToolChoice
from ..state import ServerState


@dataclass(frozen=True, kw_only=True)
class ToolPlan:
    """How one chat deals with tools and reasoning.

    Attributes:
        tools: what the template shows; with `tool_choice` none nothing.
        choice: what `tool_choice` asks.
        parallel: several calls are welcome.
        formats: of the model.
        special_tokens: of the model, as text.
    """

    tools: list[dict[str, Any]]
    choice: ToolChoice
    parallel: bool
    formats: OutputFormat
    special_tokens: frozenset[str]

    @property
    def forced(self) -> bool:
        """True when the answer must be a call."""
        return self.choice.mode == "required"

    def sampling(self, params: SamplingParams) -> SamplingParams:
        """Return `params` with what the reading of the answer needs."""
        if self.forced:
            schema = forced_schema(self.tools, self.choice.name, parallel=self.parallel)
            return msgspec.structs.replace(params, structured=StructuredSpec(kind="json", text=json.dumps(schema)))
        if self.formats.needs_special_tokens(self.special_tokens, tools=bool(self.tools)):
            return msgspec.structs.replace(params, skip_special_tokens=False)
        return params

    def reading(self, prompt: str) -> Reading | None:
        """Return how the outputs after `prompt`, as the template wrote it, are read."""

        def make() -> OutputParser:
            if self.forced:
                return forced_parser(self.choice.name)
            return self.formats.parser(prompt=prompt[-64:], tools=self.tools) or OutputParser()

        if not self.forced and self.formats.parser(tools=self.tools) is None:
            return None
        return Reading(make=make, one_call=not self.parallel, short_ids=self.formats.short_ids)


def tool_plan(state: ServerState, request: ChatRequest) -> ToolPlan:
    """Return the plan of a chat, or refuse tools that the model has no format to call."""
    formats = state.output_format
    tools, choice = request.asked_tools
    if choice.mode == "none":
        tools = []
    if choice.mode == "auto" and formats.tools is None:
        raise invalid(
            "tools cannot be called: the model's chat template writes calls in no format that is known; start the "
            "server with --tool-call-parser NAME, or send tool_choice none", "tools",
        )  # fmt: skip
    return ToolPlan(
        tools=tools,
        choice=choice,
        parallel=request.parallel_tool_calls is not False,
        formats=formats,
        special_tokens=state.special_tokens,
    )
