"""Parsers on what templates of the families' formats write, whole and cut at every place."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moewe.text.parsers import (
    CallArguments,
    CallEnd,
    CallStart,
    Event,
    OutputFormat,
    OutputParser,
    Reasoning,
    Text,
    merged,
    output_format,
)
from tests.support.tool_templates import ARGUMENTS, TEMPLATES, TOOLS, WITHOUT_REASONING, assistant, output_of

TWO = [("find_birds", ARGUMENTS), ("now", {})]
Calls = list[tuple[str, Any]]


def parser_of(name: str, prompt: str = "") -> OutputParser:
    parser = output_format("auto", "auto", TEMPLATES[name]).parser(prompt=prompt, tools=TOOLS)
    assert parser is not None
    return parser


def events_of(parser: OutputParser, pieces: Sequence[str]) -> list[Event]:
    found = [event for piece in pieces for event in parser.feed(piece)]
    return merged(found + parser.finish())


def summary(events: Sequence[Event]) -> tuple[str, str, Calls, list[bool]]:
    """Return reasoning, text, calls with decoded arguments, and which are complete."""
    names: list[str] = []
    arguments: dict[int, str] = {}
    complete: list[bool] = []
    for event in events:
        match event:
            case CallStart(index, name):
                assert index == len(names)
                names.append(name)
                arguments[index] = ""
            case CallArguments(index, text):
                assert index == len(names) - 1
                arguments[index] += text
            case CallEnd(index, whole):
                assert index == len(complete) == len(names) - 1
                complete.append(whole)
    assert len(complete) == len(names)
    calls: Calls = []
    for index, name in enumerate(names):
        calls.append((name, json.loads(arguments[index]) if complete[index] else arguments[index]))
    text = "".join(event.text for event in events if isinstance(event, Text))
    reasoning = "".join(event.text for event in events if isinstance(event, Reasoning))
    return reasoning, text, calls, complete


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_are_told_apart(name: str) -> None:
    found = output_format("auto", "auto", TEMPLATES[name])
    assert found.tools == {"mistral_named": "mistral"}.get(name, name)
    reasoning = {"gpt_oss": "gpt_oss", "mistral": "mistral", "mistral_named": "mistral"}.get(name, "qwen3")
    assert found.reasoning == (None if name in WITHOUT_REASONING else reasoning)


@pytest.mark.parametrize("reasoning", [None, "They ask for birds.\n\nSo I look."])
@pytest.mark.parametrize("content", ["", "Let me look."])
@pytest.mark.parametrize("calls", [[], TWO[:1], TWO, [*TWO, TWO[0]]], ids=["none", "one", "two", "three"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_what_a_template_writes_is_read_back(name: str, calls: Calls, content: str, reasoning: str | None) -> None:
    if reasoning is not None and name in WITHOUT_REASONING:
        reasoning = None
    output = output_of(TEMPLATES[name], assistant(calls, content, reasoning))
    expected = (reasoning or "", content, calls, [True] * len(calls))
    whole = events_of(parser_of(name), [output])
    assert summary(whole) == expected
    assert events_of(parser_of(name), list(output)) == whole
    for end in ("<|call|>", "<|end|>"):  # the model's end token, which is no text
        assert summary(events_of(parser_of(name), [output.removesuffix(end)])) == expected


@pytest.mark.parametrize("name", TEMPLATES)
def test_cut_in_two_at_every_place_it_reads_the_same(name: str) -> None:
    reasoning = None if name in WITHOUT_REASONING else "Hm."
    output = output_of(TEMPLATES[name], assistant(TWO, "Well,\nlet me see.", reasoning))
    whole = events_of(parser_of(name), [output])
    for cut in range(len(output) + 1):
        parser = parser_of(name)
        first = parser.feed(output[:cut])
        _, text, *_ = summary([event for event in first if isinstance(event, (Text, Reasoning))])
        assert "Well,\nlet me see.".startswith(text), "half a mark went out"
        assert merged([*first, *parser.feed(output[cut:]), *parser.finish()]) == whole


@pytest.mark.parametrize("name", TEMPLATES)
def test_cut_off_at_every_place_it_neither_fails_nor_repeats(name: str) -> None:
    output = output_of(TEMPLATES[name], assistant(TWO, "Well."))
    arguments = json.dumps(ARGUMENTS, ensure_ascii=False)
    for end in range(len(output)):
        _, text, calls, complete = summary(events_of(parser_of(name), [output[:end]]))
        assert len(text) <= end and [name for name, _ in calls] == [name for name, _ in TWO][: len(calls)]
        assert all(complete[:-1])
        for (_, found), (_, wanted), whole in zip(calls, TWO, complete):
            if whole:
                assert found == wanted
            elif wanted:
                assert arguments.startswith(found.rstrip()) or found.startswith("{")


@pytest.mark.parametrize("name", TEMPLATES)
def test_text_without_calls_comes_out_as_it_is(name: str) -> None:
    for text in (
        "  \n Just < text [with] {marks} <too\n\n",
        "",
        "\n",
        "<tool",
        "[1, 2, 3]",
        '{"name": "x"}',
        "```json",
    ):
        assert summary(events_of(parser_of(name), list(text))) == ("", text, [], [])


ALPHABET = [
    "<tool_call>", "</tool_call>", '{"name": "now", "arguments": ', '{"a": "}"}', "}", "{", '"', "\\",
    "\\u00e9", "\n", " ", "text", "<function=", "now", ">", "<parameter=", "where", "</parameter>",
    "</function>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "[TOOL_CALLS]", "[ARGS]",
    "[CALL_ID]", "[", "]", ",", ";", "(", ")", "=", "'", "5", "-", "<|python_tag|>", "<|python_start|>",
    "<|python_end|>", '"parameters": {}', "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "function", "```json\n",
    "<|channel|>", "analysis", "commentary to=functions.now ", "<|message|>", "<|end|>", "<|call|>",
    "<|start|>", "<think>", "</think>", "[THINK]", "[/THINK]", "<minimax:tool_call>", "</minimax:tool_call>",
    '<invoke name="', '">', '<parameter name="', "</invoke>", "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>", "functions.now:0", "\x00", "é", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
    "<|tool_calls_section_end|>", "<tool_calls>", "</tool_calls>",
]  # fmt: skip


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_no_output_breaks_a_parser_and_no_cut_changes_what_it_reads(name: str, data: st.DataObject) -> None:
    pieces = data.draw(st.lists(st.sampled_from(ALPHABET) | st.text(max_size=3), max_size=25))
    text = "".join(pieces)
    opened = data.draw(st.sampled_from(["", "<think>\n", "<think>\n\n</think>\n\n", "[THINK]"]))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    whole = events_of(parser_of(name, opened), [text])
    summary(whole)  # complete arguments are JSON
    parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)])]
    assert events_of(parser_of(name, opened), parts) == whole
    assert events_of(parser_of(name, opened), list(text)) == whole


def test_llama_3_2_writes_calls_without_a_tag() -> None:
    turn = "{{ '<|start_header_id|>ipython' }}{{ '{\"name\": \"' }}{{ '\"parameters\": ' }}"
    found = output_format("auto", "auto", turn)
    assert found == OutputFormat(tools="llama3_json")
    parser = found.parser(tools=TOOLS)
    assert parser is not None
    assert summary(events_of(parser, list('{"name": "now", "parameters": {}}'))) == ("", "", [("now", {})], [True])
    assert output_format("auto", "auto", "{{ '<|start_header_id|>ipython' }}").tools is None


@pytest.mark.parametrize(
    ("turn", "tools"),
    [
        ("in <tool_call></tool_call> tags:\n<tool_calls>[{'name': ..., \"arguments\": ...}]</tool_calls>", "hunyuan"),
        ('{{ "<tool_call>\\n{\\"name\\": \\"x\\", \\"arguments\\": 1}" }}', "hermes"),
        ("]<]minimax[>[<tool_call><invoke name='f'>{{ call.arguments }}", None),
        ("<|start_header_id|>ipython<|python_tag|> <function=f>{}</function>", None),
    ],
)
def test_a_mark_that_several_formats_use_is_not_enough(turn: str, tools: str | None) -> None:
    assert output_format("auto", "auto", turn).tools == tools


def test_formats_are_chosen_by_name() -> None:
    assert output_format("none", "none", TEMPLATES["hermes"]) == OutputFormat()
    assert output_format("qwen25", "glm45", None) == OutputFormat(tools="hermes", reasoning="qwen3")
    assert output_format("auto", "auto", "{{ messages }}") == OutputFormat()
    for field, names in (("tool_call_parser", ("hermez", "auto")), ("reasoning_parser", ("auto", "thinky"))):
        with pytest.raises(ValueError, match=rf"{field}='\w+' is not a format; use auto, none, "):
            output_format(*names, None)
