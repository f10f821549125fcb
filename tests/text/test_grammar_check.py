"""The helper that tries grammars first: hostile ones end there, and it goes on."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import psutil
import pytest

from moewe.text import grammar_check
from moewe.text.grammar_check import TOO_COMPLEX, GrammarCheck, GrammarUndecided, GrammarUntried, Trial
from moewe.text.grammar_helper import CPU_SECONDS, STARTED


@pytest.fixture(scope="module")
def check() -> Iterator[GrammarCheck]:
    check = GrammarCheck()
    yield check
    check.close()


def patterns(count: int) -> dict[str, Any]:
    """A text that must fulfil many patterns at once: the intersection of their automata is what explodes."""
    return {"allOf": [{"type": "string", "pattern": f"(a|b)*a(a|b){{{i}}}c"} for i in range(3, 3 + count)]}


def refusal(check: GrammarCheck, kind: str, text: str) -> str:
    trial = check.check(kind, text)
    assert trial.problem
    return trial.problem


def accept(check: GrammarCheck, kind: str, text: str, cpu_seconds: float = CPU_SECONDS) -> None:
    assert check.check(kind, text, cpu_seconds=cpu_seconds).problem == ""


def test_sound_grammars_pass(check: GrammarCheck) -> None:
    accept(check, "regex", "[ab]+")
    accept(check, "json_object", "")
    accept(check, "choice", '["a", "b"]')
    accept(check, "grammar", 'start: "a" start | ""')
    accept(check, "json", json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}))


def test_what_the_kernel_must_end_is_too_complex(check: GrammarCheck) -> None:
    assert refusal(check, "json", json.dumps(patterns(17))) == TOO_COMPLEX
    accept(check, "regex", "after[ab]that")


HOSTILE = {
    "nested counts": ("regex", "(((((a{0,10}){0,10}){0,10}){0,10}){0,10}){0,10}"),
    "nested counts in a grammar": ("grammar", 'start: (a{0,1000}){0,1000}\na: "x"'),
    "itself": ("json", '{"$ref": "#"}'),
    "a circle": ("json", '{"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}'),
    "many optional": ("json", json.dumps({"properties": {f"p{i}": {"type": "string"} for i in range(8000)}})),
    "a long list": ("json", json.dumps({"enum": [f"v{i}" for i in range(30_000)]})),
    "all pairs": ("json", json.dumps(
        {"allOf": [{"anyOf": [{"required": [f"a{i}{j}"]} for j in range(10)]} for i in range(10)]}
    )),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_are_refused(check: GrammarCheck, name: str) -> None:
    assert refusal(check, *HOSTILE[name])


def test_verdicts_are_remembered_and_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    check = GrammarCheck()
    try:
        for _ in range(3):
            accept(check, "regex", "abc")
            refusal(check, "json", '{"$ref": "#"}')
        assert check.num_trials == 2
        monkeypatch.setattr(grammar_check, "REMEMBERED", 1)
        accept(check, "regex", "abcd")
        accept(check, "regex", "abc")
        assert check.num_trials == 4
    finally:
        check.close()


def test_refusals_push_no_sound_grammar_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    check = GrammarCheck()
    monkeypatch.setattr(check, "_try", lambda source, _: Trial("" if "abc" in source else TOO_COMPLEX, 0.01))
    monkeypatch.setattr(grammar_check, "REMEMBERED", 4)
    accept(check, "regex", "abc")
    for number in range(9):
        refusal(check, "regex", f"x{number}")
    assert [check.remembered("regex", f"x{number}") for number in (4, 5, 8)] == [None, TOO_COMPLEX, TOO_COMPLEX]
    assert check.remembered("regex", "abc") == ""


def test_a_trial_below_the_limit_leaves_it_open(check: GrammarCheck) -> None:
    text = json.dumps(patterns(16))
    with pytest.raises(GrammarUndecided):
        check.check("json", text, cpu_seconds=0.03)
    assert check.remembered("json", text) is None
    assert refusal(check, "json", text) == TOO_COMPLEX
    assert check.remembered("json", text) == TOO_COMPLEX
    accept(check, "regex", "below[ab]", cpu_seconds=0.2)


def test_a_trial_is_charged_what_it_takes_of_a_core_not_what_it_waits(check: GrammarCheck) -> None:
    small = check.check("regex", "charged[ab]")
    assert 0 < small.cpu_seconds < CPU_SECONDS
    assert check.check("regex", "charged[ab]").cpu_seconds == 0  # known
    assert check.check("json", json.dumps(patterns(15))).cpu_seconds == CPU_SECONDS  # the kernel ended it


def test_cheap_mistakes_never_reach_the_helper() -> None:
    check = GrammarCheck()
    assert "repeats" in refusal(check, "regex", "foo**")
    assert "no type" in refusal(check, "json", '{"type": "strng"}')
    assert check.num_trials == 0 and check._process is None
    check.close()


def test_a_lost_helper_is_replaced_and_close_leaves_none() -> None:
    check = GrammarCheck()
    accept(check, "regex", "first")
    assert check._process is not None
    lost = check._process
    lost.kill()
    lost.wait()
    accept(check, "regex", "second")
    process = check._process
    assert process is not None and process.pid != lost.pid
    check.close()
    assert not psutil.pid_exists(process.pid)


def test_a_verdict_that_nobody_gave_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    check = GrammarCheck()
    try:
        accept(check, "regex", "first")
        assert check._process is not None
        check._process.send_signal(signal.SIGSTOP)  # a helper that gets no processor
        monkeypatch.setattr(grammar_check, "PATIENCE_S", 0.2)
        with pytest.raises(GrammarUntried, match="no verdict"):
            check.check("regex", "second")
        check._process.send_signal(signal.SIGCONT)
        monkeypatch.undo()
        accept(check, "regex", "second")
    finally:
        check.close()


def test_a_helper_that_ends_with_a_trial_in_its_hands_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    check = GrammarCheck()
    try:
        answers = iter([b"", STARTED + msgspec.msgpack.encode(("", 0.01))])
        monkeypatch.setattr(check, "_ask", lambda *_: next(answers))
        accept(check, "regex", "first")
        answers = iter([b"", b""])
        with pytest.raises(GrammarUntried, match="twice"):
            check.check("regex", "second")
        answers = iter([STARTED])
        assert refusal(check, "regex", "third") == TOO_COMPLEX
    finally:
        check.close()


def test_many_at_once(check: GrammarCheck) -> None:
    def one(number: int) -> bool:
        trial = check.check("regex" if number % 3 else "json", f"x{number}" if number % 3 else '{"$ref": "#"}')
        return trial.problem == ""

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(one, range(60)))
    assert results == [number % 3 != 0 for number in range(60)]
