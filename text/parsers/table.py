"""The table of formats by name, the names that other servers use for them, and which of them a chat template speaks.

Not parsing. A model is told apart by its chat template: what it was taught to write is what its template writes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from .arguments import ArgumentKinds
from .cursor import Parser
from .forced import ForcedCalls
from .harmony import HARMONY_MARKS, Harmony
from .output import OutputParser
from .reasoning import MarkedReasoning
from .tools_json import DEEPSEEK, KIMI, BareJson, Mistral, SectionedCalls, TaggedJson
from .tools_pythonic import Pythonic
from .tools_tagged import Glm, MiniMax, QwenCoder

AUTO, NONE = "auto", "none"
HARMONY = "gpt_oss"


@dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """How a family writes calls.

    Attributes:
        make: a parser for one output, given the types of arguments.
        marks: a template that writes all of these writes this format.
        or_marks: so does one that writes all of these.
        opening: what stands before the first call, where no answer can begin so; empty where that may be.
        tokens: marks that may be special tokens, which are then kept as text.
        short_ids: ids of calls are 9 letters and digits, as the template demands.
    """

    make: Callable[[ArgumentKinds], Parser]
    marks: tuple[str, ...]
    tokens: tuple[str, ...]
    or_marks: tuple[str, ...] = ()
    opening: str = ""
    short_ids: bool = False

    def is_written_by(self, template: str) -> bool:
        """Return whether the source of a chat template shows this format."""
        return any(marks and all(mark in template for mark in marks) for marks in (self.marks, self.or_marks))


@dataclass(frozen=True, kw_only=True)
class ReasoningFormat:
    """How a family marks its thinking.

    Attributes:
        start, end: the marks.
        always: the output begins within the thinking unless the prompt has closed it.
    """

    start: str
    end: str
    always: bool = False

    def opened(self, prompt: str) -> bool:
        """Return whether an output after `prompt` begins within the thinking."""
        tail = prompt.rstrip()
        return tail.endswith(self.start) or (self.always and not tail.endswith(self.end))


_TAGS = ("<tool_call>", "</tool_call>")
# In the order in which a template is held against them: the first whose marks it has is its format.
TOOL_FORMATS: dict[str, ToolFormat] = {
    HARMONY: ToolFormat(
        make=lambda _: Harmony(reasoning=False), marks=("<|channel|>", "<|call|>"), tokens=HARMONY_MARKS
    ),
    "deepseek_v3": ToolFormat(
        make=lambda _: SectionedCalls(DEEPSEEK), marks=(DEEPSEEK.begin, DEEPSEEK.separator, "```json"),
        tokens=DEEPSEEK.all, opening=DEEPSEEK.begin,
    ),
    "deepseek_v31": ToolFormat(
        make=lambda _: SectionedCalls(DEEPSEEK), marks=(DEEPSEEK.begin, DEEPSEEK.separator), tokens=DEEPSEEK.all,
        opening=DEEPSEEK.begin,
    ),
    "kimi_k2": ToolFormat(
        make=lambda _: SectionedCalls(KIMI), marks=(KIMI.begin,), tokens=KIMI.all, opening=KIMI.begin
    ),
    "minimax_m2": ToolFormat(
        make=MiniMax, marks=("minimax:tool_call", "<invoke name="), tokens=(*MiniMax.starts, MiniMax.end),
        opening=MiniMax.starts[0],
    ),
    "glm45": ToolFormat(
        make=Glm, marks=("<tool_call>", "<arg_key>"),
        tokens=(*_TAGS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"), opening=_TAGS[0],
    ),
    "qwen3_coder": ToolFormat(
        make=QwenCoder, marks=("<tool_call>", "<function=", "<parameter="), tokens=_TAGS, opening=_TAGS[0]
    ),
    "mistral": ToolFormat(
        make=lambda _: Mistral(), marks=("[TOOL_CALLS]",), tokens=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        opening="[TOOL_CALLS]", short_ids=True,
    ),
    "hunyuan": ToolFormat(
        make=lambda _: TaggedJson("<tool_calls>", "</tool_calls>"), marks=("<tool_calls>",),
        tokens=("<tool_calls>", "</tool_calls>"), opening="<tool_calls>",
    ),
    # Its key as well, since other formats use the same tag; the quote after it may be escaped.
    "hermes": ToolFormat(
        make=lambda _: TaggedJson(), marks=("<tool_call>", '"arguments'), tokens=_TAGS, opening=_TAGS[0]
    ),
    "granite": ToolFormat(
        make=lambda _: TaggedJson("<|tool_call|>", "<|end_of_text|>"), marks=("<|tool_call|>",),
        tokens=("<|tool_call|>",), opening="<|tool_call|>",
    ),
    "llama4_pythonic": ToolFormat(
        make=lambda _: Pythonic(), marks=("<|python_start|>",), tokens=("<|python_start|>", "<|python_end|>")
    ),
    "llama3_json": ToolFormat(
        make=lambda _: BareJson(), marks=("<|python_tag|>", '"parameters": '), tokens=("<|python_tag|>",),
        or_marks=("ipython", '"parameters": '),
    ),
}  # fmt: skip
TOOL_ALIASES = {
    "deepseekv3": "deepseek_v3", "deepseekv31": "deepseek_v31", "glm": "glm45", "glm47": "glm45", "gpt-oss": HARMONY,
    "harmony": HARMONY, "hunyuan_a13b": "hunyuan", "llama3": "llama3_json", "llama4_json": "llama3_json",
    "openai": HARMONY, "openai_gptoss": HARMONY, "pythonic": "llama4_pythonic", "qwen": "hermes", "qwen25": "hermes",
    "qwen3": "hermes", "qwen3_xml": "qwen3_coder",
}  # fmt: skip
_THINK = ("<think>", "</think>")
REASONING_FORMATS: dict[str, ReasoningFormat] = {
    HARMONY: ReasoningFormat(start="<|channel|>", end="<|end|>"),
    "mistral": ReasoningFormat(start="[THINK]", end="[/THINK]"),
    "qwen3": ReasoningFormat(start=_THINK[0], end=_THINK[1]),
    "deepseek_r1": ReasoningFormat(start=_THINK[0], end=_THINK[1], always=True),
}
REASONING_ALIASES = {
    "deepseek-r1": "deepseek_r1", "deepseek-v3": "qwen3", "deepseek_v3": "qwen3", "ernie45": "qwen3", "glm45": "qwen3",
    "gpt-oss": HARMONY, "harmony": HARMONY, "hunyuan_a13b": "qwen3", "kimi_k2": "qwen3", "minimax_m2": "qwen3",
    "openai": HARMONY, "openai_gptoss": HARMONY, "qwen3-thinking": "deepseek_r1",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class OutputFormat:
    """The formats of one model.

    Attributes:
        tools: a name of TOOL_FORMATS, or None.
        reasoning: a name of REASONING_FORMATS, or None.
    """

    tools: str | None = None
    reasoning: str | None = None

    def needs_special_tokens(self, special: Collection[str], *, tools: bool) -> bool:
        """Return whether outputs must keep special tokens to be read.

        Args:
            special: the special tokens of the model, as text.
            tools: calls are looked for.
        """
        marks: tuple[str, ...] = TOOL_FORMATS[self.tools].tokens if self.tools is not None and tools else ()
        if self.reasoning == HARMONY:
            marks += HARMONY_MARKS
        elif self.reasoning is not None:
            marks += (REASONING_FORMATS[self.reasoning].start, REASONING_FORMATS[self.reasoning].end)
        return any(mark in special for mark in marks)

    @property
    def call_opening(self) -> str:
        """What stands before the first call and before no answer; empty where there is no such mark."""
        return TOOL_FORMATS[self.tools].opening if self.tools is not None else ""

    @property
    def short_ids(self) -> bool:
        """True when ids of calls must be 9 letters and digits."""
        return self.tools is not None and TOOL_FORMATS[self.tools].short_ids

    def parser(self, *, prompt: str = "", tools: Sequence[Any] = ()) -> OutputParser | None:
        """Return a parser for one output; None when there is nothing to look for.

        Args:
            prompt: as the template wrote it; its end tells whether the output begins within the thinking.
            tools: those offered in the request; without any no calls are looked for.
        """
        calls = TOOL_FORMATS[self.tools] if self.tools is not None and tools else None
        if self.tools == self.reasoning == HARMONY:
            return OutputParser(tools=Harmony(tools=calls is not None))
        parser = calls.make(ArgumentKinds(tools)) if calls is not None else None
        if self.reasoning is None:
            return OutputParser(tools=parser) if parser is not None else None
        if self.reasoning == HARMONY:
            return OutputParser(reasoning=Harmony(tools=False), tools=parser)
        marks = REASONING_FORMATS[self.reasoning]
        thinking = MarkedReasoning(marks.start, marks.end, opened=marks.opened(prompt))
        return OutputParser(reasoning=thinking, tools=parser)


def forced_parser(name: str | None) -> OutputParser:
    """Return a parser for an output that had to call: the function `name`, or any."""
    return OutputParser(tools=ForcedCalls(name))


def output_format(tools: str, reasoning: str, template: str | None) -> OutputFormat:
    """Return the formats that names mean: a format, `none`, or `auto`, what the chat template writes.

    Raises:
        ValueError: there is no format of that name; one line.
    """
    source = template or ""
    if tools == AUTO:
        chosen = next((name for name, form in TOOL_FORMATS.items() if form.is_written_by(source)), None)
    else:
        chosen = _named("tool_call_parser", tools, TOOL_FORMATS, TOOL_ALIASES)
    if reasoning != AUTO:
        return OutputFormat(
            tools=chosen, reasoning=_named("reasoning_parser", reasoning, REASONING_FORMATS, REASONING_ALIASES)
        )
    marks = ((HARMONY, "<|channel|>"), ("mistral", "[/THINK]"), ("mistral", "[THINK]"), ("qwen3", "</think>"))
    return OutputFormat(tools=chosen, reasoning=next((name for name, mark in marks if mark in source), None))


def _named(field: str, name: str, formats: dict[str, Any], aliases: dict[str, str]) -> str | None:
    if name == NONE:
        return None
    name = aliases.get(name, name)
    if name not in formats:
        raise ValueError(f"{field}={name!r} is not a format; use {', '.join((AUTO, NONE, *formats))}")
    return name
