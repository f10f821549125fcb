"""What parsers make of the odd and the broken, format by format; arguments without JSON; calls that are forced."""

from __future__ import annotations

import json
from typing import Any

import pytest

from moewe.text import ChatTemplate
from moewe.text.call_arguments import call_arguments
from moewe.text.parsers import OutputFormat, OutputParser, forced_parser, forced_schema
from moewe.text.parsers.arguments import as_json
from moewe.text.parsers.json_values import MAX_DEPTH, whole_value
from moewe.text.parsers.tools_pythonic import as_json as literal_as_json
from tests.support.tool_templates import TOOLS
from tests.text.test_parsers import events_of, summary


def read(form: str, text: str, tools: Any = TOOLS) -> tuple[str, list[Any], list[bool]]:
    """Return text, calls with their arguments as JSON or as far as they go, and which are complete."""
    parser = OutputFormat(tools=form).parser(tools=tools)
    assert parser is not None
    _, shown, calls, complete = summary(events_of(parser, list(text)))
    return shown, calls, complete


def thought(reasoning: str, text: str, prompt: str = "") -> tuple[str, str]:
    parser = OutputFormat(reasoning=reasoning).parser(prompt=prompt)
    assert parser is not None
    return summary(events_of(parser, list(text)))[:2]


@pytest.mark.parametrize(
    ("tools", "text", "shown", "calls", "complete"),
    [
        # --- the model's own variants
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "now"}</tool_call>', "", [("now", {"a": 1})], [True]),
        ("hermes", '<tool_call>{"name": "now"}</tool_call>', "", [("now", {})], [True]),
        ("hermes", '<tool_call>{"name": "now", "arguments": null}', "", [("now", {})], [True]),
        ("hermes", '<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}', "", [("now", {"a": 1})], [True]),
        ("hermes", '<tool_call>{"name": "f"}\n{"name": "g"}</tool_call> bye', "bye",
         [("f", {}), ("g", {})], [True] * 2),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "x\ny"}}', "", [("f", {"a": "x\ny"})], [True]),
        ("hermes", '<tool_call><tool_call>{"name": "f"}</tool_call>', "<tool_call>", [("f", {})], [True]),
        ("qwen3_coder", "<function=now>\n</function>", "", [("now", {})], [True]),
        ("mistral", '[TOOL_CALLS]now{"a": 1}[TOOL_CALLS] f [ARGS] {}', "",
         [("now", {"a": 1}), ("f", {})], [True] * 2),
        ("mistral", '[TOOL_CALLS]{"name": "now", "arguments": {}}', "", [("now", {})], [True]),
        ("llama3_json", ' {"name": "now", "parameters": {}} ', "", [("now", {})], [True]),
        ("llama3_json", '{"type": "function", "name": "now", "parameters": {}}', "", [("now", {})], [True]),
        ("llama4_pythonic", "[now(), f(a=-1.5, b=[True, None], c='it\\'s')]", "",
         [("now", {}), ("f", {"a": -1.5, "b": [True, None], "c": "it's"})], [True] * 2),
        ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁calls▁end｜>!", "!",
         [("now", {})], [True]),
        ("gpt_oss", " to=functions.now<|channel|>commentary json<|message|>{}<|call|>", "", [("now", {})], [True]),
        ("gpt_oss", "<|channel|>final<|message|>One.<|end|><|start|>assistant<|channel|>final<|message|>Two.",
         "One.\nTwo.", [], []),
        # --- broken before the arguments: text
        ("hermes", "<tool_call>no</tool_call>", "<tool_call>no</tool_call>", [], []),
        ("hermes", '<tool_call>{"name": "a b"}', '<tool_call>{"name": "a b"}', [], []),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>', [], []),
        ("hermes", '<tool_call>{"name": "\\ud800"}', '<tool_call>{"name": "\\ud800"}', [], []),
        ("glm45", "<tool_call>a b<arg_key>", "<tool_call>a b<arg_key>", [], []),
        ("mistral", "[TOOL_CALLS]now[ARGS]7", "[TOOL_CALLS]now[ARGS]7", [], []),
        ("llama4_pythonic", "[1, 2](x)", "[1, 2](x)", [], []),
        ("gpt_oss", "<|channel|>commentary to=functions.now<|message|>no<|call|>", "no", [], []),
        ("gpt_oss", "No marks at all", "No marks at all", [], []),
        # --- broken later: an incomplete call, and nothing of what follows
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": oops}}</tool_call> bye', "bye",
         [("f", '{"a": ')], [False]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1', "", [("f", '{"a": 1')], [False]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\u12', "", [("f", '{"a": "')], [False]),
        ("qwen3_coder", "<tool_call><function=f><parameter=a>1", "", [("f", '{"a": ')], [False]),
        ("glm45", "<tool_call>f<arg_key>a</arg_key>x</tool_call>!", "!", [("f", "")], [False]),
        ("llama4_pythonic", "[f(a=open('x'))] more", "", [("f", "{")], [False]),
    ],
)  # fmt: skip
def test_odd_and_broken_calls(tools: str, text: str, shown: str, calls: list[Any], complete: list[bool]) -> None:
    assert read(tools, text) == (shown, calls, complete)


def test_json_is_valid_up_to_where_it_breaks() -> None:
    for text in ('{"a": [1, -2.5e3, true, null, "\\u00e9\\n"], "b": {}}', "0", '""', "[]", " [ 1 , 2 ] "):
        value = whole_value(text)
        assert value is not None and json.loads(value) == json.loads(text)
    for text in ("", "{", "01", "1.", "+1", "NaN", "Infinity", "nul", "[1,]", '{"a":1,}', "{a: 1}", "[1 2]", '"\\x"',
                 "1 2", "'a'", '{"a" 1}', "]", '"a'):  # fmt: skip
        assert whole_value(text) is None, text
    assert whole_value("[" * MAX_DEPTH + "]" * MAX_DEPTH) is not None
    assert whole_value("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1)) is None
    assert whole_value('"a\tb"') == '"a\\tb"'


@pytest.mark.parametrize(
    ("text", "kinds", "value"),
    [
        ("5", {"integer"}, 5), ("5", {"string"}, "5"), ("5", {"string", "null"}, "5"),
        ("null", {"string", "null"}, None),
        ("None", {"string", "null"}, None), ("True", {"boolean"}, True), ("True", set(), "True"), ("5", set(), 5),
        ("[1]", {"array"}, [1]), ("oops", {"integer"}, "oops"), (" x ", set(), " x "),
        ('"q"', {"string", "null"}, '"q"'),
    ],
)  # fmt: skip
def test_bare_values_get_the_type_that_the_schema_allows(text: str, kinds: set[str], value: Any) -> None:
    assert json.loads(as_json(text, frozenset(kinds))) == value


def test_schemas_of_strangers_are_only_looked_at() -> None:
    deep: Any = {"type": "string"}
    for _ in range(50):
        deep = {"anyOf": [deep]}
    odd = [deep, {"type": 5}, {"type": ["string", 5]}, {"anyOf": "x"}, 7, None, {"enum": ["a"]}, {"$ref": "#"}]
    for schema in odd:
        tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": schema}}}}
        text = "<tool_call>f<arg_key>a</arg_key><arg_value>x</arg_value></tool_call>"
        assert read("glm45", text, tools=[tool]) == ("", [("f", {"a": "x"})], [True])


def test_python_literals_are_read_and_never_run() -> None:
    assert literal_as_json("{'a': (1, 2)}") == '{"a": [1, 2]}'
    assert literal_as_json("true") == "true"
    assert literal_as_json("'\\ud800'") == '"\\ud800"'
    for text in (
        "open('x')",
        "{1: 2}",
        "{1, 2}",
        "b'x'",
        "1j",
        "-" * 100_000 + "1",
        "x" * 5000,
        "\0",
    ):
        assert literal_as_json(text) is None, text[:20]


def test_thinking_begins_where_the_prompt_or_the_model_opens_it() -> None:
    assert thought("qwen3", "<think>\nHm.\n</think>\n\nYes.") == ("Hm.", "Yes.")
    assert thought("qwen3", "Hm.</think>Yes.") == ("", "Hm.</think>Yes.")
    assert thought("qwen3", "Hm.</think>Yes.", prompt="...<think>\n") == ("Hm.", "Yes.")
    assert thought("qwen3", "<think>\nHm.") == ("Hm.", "")
    assert thought("deepseek_r1", "Hm.</think>Yes.") == ("Hm.", "Yes.")
    assert thought("deepseek_r1", "<think>Hm.</think>Yes.") == ("Hm.", "Yes.")
    assert thought("deepseek_r1", "Yes.", prompt="<think>\n\n</think>\n\n") == ("", "Yes.")
    assert thought("qwen3", "<think>\n\n  Hm. \n</think>Yes.") == ("Hm.", "Yes.")
    for empty in ("<think></think>\n", "<think>\n\n</think>\n\n", "\n<think></think>\n\n"):  # told not to think
        assert thought("qwen3", f"{empty}Yes.\n") == ("", "Yes.\n")
    assert thought("qwen3", "\n</think>\n\nYes.", prompt="<think>") == ("", "Yes.")
    assert thought("qwen3", "\n\nYes.") == ("", "\n\nYes.")
    assert thought("qwen3", "Yes. <think>no</think>") == ("", "Yes. <think>no</think>")
    assert thought("gpt_oss", "<|channel|>analysis<|message|>Hm.<|end|><|channel|>final<|message|>Yes.") == (
        "Hm.",
        "Yes.",
    )


def test_special_tokens_are_kept_only_where_a_mark_is_one() -> None:
    form = OutputFormat(tools="hermes", reasoning="qwen3")
    assert not form.needs_special_tokens({"<|im_end|>"}, tools=True)
    assert form.needs_special_tokens({"<think>"}, tools=False)
    assert form.needs_special_tokens({"<tool_call>"}, tools=True)
    assert not form.needs_special_tokens({"<tool_call>"}, tools=False)
    assert OutputFormat(reasoning="gpt_oss").needs_special_tokens({"<|message|>"}, tools=False)


def test_nothing_long_is_kept_while_text_streams() -> None:
    parser = OutputParser(tools=OutputFormat(tools="hermes").parser(tools=TOOLS)._tools)  # type: ignore[union-attr]
    cursor = parser._tools._cursor  # type: ignore[union-attr]
    parser.feed('<tool_call>{"name": "f", "arguments": {"a": "')
    for _ in range(2000):
        parser.feed("x" * 50 + "<")
        assert len(cursor._text) < 100
    assert cursor._record is None


# --- forced calls -----------------------------------------------------------------------------------------------------
def test_schema_of_a_named_function_is_that_of_its_arguments() -> None:
    assert forced_schema(TOOLS, "find_birds") == TOOLS[0]["function"]["parameters"]
    assert forced_schema([{"type": "function", "function": {"name": "f"}}], "f") == {"type": "object"}


def test_schema_of_any_function_lists_all_and_lifts_definitions() -> None:
    parameters = {"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"type": "integer"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    schema = forced_schema([*TOOLS, tool], None, parallel=False)
    assert (schema["minItems"], schema["maxItems"]) == (1, 1)
    assert [call["properties"]["name"]["const"] for call in schema["items"]["anyOf"]] == ["find_birds", "now", "f"]
    assert schema["$defs"] == {"x": {"type": "integer"}} and "$defs" not in schema["items"]["anyOf"][2]["properties"]
    assert "maxItems" not in forced_schema(TOOLS, None)


@pytest.mark.parametrize(
    ("name", "text", "calls", "complete"),
    [
        ("now", ' {"a": 1}', [("now", {"a": 1})], [True]),
        ("now", '{"a": 1', [("now", '{"a": 1')], [False]),
        (None, '[{"name": "f", "parameters": {}}, {"name": "g", "parameters": {"b": 2}}]',
         [("f", {}), ("g", {"b": 2})], [True] * 2),
        (None, '[{"name": "f", "parameters": {}}, {"na', [("f", {})], [True]),
    ],
)  # fmt: skip
def test_forced_answers_are_read(name: str | None, text: str, calls: list[Any], complete: list[bool]) -> None:
    assert summary(events_of(forced_parser(name), list(text))) == ("", "", calls, complete)
    assert summary(events_of(forced_parser(name), ["No."])) == ("", "No.", [], [])
    assert summary(events_of(forced_parser(name), ["No.\0", " Never."])) == ("", "No.\0 Never.", [], [])


# --- arguments of earlier calls ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("template", "shown"),
    [
        ("{{ a | tojson }}", '{"x": 1, "y": "z"}'),
        ("{{ 'json ' + a + '!' }}", 'json {"x":1, "y":"z"}!'),
        ("{{ a }}", '{"x":1, "y":"z"}'),
        ("{{ 'a' ~ a }}", 'a{"x":1, "y":"z"}'),
        ("{% for k, v in a.items() %}{{ k }}={{ v }};{% endfor %}", "x=1;y=z;"),
        ("{{ a is mapping }}{{ a is string }}", "TrueFalse"),
    ],
)
def test_arguments_are_a_mapping_and_a_text(template: str, shown: str) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x":1, "y":"z"}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    source = "{% set a = messages[0].tool_calls[0].function.arguments %}{{ messages[0].content }}" + template
    assert ChatTemplate(source).render([message]) == shown


def test_arguments_that_are_none_are_refused_with_a_reason() -> None:
    assert call_arguments("") == {} == call_arguments({})
    for value, reason in (
        ("{", "not JSON"),
        ("[1]", "not an object"),
        ('{"a": NaN}', "NaN"),
        (5, "int"),
        ("[" * 10**5, "JSON"),
    ):
        with pytest.raises(ValueError, match=reason):
            call_arguments(value)
