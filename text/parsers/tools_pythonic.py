"""Calls of tools written as a Python list: `[search(query="sea", limit=3), weather(city='Oslo')]` (Llama 4 and others).

Not Python: names, keyword arguments and literals, nothing else, and nothing is run. The list stands at the very
beginning or after `<|python_start|>`; an argument is handed on when it is whole.
A list that breaks before its first call is open is given back as text; later the call at hand ends incomplete, and what
follows is not shown.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from typing import Any

from .cursor import Call, Parser, Steps, drop
from .json_values import MAX_DEPTH, is_unicode, whole_value

_START, _END = "<|python_start|>", "<|python_end|>"
MAX_LITERAL = 1 << 18  # reading a list takes hundreds of bytes an item
_PLAIN = re.compile(r"""[^\\"'()\[\]{},]+""")
_QUOTED = {quote: re.compile(rf"[^\\{quote}]+") for quote in "\"'"}
_CLOSING = {"(": ")", "[": "]", "{": "}"}


class Pythonic(Parser):
    """A list of calls in Python's spelling."""

    def _run(self) -> Steps[None]:
        cursor = self._cursor
        blanks: list[str] = []
        whole = True
        if (yield from cursor.blanks(blanks.append)) == "[":
            whole = yield from self._read_list("".join(blanks))
        else:
            self._text("".join(blanks))
        while (yield from cursor.until((_START,), self._text if whole else drop)):
            whole = yield from self._read_list(_START)

    def _read_list(self, opening: str) -> Steps[bool]:
        cursor = self._cursor
        cursor.record()
        yield from cursor.blanks()
        yield from cursor.accept("[")
        while True:
            yield from cursor.blanks()
            call = Call(self)
            fine = call.named((yield from cursor.name()))
            if not fine or not (yield from cursor.accept("(")):
                self._text(opening + cursor.recorded())
                return True
            cursor.recorded()
            opening = ""
            whole = yield from self._read_arguments(call)
            call.end(whole)
            if not whole:
                return False
            cursor.record()
            after = yield from cursor.blanks()
            if after != ",":
                break
            cursor.take(1)
        if after == "]":
            cursor.take(1)
            cursor.recorded()
            yield from cursor.blanks()
            yield from cursor.accept(_END)
        else:
            self._text(cursor.recorded())
        return True

    def _read_arguments(self, call: Call) -> Steps[bool]:
        cursor = self._cursor
        call.arguments("{")
        separator = ""
        while (yield from cursor.blanks()) != ")":
            key = yield from cursor.name()
            yield from cursor.blanks()
            if not key or not (yield from cursor.accept("=")):
                return False
            literal = yield from self._literal()
            value = as_json(literal) if len(literal) <= MAX_LITERAL else None
            if value is None:
                return False
            call.arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: {value}")
            separator = ", "
            if (yield from cursor.peek()) == ",":
                cursor.take(1)
        cursor.take(1)
        call.arguments("}")
        return True

    def _literal(self) -> Steps[str]:
        """Consume up to the comma or bracket that ends the argument; empty when brackets do not match."""
        cursor, parts, open_ = self._cursor, list[str](), list[str]()
        while head := (yield from cursor.peek()):
            if plain := cursor.take_matching(_PLAIN):
                parts.append(plain)
            elif head in _QUOTED:
                yield from self._quoted(head, parts)
            elif head in _CLOSING:
                if len(open_) == MAX_DEPTH:
                    return ""
                open_.append(_CLOSING[head])
                parts.append(cursor.take(1))
            elif not open_ and head in ",)":
                return "".join(parts)
            elif head == "," or (open_ and head == open_[-1]):
                if head != ",":
                    open_.pop()
                parts.append(cursor.take(1))
            else:
                return ""
        return ""

    def _quoted(self, quote: str, parts: list[str]) -> Steps[None]:
        cursor = self._cursor
        parts.append(cursor.take(1))
        while head := (yield from cursor.peek()):
            if head == quote:
                parts.append(cursor.take(1))
                return
            if head == "\\":
                yield from cursor.at_least(2)
                parts.append(cursor.take(2))
            else:
                parts.append(cursor.take_matching(_QUOTED[quote]))


def as_json(literal: str) -> str | None:
    """Return a literal of Python, or of JSON, as JSON; None for everything else.

    Example:
        >>> as_json("{'a': (1, None)}")
        '{"a": [1, null]}'
    """
    literal = literal.strip()
    try:
        with warnings.catch_warnings():  # of escapes that are none
            warnings.simplefilter("ignore")
            value = ast.literal_eval(literal)
        if not _is_plain(value):
            return None
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        return text if is_unicode(text) else json.dumps(value)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return whole_value(literal)


def _is_plain(value: Any) -> bool:
    todo = [value]
    while todo:
        item = todo.pop()
        if isinstance(item, dict):
            if not all(isinstance(key, str) for key in item):
                return False
            todo += item.values()
        elif isinstance(item, (list, tuple)):
            todo += item
        elif not (item is None or isinstance(item, (str, int, float))):
            return False
    return True
