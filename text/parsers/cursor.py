"""Text that arrives in pieces, read as if it were all there: the ground under every parser of this folder.

Not a parser. A reader is a generator that yields when it needs more text; what it has consumed is not kept, so the work
is linear in the text however it is cut. `record` keeps a copy for readers that may have to give the text back.
Units: characters.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from typing import TypeAlias, TypeVar

from .events import CallArguments, CallEnd, CallStart, Event, Text

_Result = TypeVar("_Result")
Steps: TypeAlias = Generator[None, None, _Result]
Sink: TypeAlias = Callable[[str], None]

MAX_WORD = 256
_BLANKS = re.compile(r"[ \t\r\n]+")
_NAME = re.compile(rf"[\w.\-:/]{{1,{MAX_WORD}}}")
_NAME_PART = re.compile(r"[\w.\-:/]+")


@lru_cache(maxsize=64)
def _any_of(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, markers)))


def drop(_: str) -> None:
    """Take text that nobody needs."""


class Cursor:
    """A place in text of which more may come.

    Attributes:
        ended: nothing more will come.
    """

    def __init__(self, text: str = "", *, ended: bool = False) -> None:
        self.ended = ended
        self._text = text
        self._at = 0
        self._record: list[str] | None = None

    def push(self, text: str) -> None:
        """Add text at the end."""
        self._text = self._text[self._at :] + text
        self._at = 0

    def record(self) -> None:
        """Keep a copy of all that is consumed from here on."""
        self._record = []

    def recorded(self) -> str:
        """Return the copy and keep none any more."""
        parts, self._record = self._record, None
        return "".join(parts or ())

    def take(self, count: int) -> str:
        """Consume `count` characters that are there."""
        taken = self._text[self._at : self._at + count]
        self._at += len(taken)
        if self._record is not None:
            self._record.append(taken)
        return taken

    def take_all(self) -> str:
        """Consume all the text that is there."""
        return self.take(len(self._text) - self._at)

    def take_matching(self, pattern: re.Pattern[str]) -> str:
        """Consume what of the text that is there matches here; more of it may come."""
        found = pattern.match(self._text, self._at)
        return self.take(found.end() - self._at) if found else ""

    def peek(self) -> Steps[str]:
        """Return the next character without consuming it; empty at the end."""
        while self._at >= len(self._text):
            if self.ended:
                return ""
            yield
        return self._text[self._at]

    def at_least(self, count: int) -> Steps[str]:
        """Return the next `count` characters without consuming them; fewer at the end."""
        while len(self._text) - self._at < count and not self.ended:
            yield
        return self._text[self._at : self._at + count]

    def blanks(self, out: Sink = drop) -> Steps[str]:
        """Consume blanks and line breaks; return the character after them."""
        while True:
            head = yield from self.peek()
            if not head or head not in " \t\r\n":
                return head
            out(self.take_matching(_BLANKS))

    def name(self) -> Steps[str]:
        """Consume what may be a name and return it, up to MAX_WORD characters or a few more."""
        parts: list[str] = []
        while sum(map(len, parts)) <= MAX_WORD:
            yield from self.peek()
            part = self.take_matching(_NAME_PART)
            if not part:
                break
            parts.append(part)
        return "".join(parts)

    def accept(self, *markers: str) -> Steps[str]:
        """Consume the marker that comes next and return it; empty when it is none of them."""
        while True:
            rest = self._text[self._at : self._at + max(map(len, markers))]
            for marker in markers:
                if rest.startswith(marker):
                    return self.take(len(marker))
            if self.ended or not any(marker.startswith(rest) for marker in markers):
                return ""
            yield

    def until(self, markers: Sequence[str], out: Sink) -> Steps[str]:
        """Hand on text up to the first marker, consume that and return it; empty at the end.

        No character that may belong to a marker is handed on before it is certain that it does not.
        """
        while True:
            found = _any_of(tuple(markers)).search(self._text, self._at)
            if found:
                self._hand_on(found.start() - self._at, out)
                return self.take(len(found[0]))
            rest = len(self._text) - self._at
            self._hand_on(rest if self.ended else rest - self._held(markers), out)
            if self.ended:
                return ""
            yield

    def rest(self, out: Sink) -> Steps[None]:
        """Hand on all that is left, as it comes."""
        while (yield from self.peek()):
            out(self.take_all())

    def word(self, markers: Sequence[str]) -> Steps[tuple[str, str]]:
        """Consume up to MAX_WORD characters and the marker after them; return both, or two empty texts."""
        reach = MAX_WORD + max(map(len, markers))
        while True:
            found = _any_of(tuple(markers)).search(self._text, self._at, self._at + reach)
            if found:
                return self.take(found.start() - self._at), self.take(len(found[0]))
            if self.ended or len(self._text) - self._at >= reach:
                return "", ""
            yield

    def _hand_on(self, count: int, out: Sink) -> None:
        if count > 0:
            out(self.take(count))

    def _held(self, markers: Sequence[str]) -> int:
        """Count the characters at the end that may begin a marker."""
        longest = min(max(map(len, markers)) - 1, len(self._text) - self._at)
        for count in range(longest, 0, -1):
            tail = self._text[-count:]
            if any(marker.startswith(tail) for marker in markers):
                return count
        return 0


class Parser(ABC):
    """An incremental parser: `feed` text as it comes, `finish` at its end; both return what is certain by then.

    Attributes:
        num_calls: calls that began so far.
        thinking: the text so far ends within reasoning.
    """

    def __init__(self) -> None:
        self.num_calls = 0
        self.thinking = False
        self._cursor = Cursor()
        self._events: list[Event] = []
        self._machine = self._run()

    def feed(self, text: str) -> list[Event]:
        """Take the next piece of text."""
        self._cursor.push(text)
        return self._advance()

    def finish(self) -> list[Event]:
        """Take the end of the text."""
        self._cursor.ended = True
        return self._advance()

    def put(self, event: Event) -> None:
        """Report an event."""
        self._events.append(event)

    def begin_call(self, name: str) -> int:
        """Report that a call begins and return its number. Nothing before this point becomes text again."""
        self._cursor.recorded()
        self.put(CallStart(self.num_calls, name))
        self.num_calls += 1
        return self.num_calls - 1

    @abstractmethod
    def _run(self) -> Steps[None]:
        """Read all of the text."""

    def _text(self, text: str) -> None:
        self._events.append(Text(text))

    def _advance(self) -> list[Event]:
        next(self._machine, None)
        events, self._events = self._events, []
        return events


class Call:
    """A call that is being read. It is reported as soon as its name is known and its arguments begin.

    Args:
        parser: whose call.
    """

    def __init__(self, parser: Parser) -> None:
        self.name = ""
        self.started = False
        self._parser = parser
        self._index = -1
        self._waiting: list[str] = []

    def named(self, name: str) -> bool:
        """Take the name of the function; False when it cannot be one."""
        if not _NAME.fullmatch(name):
            return False
        self.name = name
        if self._waiting:
            self.arguments("")
        return True

    def arguments(self, text: str) -> None:
        """Take the next characters of the arguments; they wait until there is a name."""
        self._waiting.append(text)
        if not self.name:
            return
        if not self.started:
            self.started = True
            self._index = self._parser.begin_call(self.name)
        for piece in self._waiting:
            self._parser.put(CallArguments(self._index, piece))
        self._waiting.clear()

    def end(self, complete: bool) -> None:
        """End a call that has started."""
        if self.started:
            self._parser.put(CallEnd(self._index, complete))
