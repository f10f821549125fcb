"""Reads JSON while it arrives and hands it on piece by piece, valid up to the last character handed on.

Not a decoder: values stay text. Strict but for one thing: a bare control character within a string, which models like
to write, comes out escaped. Escapes and numbers are handed on whole.
Units: characters; nesting up to MAX_DEPTH.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection

from .cursor import Call, Cursor, Sink, Steps, drop

MAX_DEPTH = 100
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_SCALAR = re.compile(r"[-+.\w]+", re.ASCII)
_WHOLE_SCALAR = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_CLOSING = {"{": "}", "[": "]"}


def read_value(cursor: Cursor, out: Sink) -> Steps[bool]:
    """Hand on one JSON value; False as soon as it is none, or when the text ends before it does."""
    open_: list[str] = []
    while True:
        head = yield from cursor.blanks(out)
        if head in _CLOSING:
            if len(open_) == MAX_DEPTH:
                return False
            open_.append(_CLOSING[head])
            out(cursor.take(1))
            after = yield from cursor.blanks(out)
            if after != open_[-1]:
                if head == "{" and not (yield from _read_key(cursor, out)):
                    return False
                continue
        elif not (yield from (read_string if head == '"' else _read_scalar)(cursor, out)):
            return False
        while open_:
            after = yield from cursor.blanks(out)
            if after == open_[-1]:
                open_.pop()
                out(cursor.take(1))
                continue
            if after != ",":
                return False
            out(cursor.take(1))
            if open_[-1] == "}" and not (yield from _read_key(cursor, out)):
                return False
            break
        else:
            return True


def read_string(cursor: Cursor, out: Sink) -> Steps[bool]:
    """Hand on a string with its quotes."""
    if (yield from cursor.peek()) != '"':
        return False
    out(cursor.take(1))
    while True:
        if plain := cursor.take_matching(_PLAIN):
            out(plain)
        head = yield from cursor.peek()
        if head == '"':
            out(cursor.take(1))
            return True
        if head == "\\":
            shown = yield from cursor.at_least(2)
            if shown == "\\u":
                shown = yield from cursor.at_least(6)
            if not _ESCAPE.fullmatch(shown):
                return False
            out(cursor.take(len(shown)))
        elif not head:
            return False
        elif head < " ":
            out(json.dumps(cursor.take(1))[1:-1])


def read_call(
    cursor: Cursor, call: Call, *, argument_keys: Collection[str] = ("arguments", "parameters"), must_have: bool = False
) -> Steps[bool]:
    """Read an object with a name and arguments into `call`.

    Args:
        cursor: before the object.
        call: what is filled in.
        argument_keys: where arguments stand.
        must_have: without arguments it is no call; else it is one with none.

    Returns:
        Whether it was a whole call. If not, `call.started` tells whether anything of it was reported.
    """
    if (yield from cursor.blanks()) != "{":
        return False
    cursor.take(1)
    has_arguments = False
    after = yield from cursor.blanks()
    while after != "}":
        key = yield from _decoded_string(cursor)
        if key is None or (yield from cursor.blanks()) != ":":
            return False
        cursor.take(1)
        if key in ("name", "function") and not call.name:
            yield from cursor.blanks()
            name = yield from _decoded_string(cursor)
            fine = name is not None and call.named(name)
        elif key in argument_keys and not has_arguments:
            has_arguments = True
            fine = yield from _read_arguments(cursor, call)
        else:
            fine = yield from read_value(cursor, drop)
        if not fine:
            return False
        after = yield from cursor.blanks()
        if after == ",":
            cursor.take(1)
            yield from cursor.blanks()
            after = ","
        elif after != "}":
            return False
    cursor.take(1)
    if not call.name or (must_have and not has_arguments):
        return False
    if not has_arguments:
        call.arguments("{}")
    return True


def whole_value(text: str) -> str | None:
    """Return `text` as valid JSON if it is one value, else None."""
    cursor, parts = Cursor(text, ended=True), list[str]()
    steps = read_value(cursor, parts.append)
    try:
        next(steps)
    except StopIteration as stopped:
        if not stopped.value:
            return None
    rest = cursor.take(len(text))
    return "".join(parts).strip() if not rest.strip() else None


def _read_arguments(cursor: Cursor, call: Call) -> Steps[bool]:
    head = yield from cursor.blanks()
    if head == "{":
        return (yield from read_value(cursor, call.arguments))
    if head == '"':  # an object written as JSON once more
        text = yield from _decoded_string(cursor)
        value = whole_value(text) if text is not None else None
        if value is None or not value.startswith("{") or not is_unicode(value):
            return False
        call.arguments(value)
        return True
    parts: list[str] = []
    if not (yield from _read_scalar(cursor, parts.append)) or parts != ["null"]:
        return False
    call.arguments("{}")
    return True


def is_unicode(text: str) -> bool:
    """Return whether `text` can be sent: lone surrogates cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _decoded_string(cursor: Cursor) -> Steps[str | None]:
    parts: list[str] = []
    fine = yield from read_string(cursor, parts.append)
    return str(json.loads("".join(parts))) if fine else None


def _read_key(cursor: Cursor, out: Sink) -> Steps[bool]:
    yield from cursor.blanks(out)
    if not (yield from read_string(cursor, out)):
        return False
    if (yield from cursor.blanks(out)) != ":":
        return False
    out(cursor.take(1))
    return True


def _read_scalar(cursor: Cursor, out: Sink) -> Steps[bool]:
    parts: list[str] = []
    while True:
        yield from cursor.peek()
        part = cursor.take_matching(_SCALAR)
        if not part:
            break
        parts.append(part)
    text = "".join(parts)
    if not _WHOLE_SCALAR.fullmatch(text):
        return False
    out(text)
    return True
