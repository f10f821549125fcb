"""`moewe generate` and `moewe chat`: a model under this terminal's hand, its text streamed to stdout.

Not a server; the model is gone when the command ends. Ctrl-C ends `generate`, and in `chat` the answer that runs.
Units: tokens.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ...runtime.params import SamplingParams
from ..flags.values import Settings
from ..terminal.bars import LoadingBars, printable
from ..terminal.stdout import put
from .serve import config_of

if TYPE_CHECKING:
    from ...runtime.session import Session

NOT_UTF8 = "stdin is not UTF-8 text; convert it, for example with iconv"
GENERATE_DEFAULTS: dict[str, Any] = {"max_tokens": 256, "temperature": 0.0}
CHAT_HELP = (
    "Type a message. /clear starts over, /help shows this, /exit or Ctrl-D leaves; "
    "Ctrl-C stops an answer or drops a line, and leaves when pressed twice."
)
_COMMAND = re.compile(r"/\w*")


def generate(settings: Settings) -> int:
    """Continue the prompt once."""
    SamplingParams(**settings.sample)  # a wrong one is known before anything loads
    prompt = settings.prompt
    if prompt is None or prompt == "-":
        if sys.stdin.isatty():
            raise ValueError('no PROMPT is given; write moewe generate MODEL "text", or pipe text in')
        prompt = _read_stdin()
    with start(settings) as session:
        said = False
        for text in answer(session, session.encode(prompt), settings.sample):
            said = True
            put(text)
        put("\n")
    if not said:
        print("moewe: the model ended without text; for instruction models use `moewe chat`", file=sys.stderr)
    return 0


def chat(settings: Settings) -> int:
    """Talk until the input ends."""
    SamplingParams(**settings.sample)
    interactive = sys.stdin.isatty()
    with start(settings) as session:
        session.render([{"role": "user", "content": "Hello"}])  # no template is better known now than after a question
        if interactive:
            print(CHAT_HELP)
        messages: list[dict[str, str]] = []
        for line in _lines(interactive):
            if line == "/clear":
                messages = []
                continue
            if line in ("/help", "/?"):
                print(CHAT_HELP)
                continue
            if _COMMAND.fullmatch(line):
                print(f"moewe: there is no {line}; commands are /clear, /help and /exit", file=sys.stderr)
                continue
            messages.append({"role": "user", "content": line})
            said = _say(session, messages, settings.sample)
            if said is None:
                messages.pop()
            else:
                messages.append({"role": "assistant", "content": said})
    return 0


def start(settings: Settings) -> Session:
    """Start the model with bars while it loads."""
    config = config_of(settings)
    from ...runtime.session import Session, locate

    config = locate(config)
    bars = LoadingBars()
    with bars.shown():
        return Session.start(config, on_loading=bars.update)


def answer(session: Session, prompt: list[int], sample: dict[str, Any]) -> Iterator[str]:
    """Yield the text for `prompt`, safe to print; `sample` is what the command line says of sampling."""
    params = session.params(prompt, sample, GENERATE_DEFAULTS)
    for _, delta in session.stream([prompt], [params]):
        if delta.finish_reason == "error":
            raise ValueError(delta.error or "the request failed")
        if delta.text:
            yield printable(delta.text)


def _read_stdin() -> str:
    try:
        text = sys.stdin.read()
        text.encode()  # where the locale is not UTF-8, wrong bytes come as lone surrogates
    except UnicodeError:
        raise ValueError(NOT_UTF8) from None
    return text


def _lines(interactive: bool) -> Iterator[str]:
    """Yield what the person types, until Ctrl-D, /exit, or a second Ctrl-C at the prompt (KeyboardInterrupt)."""
    dropped = False
    while True:
        try:
            line = input("> " if interactive else "").strip()
            line.encode()
        except EOFError:
            if interactive:
                print()
            return
        except UnicodeError:
            raise ValueError(NOT_UTF8) from None
        except KeyboardInterrupt:
            if dropped or not interactive:
                raise
            dropped = True
            print("\n(Ctrl-D leaves; so does another Ctrl-C)")
            continue
        dropped = False
        if line in ("/exit", "/quit"):
            return
        if line:
            yield line


def _say(session: Session, messages: list[dict[str, str]], sample: dict[str, Any]) -> str | None:
    """Print the answer as it comes and return it (what there is of it after Ctrl-C); None when it cannot be given."""
    parts: list[str] = []
    try:
        prompt = session.encode(session.render(messages), add_special_tokens=False)
        stream = answer(session, prompt, sample)
        try:
            for text in stream:
                parts.append(text)
                put(text)
        except KeyboardInterrupt:
            stream.close()  # type: ignore[attr-defined]
            print(" [stopped]", end="")
    except ValueError as error:
        print(f"moewe: {error}", file=sys.stderr)
        return None
    put("\n")
    return "".join(parts)
