"""ChatTemplate: what templates expect, what they may not do, and how their mistakes are told."""

from __future__ import annotations

import json
import time

import pytest

from moewe.text import ChatTemplate, TemplateError, sandbox

HI = [{"role": "user", "content": "hi"}]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


# A list of a million references to one text of a million characters: small in memory, endless in print.
LONG = "{% set x = 'a' * 1000000 %}{% set y = [x] * 1000000 %}"


def render(source: str, messages: list[dict] = HI, **kwargs: object) -> str:
    return ChatTemplate(source, variables={"bos_token": "<s>"}).render(messages, **kwargs)


def test_renders_as_transformers_does() -> None:
    assert render(CHATML) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert render(CHATML, add_generation_prompt=False) == "<|im_start|>user\nhi<|im_end|>\n"
    assert render("{{ bos_token }}{{ style }}", style="dry") == "<s>dry"
    assert render("{{ tools is none }}{{ documents is none }}") == "TrueTrue"
    assert (
        render("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}")
        == "1"
    )
    assert render("{% macro f(x) %}[{{ x }}]{% endmacro %}{{ f(messages[0].content) ~ 'b' }}") == "[hi]b"
    assert render("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}") == "hi"
    assert render("{{ {'a': 'ö'} | tojson }}") == '{"a": "ö"}'
    assert render("{% set x | trim %} {{ messages[0].content }} {% endset %}{{ x }}") == "hi"
    assert render("{{ messages | map(attribute='content') | join(',') }}{{ 'a-b'.replace('-', '+') }}") == "hia+b"
    assert render("{% for m in messages %}{{ m.content }}{% break %}{% endfor %}") == "hi"
    assert render("{{ [1, 2] | sum }} {{ messages | sum('n', 1) }}", [{"role": "user", "n": 2}]) == "3 3"
    assert render("{{ {'b': 1, 'a': [1]} | tojson(indent=1, sort_keys=true, separators=(',', ':')) }}") == (
        '{\n "a":[\n  1\n ],\n "b":1\n}'
    )
    assert render("{{ strftime_now('%Y')[:2] }}{{ dict(a=1) }}{{ nothing }}{{ none }}{{ 'A' | lower }}") == (
        "20{'a': 1}Nonea"
    )


def test_text_parts_and_missing_content_are_texts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render("{{ messages[0].content + '|' + messages[1]['content'] }}",
                  [{"role": "user", "content": parts}, {"role": "assistant", "content": None}]) == "a\nb|"  # fmt: skip


@pytest.mark.parametrize("spelling", ["m['content'] is none", 'm["content"] is not none', "m.content is none"])
def test_missing_content_stays_missing_for_templates_that_ask(spelling: str) -> None:
    name = spelling.partition(".")[0].partition("[")[0]
    found = render(
        f"{{% for {name} in messages %}}[{{{{ {spelling} }}}}]{{% endfor %}}",
        [{"role": "assistant", "content": None}, {"role": "assistant", "content": "a"}],
    )
    assert found == ("[False][True]" if "not" in spelling else "[True][False]")


@pytest.mark.parametrize("use", ["'x' in m.content", "m.content | length > 0", "m.content.lstrip() != ''"])
def test_gaps_are_filled_where_a_template_fails_on_them(use: str) -> None:
    """P-TOK-07 with templates that ask for a missing content in one place and cut it in another, as Qwen3's first."""
    source = "{% for m in messages %}{% if m.content is not none %}!{% endif %}[{{ " + use + " }}]{% endfor %}"
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": []}]
    assert render(source, turns) == "![True]![False]"
    assert render("{% for m in messages %}{{ m.content is none }}{% endfor %}", turns) == "FalseTrue"


def test_a_function_needs_no_description() -> None:
    """gpt-oss joins it to a text; templates that only print tools get them as they were sent."""
    tools = [{"type": "function", "function": {"name": "now", "parameters": {}}}]
    chat = [{"role": "user", "content": "x"}]
    source = "{% for t in tools %}{{ '// ' + t.function.description + t.function.name }}{% endfor %}"
    assert ChatTemplate(source).render(chat, tools=tools) == "// now"
    with pytest.raises(TemplateError, match="no attribute 'descriptions'"):
        ChatTemplate(source.replace("description", "descriptions")).render(chat, tools=tools)
    assert json.loads(ChatTemplate("{{ tools | tojson }}").render(chat, tools=tools)) == tools


def test_syntax_error_is_known_at_start_and_told_at_use() -> None:
    template = ChatTemplate("{{ messages[0].content ")
    assert template.problem is not None and "does not compile" in template.problem
    with pytest.raises(TemplateError, match="does not compile"):
        template.render(HI)


def test_refusal_of_the_template_is_its_message() -> None:
    with pytest.raises(TemplateError, match=r"^roles must alternate$"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize("use", ["{{ n | string }}", "{{ n }}", "{% macro f(x) %}{{ x }}{% endmacro %}{{ f(n) }}",
    "{{ '%d' % n }}", "{{ '%d' | format(n) }}", "{{ '{}'.format(n) }}", "{{ namespace(a=n).a }}",
    "{{ {}.get('a', n) }}", "{{ n | tojson }}", "{{ n | e }}", "{{ '{{{}}}'.format(n)[1:-1] }}",
    "{{ '%%*%d' % n }}"])  # fmt: skip
def test_a_number_of_the_conversation_may_be_large(use: str) -> None:
    number = 12345678901234567890
    assert render(use, n=number).strip("%*") == str(number)


@pytest.mark.parametrize(
    "use",
    ["{{ '%*d' % (n, 1) }}", "{{ '%.*f' % (n, 1.5) }}", "{{ '%*d' | format(n, 1) }}", "{{ '{:{}}'.format(1, n) }}",
     "{{ '{0:{1[0]}}'.format(1, [n]) }}", "{{ '{0[}]:{1}}'.format({'}': 1}, n) }}", "{{ 'a'.ljust(n) }}",
     "{{ 'a'.zfill(n) }}", "{{ 'a' | indent(n) }}", "{{ (1).to_bytes(n) }}",
     "{{ '{a:{b}}'.format_map({'a': 1, 'b': n}) }}"],
)  # fmt: skip
def test_no_number_is_a_width_without_bounds(use: str) -> None:
    with pytest.raises(TemplateError, match=r"a width that it computes|more than 1000000 repetitions"):
        render(use, n=2_000_000_000)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ ''.__class__.__mro__[1].__subclasses__()[0].__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ raise_exception.__globals__.time }}",
        "{{ strftime_now.__code__.co_code }}",
        "{{ messages.append(1) }}",
        "{{ messages.clear() }}",
        "{{ lipsum.__globals__ }}",
        "{{ messages[0].content.no.such }}",
    ],
)
def test_no_way_out_of_the_sandbox(source: str) -> None:
    with pytest.raises(TemplateError):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(1000000000) %}{% endfor %}",
        "{% set _tick = dict %}{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 'a' * 1000000000 }}",
        "{{ [0] * 1000000000 }}",
        "{{ 10 ** 10 ** 10 }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '{:>1000000000}'.format(1) }}",
        "{{ 'a'.ljust(1000000000) }}",
        "{{ 'a' | center(1000000000) }}",
        "{{ '\\n' | indent(1000000000, true, true) }}",
        "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
        "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x.replace('a', n.x) %}{% endfor %}",
        "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = [n.x, n.x] | join(n.x) %}{% endfor %}",
        "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set y %}{{ n.x }}{{ n.x }}{% endset %}"
        "{% set n.x = y %}{% endfor %}",
        "{% set x = 'a' * 1000000 %}{% for i in range(100) %}{{ x }}{% endfor %}",
        LONG + "{{ y }}",
        LONG + "{{ {'a': y}.items() }}",
        LONG + "{% set n = namespace(y=y) %}{{ n }}",
        LONG + "{{ y | tojson }}",
        LONG + "{{ y | upper }}",
        LONG + "{{ y | string }}",
        LONG + "{{ y ~ '' }}",
        LONG + "{{ [y] | join }}",
        LONG + "{{ '%s' % y }}",
        LONG + "{{ '{}'.format(y) }}",
        LONG + "{{ y | map('upper') | list | length }}",
        LONG + "{{ y | map('tojson') | list | length }}",
        "{% set x = [0] * 1000000 %}{{ ([x] * 1000000) | sum(start=[]) | length }}",
        "{% set n = namespace(x=(0, 1)) %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
        "{{ ('a'.encode() * 1000000000) | length }}",
    ],
)
def test_no_template_runs_or_grows_without_end(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_CPU_SECONDS", 0.2)
    start = time.thread_time()
    with pytest.raises(TemplateError):
        render(source)
    assert time.thread_time() - start < 10


def test_error_of_the_data_is_one_line() -> None:
    with pytest.raises(TemplateError, match="chat template") as caught:
        render("{{ messages[0]['content'] + 1 }}")
    assert "\n" not in str(caught.value)
