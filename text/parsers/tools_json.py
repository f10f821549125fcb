"""Calls of tools that stand as JSON in the answer: between tags, after a mark, or at its very beginning.

Hermes and Qwen (`<tool_call>{...}</tool_call>`), Mistral (`[TOOL_CALLS]`, list or name by name), Llama 3 (bare), and
DeepSeek and Kimi (sections of calls whose name stands before the JSON). Not a check of names or schemas.
A call that breaks before its arguments begin is given back as text; one that breaks later ends incomplete, and what
follows up to its closing mark is not shown.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .cursor import Call, Parser, Steps, drop
from .json_values import read_call, read_value


class JsonCalls(Parser):
    """What the formats of this module share."""

    def _read_calls(self, opening: str, *, must_have: bool = False) -> Steps[bool]:
        """Read calls, alone, in a list, or one after the other; what is none becomes text again.

        Args:
            opening: the mark before them, consumed already.
            must_have: an object without arguments is no call.

        Returns:
            False when the last call broke after it had begun.
        """
        cursor = self._cursor
        cursor.record()
        in_list = (yield from cursor.blanks()) == "["
        if in_list:
            cursor.take(1)
        while True:
            call = Call(self)
            whole = yield from read_call(cursor, call, must_have=must_have)
            if not call.started:
                self._text(opening + cursor.recorded())
                return True
            cursor.recorded()
            call.end(whole)
            if not whole:
                return False
            opening = ""
            cursor.record()
            after = yield from cursor.blanks()
            if after in (",", ";"):
                cursor.take(1)
                after = yield from cursor.blanks()
            if after != "{":
                break
        if in_list and after == "]":
            cursor.take(1)
            cursor.recorded()
        else:
            self._text(cursor.recorded())
        return True


class TaggedJson(JsonCalls):
    """JSON between two tags.

    Args:
        start, end: the tags.
    """

    def __init__(self, start: str = "<tool_call>", end: str = "</tool_call>") -> None:
        super().__init__()
        self._tags = (start, end)

    def _run(self) -> Steps[None]:
        cursor, (start, end) = self._cursor, self._tags
        mark = yield from cursor.until((start,), self._text)
        while mark:
            before = self.num_calls
            whole = yield from self._read_calls(start)
            if not whole:
                mark = yield from cursor.until((start, end), drop)
                if mark == start:
                    continue
            elif self.num_calls > before:
                yield from cursor.accept(end)
            mark = yield from cursor.until((start,), self._text)


class Mistral(JsonCalls):
    """`[TOOL_CALLS]` before a list of calls, or before each `name[ARGS]{...}` (`[CALL_ID]` may stand between)."""

    def _run(self) -> Steps[None]:
        cursor, start = self._cursor, "[TOOL_CALLS]"
        mark = yield from cursor.until((start,), self._text)
        while mark:
            blanks = [start]
            listed = (yield from cursor.blanks(blanks.append)) in ("[", "{")
            whole = yield from (self._read_calls if listed else self._read_named)("".join(blanks))
            mark = yield from cursor.until((start,), self._text if whole else drop)

    def _read_named(self, opening: str) -> Steps[bool]:
        cursor = self._cursor
        cursor.record()
        call = Call(self)
        name = yield from cursor.name()
        yield from cursor.blanks()
        if (yield from cursor.accept("[CALL_ID]", "[ARGS]")) == "[CALL_ID]":
            yield from cursor.name()
            yield from cursor.accept("[ARGS]")
        if (yield from cursor.blanks()) != "{" or not call.named(name):
            self._text(opening + cursor.recorded())
            return True
        cursor.recorded()
        whole = yield from read_value(cursor, call.arguments)
        call.end(whole)
        return whole


class BareJson(JsonCalls):
    """Calls at the very beginning, or after `<|python_tag|>`: `{"name": ..., "parameters": {...}}; {...}`."""

    def _run(self) -> Steps[None]:
        cursor, start = self._cursor, "<|python_tag|>"
        blanks: list[str] = []
        if (yield from cursor.blanks(blanks.append)) == "{":
            whole = yield from self._read_calls("".join(blanks), must_have=True)
        else:
            self._text("".join(blanks))
            whole = True
        while True:
            mark = yield from cursor.until((start,), self._text if whole else drop)
            if not mark:
                return
            whole = yield from self._read_calls(start, must_have=True)


@dataclass(frozen=True, kw_only=True)
class SectionMarks:
    """The marks of a section of calls.

    Attributes:
        begin, end: of the section.
        call_begin, call_end: of a call.
        separator: between what stands before the arguments and them.
    """

    begin: str
    end: str
    call_begin: str
    call_end: str
    separator: str

    @property
    def all(self) -> tuple[str, ...]:
        """All of them."""
        return self.begin, self.end, self.call_begin, self.call_end, self.separator


DEEPSEEK = SectionMarks(
    begin="<｜tool▁calls▁begin｜>", end="<｜tool▁calls▁end｜>", call_begin="<｜tool▁call▁begin｜>",
    call_end="<｜tool▁call▁end｜>", separator="<｜tool▁sep｜>",
)  # fmt: skip
KIMI = SectionMarks(
    begin="<|tool_calls_section_begin|>", end="<|tool_calls_section_end|>", call_begin="<|tool_call_begin|>",
    call_end="<|tool_call_end|>", separator="<|tool_call_argument_begin|>",
)  # fmt: skip
_KIMI_NAME = re.compile(r"(?:functions\.)?(.*?)(?::\d+)?", re.DOTALL)


class SectionedCalls(Parser):
    """Calls in a section of their own.

    DeepSeek V3 and R1 write `function<sep>NAME`, a line break and a fenced block of JSON; V3.1 `NAME<sep>JSON`; Kimi
    `functions.NAME:0<sep>JSON`. All three are read, whichever comes.

    Args:
        marks: of the format.
    """

    def __init__(self, marks: SectionMarks) -> None:
        super().__init__()
        self._marks = marks

    def _run(self) -> Steps[None]:
        cursor, marks = self._cursor, self._marks
        while (yield from cursor.until((marks.begin,), self._text)):
            pending = marks.begin
            while True:
                cursor.record()
                yield from cursor.blanks()
                mark = yield from cursor.accept(marks.call_begin, marks.end)
                pending += cursor.recorded()
                if mark != marks.call_begin:
                    break
                mark = yield from self._read_one(pending)
                pending = ""
                if mark != marks.call_end:
                    break
            if mark != marks.end or pending.startswith(marks.begin):
                self._text(pending)

    def _read_one(self, opening: str) -> Steps[str]:
        """Read a call after its first mark; return the mark that ended it, empty if there was none.

        What is no call has become text again.
        """
        cursor, marks = self._cursor, self._marks
        cursor.record()
        call = Call(self)
        name, mark = yield from cursor.word((marks.separator,))
        name = name.strip()
        if mark and name == "function":
            line, _ = yield from cursor.word(("\n",))
            name = line.strip()
            if (yield from cursor.blanks()) == "`":
                yield from cursor.accept("```json")
        elif found := _KIMI_NAME.fullmatch(name):
            name = found[1]
        if not mark or (yield from cursor.blanks()) != "{" or not call.named(name):
            self._text(opening + cursor.recorded())
            return ""
        cursor.recorded()
        call.end((yield from read_value(cursor, call.arguments)))
        return (yield from cursor.until((marks.call_end, marks.end), drop))
