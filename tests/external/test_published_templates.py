"""Chat templates as they are published: each is told apart, and what it writes as a turn of the model is read back.

They are other people's work and no part of this repository: README.md in this folder says where they are found. Our own
renderer writes the turns, so a template that the sandbox refused would fail here too.
"""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from moewe.server.protocol.chat_messages import ChatMessage
from moewe.text import ChatTemplate
from moewe.text.parsers import OutputFormat, OutputParser, output_format
from tests.support.tool_templates import assistant
from tests.text.test_parsers import events_of, summary

pytestmark = pytest.mark.slow

FOLDER = Path(os.environ.get("MOEWE_TEMPLATES") or Path(__file__).parents[2] / ".external" / "templates")
# What a model says last is its end token, which never becomes text.
_ENDS = re.compile(
    r"(?:\n|<EOS>|<\|im_end\|>|<\|eo[tm]_id\|>|<\|end_of_text\|>|<\|call\|>|<\|return\|>|<\|end\|>|<\|role_end\|>"
    r"|<｜end▁of▁sentence｜>|<end_of_sentence>|\[e~\[|</assistant>|<sep>|<\|calls\|>)+\Z"
)


@dataclass(frozen=True, kw_only=True)
class Published:
    """One template.

    Attributes:
        tools, reasoning: formats that it must be told to write.
        thinks: how a thought gets into an output: the template writes it; the prompt opens it and the template leaves
            it out of earlier turns, so that it is put before the turn here; None, it has none.
        options: variables that let the model think.
        opening: what stands before the assistant's turn, where the prompt ends differently.
        beside: content stands beside calls.
        most_calls: that a turn can hold.
        only_before_calls: a thought is shown where calls follow it.
        left_out: of the source: a line that neither transformers' sandbox nor ours runs.
    """

    tools: str | None
    reasoning: str | None = None
    thinks: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    opening: str | None = None
    beside: bool = True
    most_calls: int = 2
    only_before_calls: bool = False
    left_out: str = ""


_QWEN3 = {"reasoning": "qwen3", "thinks": "written"}
_OPENED: dict[str, Any] = {"reasoning": "qwen3", "thinks": "R\n</think>\n\n", "options": {"enable_thinking": True}}
_R1: dict[str, Any] = {**_OPENED, "tools": "deepseek_v3", "opening": "<｜Assistant｜>", "beside": False}
_LLAMA3: dict[str, Any] = {"tools": "llama3_json", "beside": False, "most_calls": 1}
_KIMI_LINE = "{%- set _ = tool_response_queue.ids.append(formatted_id) -%}"
TEMPLATES: dict[str, Published] = {
    "Apriel-1.6-15b-Thinker-fixed": Published(
        tools="hunyuan", options={"add_thoughts": False}, opening="<|begin_assistant|>\n"
    ),
    "Bielik-11B-v3.0-Instruct": Published(tools="hermes", **_QWEN3),
    "GLM-4.6": Published(tools="glm45", **_QWEN3),
    "GLM-4.7-Flash": Published(tools="glm45", **_QWEN3),
    "Kimi-K2-Instruct": Published(tools="kimi_k2", left_out=_KIMI_LINE),
    "Kimi-K2-Thinking": Published(tools="kimi_k2", left_out=_KIMI_LINE, only_before_calls=True, **_QWEN3),
    "MiMo-VL": Published(tools="hermes"),
    "MiniMax-M1": Published(tools="hunyuan", beside=False),
    "MiniMax-M2": Published(tools="minimax_m2", **_QWEN3),
    "Mistral-Small-3.2-24B-Instruct-2506": Published(tools="mistral", beside=False),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": Published(tools="qwen3_coder", **_QWEN3),
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": Published(tools="hermes", beside=False),
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": Published(tools="hermes", beside=False),
    "Qwen-QwQ-32B": Published(tools="hermes", opening="<|im_start|>assistant\n", **_OPENED),
    "Qwen-Qwen2.5-7B-Instruct": Published(tools="hermes"),
    "Qwen-Qwen3-0.6B": Published(tools="hermes", **_QWEN3),
    "Qwen3-Coder": Published(tools="qwen3_coder"),
    "Qwen3.5-4B": Published(tools="qwen3_coder", **_QWEN3),
    "Reka-Edge": Published(tools="hermes", reasoning="qwen3", opening="<sep>assistant: "),
    "Spark2.5": Published(tools="glm45", **_QWEN3),
    "StepFun3.5-Flash": Published(tools="qwen3_coder", **_QWEN3),
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": Published(**_R1),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": Published(**_R1),
    "deepseek-ai-DeepSeek-V3.1": Published(
        tools="deepseek_v31", opening="<｜Assistant｜><think></think>", **{**_OPENED, "thinks": "R</think>"}
    ),
    "ibm-granite-granite-3.3-2B-Instruct": Published(tools="granite", reasoning="qwen3", most_calls=0),
    "ibm-granite-granite-4.0": Published(tools="hermes"),
    "ibm-granite-granite-4.1": Published(tools="hermes"),
    "inclusionai-ling-3.0-flash": Published(tools="glm45", **_QWEN3),
    "meta-llama-Llama-3.1-8B-Instruct": Published(**_LLAMA3),
    "meta-llama-Llama-3.2-3B-Instruct": Published(**_LLAMA3),
    "meta-llama-Llama-3.3-70B-Instruct": Published(**_LLAMA3),
    "mistralai-Ministral-3-14B-Reasoning-2512": Published(
        tools="mistral", reasoning="mistral", thinks="[THINK]R[/THINK]"
    ),
    "mistralai-Mistral-Nemo-Instruct-2407": Published(tools="mistral", beside=False),
    "moonshotai-Kimi-K2": Published(tools="kimi_k2"),
    "openai-gpt-oss-120b": Published(
        tools="gpt_oss", reasoning="gpt_oss", thinks="written", beside=False, most_calls=1
    ),
    "poolside-Laguna-S-2.1": Published(tools="glm45", **_QWEN3),
    "poolside-Laguna-XS-2.1": Published(tools="glm45", options={"enable_thinking": True}, **_QWEN3),
    "poolside-Laguna-XS.2": Published(tools="glm45", options={"enable_thinking": True}, **_QWEN3),
    "unsloth-Apriel-1.5": Published(tools="hunyuan"),
    "unsloth-mistral-Devstral-Small-2507": Published(tools="mistral"),
}

TAGGED = ("glm45", "qwen3_coder", "minimax_m2")  # they write texts as they are, so those cannot hold their tags
_PROPERTIES: dict[str, Any] = {
    "where": {"type": "string"}, "most": {"type": "integer"}, "ratio": {"type": "number"}, "wild": {"type": "boolean"},
    "near": {"type": "object"}, "names": {"type": "array", "items": {"type": "string"}}, "code": {"type": "string"},
    "nothing": {"type": "string"}, "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
}  # fmt: skip
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {
        "name": "find_birds", "description": "Finds birds.", "parameters": {"type": "object", "properties": {
            name: {**schema, "description": name} for name, schema in _PROPERTIES.items()}}}},
    {"type": "function", "function": {
        "name": "now", "description": "The time.", "parameters": {"type": "object", "properties": {}}}},
]  # fmt: skip
ARGUMENTS: dict[str, Any] = {
    "where": "a \"quoted\" } place\nwith two lines,\n\n möwe \U0001f426 \\n \\u00e9 & <b> 'x'",
    "most": 12345678901234567890,
    "ratio": -0.25,
    "wild": True,
    "near": {"a": {"b": [1, {"c": '}"{'}, None, False]}, "e": [], "é": {}},
    "names": ["gull", "5", 2.5, "\\", ""],
    "code": "007",
    "nothing": "",
    "note": None,
}
MARKS = "</tool_call> </tool_calls> <｜tool▁call▁end｜> ``` [TOOL_CALLS] <|tool_call_end|> </function> }]"
SHORT = {"where": 'söa "x"\n{', "most": 5, "near": {"a": [1]}}
BEFORE = {"role": "user", "content": "hi"}
CONTENT = 'Let me look:\nat "möwe" {5} < 6.'
THOUGHT = "They ask for birds.\n\nSo I look {here}."


def source_of(name: str) -> str:
    file = FOLDER / f"{name}.jinja"
    if not file.is_file():
        pytest.skip(f"there is no {file}; see tests/external/README.md")
    return file.read_text(encoding="utf-8").replace(TEMPLATES[name].left_out or "\0", "")


def all_files() -> list[Path]:
    files = sorted(FOLDER.glob("*.jinja"))
    if not files:
        pytest.skip(f"there are no templates in {FOLDER}; see tests/external/README.md")
    return files


def format_of(name: str) -> OutputFormat:
    return output_format("auto", "auto", source_of(name))


def parser_of(name: str, prompt: str) -> OutputParser:
    parser = format_of(name).parser(prompt=prompt[-64:], tools=TOOLS)
    assert parser is not None
    return parser


def template_of(name: str) -> ChatTemplate:
    return ChatTemplate(source_of(name), variables={"bos_token": "<BOS>", "eos_token": "<EOS>"})


def prompt_of(name: str) -> str:
    return template_of(name).render([BEFORE], tools=TOOLS, **TEMPLATES[name].options)


def written(name: str, calls: Sequence[tuple[str, Any]], content: str, thought: str | None) -> tuple[str, str]:
    """Return a prompt, and what a model says after it so that the template writes it as the turn of these parts."""
    form = TEMPLATES[name]
    message = assistant(calls, content or ("" if calls else CONTENT), thought if form.thinks == "written" else None)
    for place, call in enumerate(message.get("tool_calls", ())):
        call["id"] = f"abcdefgh{place}"
    if calls and not content:
        message["content"] = None
    turn = ChatMessage.model_validate(message).check(0)
    prompt = prompt_of(name)
    whole = template_of(name).render([BEFORE, turn], tools=TOOLS, add_generation_prompt=False, **form.options)
    if form.opening is None:
        assert whole.startswith(prompt)
        output = whole[len(prompt) :]
    else:
        output = whole.partition(form.opening)[2]
    output = _ENDS.sub("", output)
    if thought is not None and form.thinks != "written":
        assert form.thinks is not None
        output = form.thinks.replace("R", thought) + output
    return prompt, output


def cases(name: str) -> list[tuple[list[tuple[str, Any]], str, str | None]]:
    """Return calls, content and thought of the turns that a template can write."""
    form = TEMPLATES[name]
    arguments = ARGUMENTS if form.tools in TAGGED else {**ARGUMENTS, "nothing": MARKS}
    two = [("find_birds", arguments), ("now", {})]
    calls = [two[:number] for number in range(1, form.most_calls + 1)]
    calls += [[two[1]]] if form.most_calls else []
    contents = ("", CONTENT) if form.beside else ("",)
    thoughts: tuple[str | None, ...] = ("", THOUGHT) if form.thinks is not None else (None,)
    if form.thinks == "written" and prompt_of(name).rstrip().endswith("<think>"):
        thoughts = (THOUGHT,)  # without one the template writes a turn that this prompt does not begin
    found = [(some, content, thought) for some in calls for content in contents for thought in thoughts]
    return found + [([], CONTENT, thought) for thought in thoughts if not (thought and form.only_before_calls)]


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_format_of_a_template_is_found(name: str) -> None:
    form = TEMPLATES[name]
    assert format_of(name) == OutputFormat(tools=form.tools, reasoning=form.reasoning)


def test_no_other_template_is_taken_for_one_that_we_read() -> None:
    files = all_files()
    found = {file.stem: output_format("auto", "auto", file.read_text(encoding="utf-8")).tools for file in files}
    others = {name: tools for name, tools in found.items() if tools is not None and name not in TEMPLATES}
    # llama.cpp's own form of R1's template, which only llama.cpp can run: it writes a generator as JSON.
    others.pop("llama-cpp-deepseek-r1", None)
    assert others == {}


def rendered_by_transformers(source: str, messages: Sequence[Any], tools: Any, *, as_text: bool) -> str | None:
    """Return what transformers renders with arguments of calls as JSON text or as mappings; None where it refuses."""
    turns = copy.deepcopy(list(messages))
    for turn in turns:
        for call in turn.get("tool_calls", ()):
            arguments = call["function"]["arguments"]
            call["function"]["arguments"] = str(arguments) if as_text else dict(arguments)
    try:
        texts, _ = render_jinja_template(
            [turns], tools=tools, chat_template=source, add_generation_prompt=False, bos_token="<BOS>",
            eos_token="<EOS>",
        )  # fmt: skip
    except Exception:  # of many kinds: a template raises what an operation on its data raises
        return None
    return str(texts[0])


def test_prompts_are_those_of_transformers() -> None:
    """Of all templates, also of families whose calls we do not read. Where transformers renders, so do we."""
    call = assistant([("find_birds", ARGUMENTS)], "", THOUGHT)
    call["tool_calls"][0]["id"] = "abcdefgh0"
    result = {"role": "tool", "content": '{"gulls": 4}', "tool_call_id": "abcdefgh0"}
    system = {"role": "system", "content": "Be brief."}
    for file in all_files():
        source = file.read_text(encoding="utf-8")
        ours = ChatTemplate(source, variables={"bos_token": "<BOS>", "eos_token": "<EOS>"})
        for turns in ([BEFORE], [system, BEFORE], [BEFORE, call], [BEFORE, call, result, assistant([], "4."), BEFORE]):
            messages = [ChatMessage.model_validate(turn).check(0) for turn in turns]
            for tools in (TOOLS, None):
                wanted = [rendered_by_transformers(source, messages, tools, as_text=flag) for flag in (False, True)]
                if wanted != [None, None]:
                    assert ours.render(messages, tools=tools, add_generation_prompt=False) in wanted, file.stem


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_a_template_writes_is_read_back(name: str) -> None:
    for calls, content, thought in cases(name):
        prompt, output = written(name, calls, content, thought)
        whole = events_of(parser_of(name, prompt), [output])
        reasoning, text, found, complete = summary(whole)
        assert (reasoning, text, complete) == (thought or "", content, [True] * len(calls)), output
        # As text, since True equals 1 in Python.
        assert json.dumps(found, sort_keys=True) == json.dumps(calls, sort_keys=True), output
        tokens = re.findall(r" ?\w{1,6}|\s+|<[|｜/]?|.", output)
        assert "".join(tokens) == output
        for pieces in (list(output), tokens):
            assert events_of(parser_of(name, prompt), pieces) == whole


@pytest.mark.parametrize("name", TEMPLATES)
def test_no_cut_changes_what_is_read(name: str) -> None:
    form = TEMPLATES[name]
    calls = [("find_birds", SHORT), ("now", {})][: form.most_calls]
    thought = THOUGHT if form.thinks is not None else None
    content = CONTENT if form.beside or not calls else ""
    prompt, output = written(name, calls, content, thought)
    whole = events_of(parser_of(name, prompt), [output])
    assert summary(whole) == (thought or "", content, calls, [True] * len(calls))
    for cut in range(len(output) + 1):
        assert events_of(parser_of(name, prompt), [output[:cut], output[cut:]]) == whole

    @settings(max_examples=150, deadline=None)
    @given(cuts=st.lists(st.integers(0, len(output)), min_size=2, max_size=6).map(sorted))
    def check(cuts: list[int]) -> None:
        parts = [output[start:end] for start, end in zip([0, *cuts], [*cuts, len(output)])]
        assert events_of(parser_of(name, prompt), parts) == whole

    check()
