"""P-SEC-02 beyond loops: templates that work long or grow without one, nest without end, or are only odd to compile."""

from __future__ import annotations

import resource
import time
from typing import Any

import pytest

from moewe.text import ChatTemplate, TemplateError, sandbox

pytestmark = pytest.mark.slow

DEEP = 20_000
BUILT = "{% set n = namespace(x=[]) %}{% for i in range(90000) %}{% set n.x = [n.x] %}{% endfor %}"


def outcome(source: str, **kwargs: Any) -> str:
    """Return the refusal of a template, or an empty text where it renders."""
    try:
        ChatTemplate(source).render([{"role": "user", "content": "hi"}], **kwargs)
    except TemplateError as error:
        assert "\n" not in str(error) and len(str(error)) < 2000
        return str(error)
    return ""


@pytest.mark.parametrize(
    "source",
    [
        # no loop at all: each line doubles the work or the memory of the one before
        "{% set x = 10 ** 60 %}" + "{% set x = x * x %}" * 60 + "{{ x > 1 }}",
        "{% set n = namespace(x=2) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
        "{% set a = [0] * 1000000 %}" + "{% set a = a + a %}" * 10,
        "".join(f"{{% set x{i} = range(100000) | list %}}" for i in range(2500)),
        "{% set s = 'a ' * 1000000 %}" + "".join(f"{{% set x{i} = s.split() %}}" for i in range(2500)),
        "{% set s = 'ab' * 500000 %}" + "{% set t = s | list | sort | unique | list %}" * 2500,
        "{% set s = 'a' * 1000000 %}" + "".join(f"{{% set x{i} = s + 'b' %}}" for i in range(2500)),
        "{% set s = 'a' * 1000000 %}{% set n = namespace(x=[]) %}{% for i in range(90000) %}"
        "{% set n.x = n.x + [s + 'b'] %}{% endfor %}",
        "{% set s = ('<a ' * 300000) %}" + "{% set t = s | striptags %}" * 2500,
    ],
)
def test_what_works_long_or_grows_is_ended(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_CPU_SECONDS", 0.5)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.thread_time()
    assert "chat template" in outcome(source)
    assert time.thread_time() - start < 15  # compiling a long source is part of it
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1.5 * 2**20  # KiB


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "(" * DEEP + "1" + ")" * DEEP + " }}",
        "{{ " + "[" * DEEP + "]" * DEEP + " }}",
        "{% if 1 %}" * DEEP + "{% endif %}" * DEEP,
        "{% for i in [1] %}" * 150 + "{% endfor %}" * 150,
        "{{ " + "not " * DEEP + "1 }}",
        "{{ 1" + " + 1" * DEEP + " }}",
        "{{ x" + ".x" * DEEP + " }}",
        "{{ x" + " | upper" * DEEP + " }}",
        "{{ 1 if 1 else " * DEEP + "1" + " }}" * DEEP,
        BUILT + "{{ n.x }}",
        BUILT + "{{ n.x | tojson }}",
        BUILT + "{{ n.x | string }}",
        BUILT + "{{ n.x == [n.x] }}",
        BUILT + "{{ n.x | join }}",
        "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
        "{% set ns = namespace() %}{% set ns.a = ns %}{{ ns.a }}",
    ],
)
def test_nesting_without_end_is_a_refusal_and_no_crash(source: str) -> None:
    outcome(source)  # a refusal or, where it is harmless, a text: never another error, and never a dead process


@pytest.mark.parametrize(
    "source",
    [
        "{% include '/etc/passwd' %}", "{% import 'os' as os %}{{ os }}", "{% extends '/etc/passwd' %}",
        "{{ self.__init__.__globals__ }}", "{{ self._TemplateReference__context }}",
        "{{ joiner.__init__.__globals__ }}",
        "{{ namespace.__init__.__globals__['__builtins__'] }}", "{{ ('a' | attr('__class__')).__mro__ }}",
        "{{ messages | map(attribute='__class__') | list | string | length and messages[0].__class__.__name__ }}",
        "{{ ''.format_map.__self__.__class__.__name__ }}", "{{ '{0.__class__}'.format(messages) }}",
        "{{ '{a.__init__.__globals__}'.format_map({'a': cycler}) }}", "{{ dict.__base__ }}", "{{ _limits }}",
        "{% set x = messages.__setitem__(0, 1) %}{{ x }}", "{% do messages.append(1) %}", "{{ debug() }}",
    ],
)  # fmt: skip
def test_other_ways_out_are_closed(source: str) -> None:
    """Where Jinja hides a name it renders as nothing."""
    try:
        assert ChatTemplate(source).render([{"role": "user", "content": "hi"}]) == ""
    except TemplateError as error:
        assert "\n" not in str(error)


def test_a_refusal_leaves_the_thread_usable() -> None:
    assert outcome("{{ 'a' * 1000000000 }}")
    for _ in range(3):
        assert ChatTemplate("{{ messages | map(attribute='content') | join }}").render([{"content": "hi"}]) == "hi"


def test_honest_templates_of_long_conversations_fit() -> None:
    source = (
        "{% for m in messages %}{% set before = messages[:loop.index0] | selectattr('role', 'eq', 'user') | list %}"
        "{{ m.role ~ ': ' ~ m.content | trim }}{{ before | length }}\n{% endfor %}"
    )
    text = ChatTemplate(source).render([{"role": "user", "content": "word " * 100} for _ in range(1000)])
    assert len(text.splitlines()) == 1000
