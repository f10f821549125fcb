"""gpt-oss's own format: messages on channels such as `<|channel|>analysis<|message|>...<|end|>`.

Not a tokenizer: the marks are special tokens that must be kept as text. `analysis` is reasoning, a message to
`functions.NAME` is a call, all other messages are the answer. Two messages of one kind are parted by a line break.
A call whose body is no JSON object is shown as text.
"""

from __future__ import annotations

import re

from .cursor import Call, Parser, Sink, Steps, drop
from .events import Reasoning, Text
from .json_values import read_value

_MESSAGE, _START, _CHANNEL = "<|message|>", "<|start|>", "<|channel|>"
_ENDS = ("<|end|>", "<|return|>", "<|call|>", _START, _CHANNEL)
HARMONY_MARKS = (_MESSAGE, *_ENDS, "<|constrain|>")
_OPENING = (_CHANNEL, _START, _MESSAGE, " to=", "to=")
_ANALYSIS = re.compile(r"<\|channel\|>\s*analysis\b")
_RECIPIENT = re.compile(r"\bto=functions\.([^\s<]+)")


class Harmony(Parser):
    """Messages on channels.

    Args:
        tools: report calls; else their JSON is text.
        reasoning: report `analysis` as reasoning; else it is text.
    """

    def __init__(self, *, tools: bool = True, reasoning: bool = True) -> None:
        super().__init__()
        self._tools = tools
        self._reasoning = reasoning
        self._last: type | None = None  # kind of the message before

    def _run(self) -> Steps[None]:
        """The prompt has opened a message of the assistant, so the output begins within a header."""
        cursor = self._cursor
        mark = yield from cursor.accept(*_OPENING)
        while True:
            if not mark:
                mark = yield from cursor.until((_START, _CHANNEL), self._text)
                if not mark:
                    return
            header, message = (mark, mark) if mark == _MESSAGE else (yield from self._header(mark))
            if not message:
                self._text(header)
                mark = ""
                continue
            mark = yield from self._body(header)
            if mark not in (_START, _CHANNEL):
                yield from cursor.blanks()
                mark = yield from cursor.accept(_START, _CHANNEL)

    def _header(self, opening: str) -> Steps[tuple[str, str]]:
        header, message = yield from self._cursor.word((_MESSAGE,))
        return opening + header, message

    def _body(self, header: str) -> Steps[str]:
        """Read a message; return the mark that ended it."""
        cursor = self._cursor
        recipient = _RECIPIENT.search(header)
        if self._tools and recipient:
            return (yield from self._call(recipient[1]))
        thinks = self._reasoning and bool(_ANALYSIS.search(header))
        kind: type[Text] | type[Reasoning] = Reasoning if thinks else Text
        self.thinking = thinks
        mark = yield from cursor.until(_ENDS, self._sink(kind))
        if mark:
            self.thinking = False
        return mark

    def _call(self, name: str) -> Steps[str]:
        cursor = self._cursor
        call = Call(self)
        cursor.record()
        if (yield from cursor.blanks()) == "{" and call.named(name):
            cursor.recorded()
            self._last = None
            call.end((yield from read_value(cursor, call.arguments)))
            return (yield from cursor.until(_ENDS, drop))
        out = self._sink(Text)
        out(cursor.recorded())
        return (yield from cursor.until(_ENDS, out))

    def _sink(self, kind: type[Text] | type[Reasoning]) -> Sink:
        """Return where the text of a message goes; a line break comes before one that follows another of its kind."""
        again = self._last is kind

        def out(text: str) -> None:
            nonlocal again
            if text:
                self.put(kind("\n" + text if again else text))
                again = False
                self._last = kind

        return out
