"""`generate` and `chat` in a terminal or a pipe: what is streamed, remembered, stopped and refused."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
from rich.console import Console

from moewe.runtime.generation_defaults import GenerationDefaults
from moewe.runtime.messages import Capturing, Delta, Loading
from moewe.runtime.params import SamplingParams
from moewe.server.commands import local
from moewe.server.flags.values import Settings
from moewe.server.terminal.bars import LoadingBars


class FakeSession:
    """Says each of `answers` in turn, piece by piece; a piece may be an exception."""

    def __init__(self, *answers: Sequence[Any]) -> None:
        self.answers = list(answers)
        self.prompts: list[str] = []
        self.used: list[SamplingParams] = []
        self.left_early = 0
        self.defaults = GenerationDefaults()

    def params(self, prompt: Sequence[int], given: dict[str, Any], otherwise: dict[str, Any]) -> SamplingParams:
        return self.defaults.params(given, otherwise=otherwise, room=100 - len(prompt))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.prompts.append(text)
        return [1]

    def render(self, messages: Sequence[dict[str, str]]) -> str:
        return "|".join(f"{message['role'][0]}:{message['content']}" for message in messages)

    def stream(self, prompts: Any, params: Sequence[SamplingParams]) -> Iterator[tuple[int, Delta]]:
        self.used += params
        finished = False
        try:
            for piece in self.answers.pop(0):
                if isinstance(piece, BaseException):
                    raise piece
                yield 0, piece if isinstance(piece, Delta) else Delta(request_id="x", text=piece)
            finished = True
        finally:
            self.left_early += not finished


def settings(prompt: str | None = None, **sample: Any) -> Settings:
    return Settings(engine={"model": "m"}, http={}, sample=sample, shared={}, prompt=prompt)


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch) -> Any:
    def prepare(*answers: Sequence[Any], typed: str = "", interactive: bool = False) -> FakeSession:
        fake = FakeSession(*answers)
        keyboard = io.StringIO(typed)
        monkeypatch.setattr(keyboard, "isatty", lambda: interactive, raising=False)
        monkeypatch.setattr("sys.stdin", keyboard)
        monkeypatch.setattr(local, "start", lambda settings: nullcontext(fake))
        return fake

    return prepare


def test_generate_streams_and_ends_with_a_newline(say: Any, capsys: pytest.CaptureFixture[str]) -> None:
    fake = say([" Paris", ".\x1b[2J"])
    assert local.generate(settings("France is", max_tokens=5)) == 0
    assert capsys.readouterr().out == " Paris.[2J\n"
    assert fake.prompts == ["France is"]
    assert fake.used[0].temperature == 0 and fake.used[0].max_tokens == 5


def test_an_empty_answer_is_explained(say: Any, capsys: pytest.CaptureFixture[str]) -> None:
    say([Delta(request_id="x", finish_reason="stop")], ["word"])
    assert local.generate(settings("Who?")) == 0
    out, err = capsys.readouterr()
    assert out == "\n" and err == "moewe: the model ended without text; for instruction models use `moewe chat`\n"
    assert local.generate(settings("Who?")) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("prompt", [None, "-"])
def test_generate_reads_a_pipe(say: Any, prompt: str | None) -> None:
    fake = say(["x"], typed="from\na pipe")
    local.generate(settings(prompt))
    assert fake.prompts == ["from\na pipe"]


def test_generate_without_a_prompt_on_a_terminal_is_refused(say: Any) -> None:
    say(interactive=True)
    with pytest.raises(ValueError, match="no PROMPT"):
        local.generate(settings())


def test_a_request_that_failed_is_an_error(say: Any) -> None:
    say(["a", Delta(request_id="x", finish_reason="error", error="logits are not finite")])
    with pytest.raises(ValueError, match="not finite"):
        local.generate(settings("p"))


def test_chat_remembers_turns_until_cleared(say: Any, capsys: pytest.CaptureFixture[str]) -> None:
    fake = say(["one"], ["t", "wo"], ["three"], typed="a\n\nb\n/clear\nc\n/exit\nnever\n")
    assert local.chat(settings()) == 0
    assert fake.prompts == ["u:a", "u:a|a:one|u:b", "u:c"]
    assert capsys.readouterr().out == "one\ntwo\nthree\n"


def test_chat_on_a_terminal_shows_help_and_ends_at_eof(say: Any, capsys: pytest.CaptureFixture[str]) -> None:
    say(["hi"], typed="/help\na\n", interactive=True)
    local.chat(settings())
    out = capsys.readouterr().out
    assert out.count("/clear starts over") == 2 and "hi\n" in out


def test_ctrl_c_at_the_prompt_drops_the_line_and_twice_leaves(
    say: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed: Iterator[Any] = iter([KeyboardInterrupt, "a", KeyboardInterrupt, KeyboardInterrupt, "never"])

    def read(prompt: str) -> str:
        if (line := next(typed)) is KeyboardInterrupt:
            raise line
        return str(line)

    fake = say(["hi"], interactive=True)
    monkeypatch.setattr("builtins.input", read)
    with pytest.raises(KeyboardInterrupt):
        local.chat(settings())
    assert fake.prompts == ["u:a"] and list(typed) == ["never"]
    assert capsys.readouterr().out.count("(Ctrl-D leaves; so does another Ctrl-C)") == 2


def test_an_unknown_command_is_not_sent(say: Any, capsys: pytest.CaptureFixture[str]) -> None:
    fake = say(["hi"], typed="/foo\n/usr/bin is what?\n")
    local.chat(settings())
    assert "there is no /foo; commands are /clear, /help and /exit" in capsys.readouterr().err
    assert fake.prompts == ["u:/usr/bin is what?"]


@pytest.mark.parametrize("command", [local.generate, local.chat])
def test_stdin_that_is_no_text_is_named(say: Any, monkeypatch: pytest.MonkeyPatch, command: Any) -> None:
    say()
    for errors in ("strict", "surrogateescape"):
        wrong = io.TextIOWrapper(io.BytesIO(b"ab\xff\n"), encoding="utf-8", errors=errors)
        monkeypatch.setattr("sys.stdin", wrong)
        with pytest.raises(ValueError, match="stdin is not UTF-8"):
            command(settings())


def test_ctrl_c_stops_the_answer_and_keeps_what_was_said(say: Any, capsys: pytest.CaptureFixture[str]) -> None:
    fake = say(["some", KeyboardInterrupt()], ["more"], typed="a\nb\n")
    local.chat(settings())
    assert "some [stopped]\nmore\n" in capsys.readouterr().out
    assert fake.prompts[1] == "u:a|a:some|u:b" and fake.left_early == 1


def test_a_turn_that_cannot_be_answered_is_taken_back(say: Any, capsys: pytest.CaptureFixture[str]) -> None:
    fake = say([ValueError("prompt is too long")], ["fine"], typed="a\nb\n")
    local.chat(settings())
    out, err = capsys.readouterr()
    assert "prompt is too long" in err and out == "fine\n"
    assert fake.prompts == ["u:a", "u:b"]


def test_chat_without_a_template_is_refused_before_a_question(say: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = say(typed="a\n")

    def render(messages: Any) -> str:
        raise ValueError("no chat template")

    monkeypatch.setattr(fake, "render", render)
    with pytest.raises(ValueError, match="no chat template"):
        local.chat(settings())


def test_bars_add_up_all_ranks_on_a_terminal_only() -> None:
    screen = io.StringIO()
    bars = LoadingBars(Console(file=screen, force_terminal=True, width=100))
    with bars.shown():
        bars.update(0, Loading(rank=0, done_bytes=1 << 20, total_bytes=2 << 20))
        bars.update(1, Loading(rank=0, done_bytes=2 << 20, total_bytes=2 << 20))
    assert bars.visible and "loading weights" in screen.getvalue() and "3.0/4.0" in screen.getvalue()
    with bars.shown():
        for rank in range(2):
            bars.update(0, Capturing(rank=rank, done=3 + rank, total=33))
    assert "capturing CUDA graphs" in screen.getvalue() and "7/66" in screen.getvalue()
    silent = LoadingBars(Console(file=(nothing := io.StringIO())))
    with silent.shown():
        silent.update(0, Loading(rank=0, done_bytes=1, total_bytes=2))
    assert not silent.visible and nothing.getvalue() == ""
