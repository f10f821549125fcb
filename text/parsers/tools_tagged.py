"""Calls of tools whose arguments stand one by one between tags: Qwen3-Coder, GLM-4.5 and later, MiniMax M2.

Not JSON: values are bare text, whose type the tool's schema tells (text/parsers/arguments.py).
A call that breaks before its first argument is given back as text; one that breaks later ends incomplete, and what
follows up to its closing tag is not shown.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from .arguments import ArgumentKinds, TaggedArguments
from .cursor import Call, Parser, Steps, drop


class TaggedCalls(Parser):
    """What the formats of this module share.

    Args:
        kinds: what types the arguments of the tools have.
    """

    starts: ClassVar[tuple[str, ...]] = ("<tool_call>",)
    end: ClassVar[str] = "</tool_call>"

    def __init__(self, kinds: ArgumentKinds) -> None:
        super().__init__()
        self._kinds = kinds

    def _run(self) -> Steps[None]:
        cursor = self._cursor
        mark = yield from cursor.until(self.starts, self._text)
        while mark:
            whole = yield from self._read_section(mark)
            mark = ""
            if not whole:
                mark = yield from cursor.until((*self.starts, self.end), drop)
            if mark not in self.starts:
                mark = yield from cursor.until(self.starts, self._text)

    @abstractmethod
    def _read_section(self, opening: str) -> Steps[bool]:
        """Read what follows the first tag; False when a call broke after it had begun."""


class Glm(TaggedCalls):
    """`<tool_call>NAME`, then `<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>` for each argument."""

    def _read_section(self, opening: str) -> Steps[bool]:
        cursor = self._cursor
        cursor.record()
        yield from cursor.blanks()
        call = Call(self)
        fine = call.named((yield from cursor.name()))
        yield from cursor.blanks()
        mark = yield from cursor.accept("<arg_key>", self.end)
        if not fine or not mark:
            self._text(opening + cursor.recorded())
            return True
        cursor.recorded()
        arguments = TaggedArguments(call, self._kinds)
        whole = True
        while whole and mark == "<arg_key>":
            key, closed = yield from cursor.word(("</arg_key>",))
            yield from cursor.blanks()
            whole = bool(closed) and bool((yield from cursor.accept("<arg_value>")))
            if whole:
                whole = yield from arguments.read(cursor, key.strip(), "</arg_value>")
                yield from cursor.blanks()
                mark = yield from cursor.accept("<arg_key>", self.end)
        return _ended(call, arguments, whole and mark == self.end)


class QwenCoder(TaggedCalls):
    """`<tool_call><function=NAME>`, then `<parameter=KEY>VALUE</parameter>` for each argument, on lines of their own.

    Models leave the first tag out at times, so `<function=` opens a call as well.
    """

    starts = ("<tool_call>", "<function=")

    def _read_section(self, opening: str) -> Steps[bool]:
        cursor = self._cursor
        cursor.record()
        if opening != "<function=":
            yield from cursor.blanks()
            yield from cursor.accept("<function=")
        call = Call(self)
        fine = call.named((yield from cursor.name()))
        closed = yield from cursor.accept(">")
        if not fine or not closed:
            self._text(opening + cursor.recorded())
            return True
        cursor.recorded()
        arguments = TaggedArguments(call, self._kinds, line_breaks=True)
        whole = yield from _read_arguments(self, arguments, ("<parameter=", ">", "</parameter>"), "</function>")
        if not _ended(call, arguments, whole):
            return False
        cursor.record()
        yield from cursor.blanks()
        closed = yield from cursor.accept(self.end)
        blanks = cursor.recorded()
        self._text("" if closed else blanks)
        return True


class MiniMax(TaggedCalls):
    """`<minimax:tool_call>`, in it `<invoke name="NAME">` with `<parameter name="KEY">VALUE</parameter>`."""

    starts = ("<minimax:tool_call>",)
    end = "</minimax:tool_call>"

    def _read_section(self, opening: str) -> Steps[bool]:
        cursor = self._cursor
        while True:
            cursor.record()
            yield from cursor.blanks()
            mark = yield from cursor.accept('<invoke name="', self.end)
            if mark == self.end and not opening:
                cursor.recorded()
                return True
            call = Call(self)
            fine = mark != self.end and call.named((yield from cursor.name()))
            closed = (yield from cursor.accept('">')) if fine else ""
            if not closed:
                self._text(opening + cursor.recorded())
                return True
            cursor.recorded()
            opening = ""
            arguments = TaggedArguments(call, self._kinds)
            tags = ('<parameter name="', '">', "</parameter>")
            whole = yield from _read_arguments(self, arguments, tags, "</invoke>")
            if not _ended(call, arguments, whole):
                return False


def _read_arguments(
    parser: TaggedCalls, arguments: TaggedArguments, tags: tuple[str, str, str], end: str
) -> Steps[bool]:
    """Read arguments up to the tag `end`; `tags` stand before a key, after it and after the value."""
    cursor = parser._cursor
    before, after, close = tags
    while True:
        yield from cursor.blanks()
        mark = yield from cursor.accept(before, end)
        if mark != before:
            return mark == end
        key, closed = yield from cursor.word((after,))
        if not closed or not (yield from arguments.read(cursor, key.strip(), close)):
            return False


def _ended(call: Call, arguments: TaggedArguments, whole: bool) -> bool:
    if whole:
        arguments.close()
    elif not call.started:
        call.arguments("")  # its name was read: it has begun
    call.end(whole)
    return whole
