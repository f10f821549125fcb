"""Is a regular expression well formed? `check_regex` reads one from left to right and says where it goes wrong.

Not a matcher and not a limit on cost: it finds what the grammar library would take although it is no expression that
anybody meant (`foo**`), and what no automaton can do (look-around, back-references), in time linear in the text. What
stands inside a class or behind a backslash is left to the library, which reads those strictly.
Units: characters; positions count from 0.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .one_line import shorten

MAX_NESTING = 200
_REPEAT = re.compile(r"[*+?]|\{(\d{1,9})(?:(,)(\d{0,9}))?\}")
_NAME = re.compile(r"\(\?P?<[A-Za-z_]\w*>")
_FLAGS = re.compile(r"\(\?([imsu]*(?:-[imsu]+)?)([:)])")
_LOOKS = ("(?=", "(?!", "(?<=", "(?<!")


class RegexError(ValueError):
    """An expression that cannot be used; the text says where and why."""


@dataclass
class _Scan:
    """Where the reading stands; `atom` is true when what was read last may be repeated."""

    text: str
    at: int = 0
    atom: bool = False

    def fail(self, what: str) -> RegexError:
        return RegexError(f"{what} at character {self.at} of {_shown(self.text)}")


def check_regex(text: str) -> None:
    """Refuse what is not a regular expression.

    Raises:
        RegexError: one line with the place, and the fix where there is one.

    Example:
        `check_regex("a{2,3}")` returns; `check_regex("foo**")` fails at character 4.
    """
    scan, open_groups = _Scan(text), 0
    while scan.at < len(text):
        char = text[scan.at]
        if char == "(":
            open_groups += _open(scan)
            if open_groups > MAX_NESTING:
                raise scan.fail(f"more than {MAX_NESTING} groups inside each other")
        elif char == ")":
            if not open_groups:
                raise scan.fail("')' closes no group")
            open_groups -= 1
            scan.at, scan.atom = scan.at + 1, True
        elif char == "[":
            _skip_class(scan)
        elif char == "\\":
            _skip_escape(scan)
        elif char in "*+?{":
            _repeat(scan)
        else:
            scan.at, scan.atom = scan.at + 1, char not in "|^$"
    if open_groups:
        raise scan.fail("a group is not closed")


def _open(scan: _Scan) -> int:
    """Step over what opens a group; 0 when it is a setting that encloses nothing."""
    text, at = scan.text, scan.at
    scan.atom = False
    if not text.startswith("(?", at):
        scan.at += 1
        return 1
    if text.startswith(_LOOKS, at):
        raise scan.fail("look-ahead and look-behind are not possible here")
    if found := _NAME.match(text, at):
        scan.at = found.end()
        return 1
    if (found := _FLAGS.match(text, at)) is None:
        raise scan.fail("'(?' opens no group that is known; use (?:...) or (?<name>...)")
    scan.at = found.end()
    return int(found[2] == ":")


def _skip_class(scan: _Scan) -> None:
    """Step over [...] with classes inside it; ']' stands for itself where it comes first."""
    text, depth, at = scan.text, 0, scan.at
    while at < len(text):
        if text[at] == "\\":
            at += 2
        elif text[at] == "[":
            depth += 1
            at += 2 if text.startswith("^", at + 1) else 1
            at += text.startswith("]", at)
        elif text[at] == "]":
            depth, at = depth - 1, at + 1
            if not depth:
                scan.at, scan.atom = at, True
                return
        else:
            at += 1
    raise scan.fail("a class is not closed; write \\[ for the character itself")


def _skip_escape(scan: _Scan) -> None:
    follower = scan.text[scan.at + 1 : scan.at + 2]
    if not follower:
        raise scan.fail("nothing follows the backslash")
    if follower in "123456789k":
        raise scan.fail("back-references are not possible here")
    at = scan.at + 2
    if follower in "pPxuU" and scan.text.startswith("{", at):  # the braces belong to the escape: \p{L}, \u{1F426}
        end = scan.text.find("}", at)
        if end < 0:
            raise scan.fail("an escape with '{' is not closed")
        at = end + 1
    scan.at, scan.atom = at, follower not in "bBAz"


def _repeat(scan: _Scan) -> None:
    found = _REPEAT.match(scan.text, scan.at)
    if found is None:
        raise scan.fail("'{' begins no count such as {2,3}; write \\{ for the character itself")
    if not scan.atom:
        raise scan.fail(f"{found[0]!r} repeats nothing, or a repetition")
    if found[3] and int(found[3]) < int(found[1]):
        raise scan.fail(f"{found[0]!r} counts down")
    end = found.end()
    scan.at = end + scan.text.startswith("?", end)  # fewest first: the same set of strings
    scan.atom = False


def _shown(text: str) -> str:
    return repr(shorten(text, 60))
