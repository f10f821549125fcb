"""The command `moewe apply`: has a server change its layout, by default to the advised one, and waits for the end.

Not the change (server/http/layout_change.py). What a server says is not trusted. Units: seconds, bytes.
"""

from __future__ import annotations

import json
import sys
import time
import urllib.error
from collections.abc import Mapping
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec

from ..client.asking import DEFAULT_URL, NoAnswerError, ask, key_hint, server_at
from ..terminal.stdout import put
from .command import TIMEOUT_S
from .view import plain, short_name

MOST_BYTES = 1 << 16
PLANNING_S = 120.0  # it looks at the checkpoint, and may compile kernels
POLL_S = 0.5


_Answer = TypeVar("_Answer")


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """How far a change is, as a server says it."""

    before: str
    after: str
    way: str
    turns: int
    turn: int
    state: str
    reason: str
    seconds: float


class _Progress(msgspec.Struct, frozen=True, kw_only=True):
    change: Change | None


class ChangeFailedError(RuntimeError):
    """The layout stays as it was; the text is one line."""

    exit_code = 1


def apply(tool: Mapping[str, Any]) -> int:
    """Run the command.

    Args:
        tool: the flags, by field name.

    Raises:
        NoAnswerError: the server refuses, or does not answer.
        ChangeFailedError: the new layout could not start.
    """
    urls = tool.get("url", (DEFAULT_URL,))
    if len(urls) != 1:
        raise ValueError(f"{len(urls)} servers are named; change one at a time")
    target = server_at(urls[0], tool)
    url = f"{target.api}/topology/apply"
    wanted = tool.get("topology")
    query = "" if wanted is None else f"?topology={quote(wanted, safe='')}"
    change = _asked(url + query, target.headers, "POST", PLANNING_S, Change)
    put(f"{target.root}: from {short_name(change.before)} to {short_name(change.after)}, {plain(change.way)}\n")
    try:
        change = _ended(change, url, target.headers)
    except KeyboardInterrupt:
        print(f"\nthe change goes on without this command; GET {url} says how far it is", file=sys.stderr)
        raise
    if change.state != "done":
        raise ChangeFailedError(f"{short_name(change.before)} goes on: {plain(change.reason)}")
    put(f"{short_name(change.after)} runs after {change.seconds:.1f} s\n")
    return 0


def _ended(change: Change, url: str, headers: Mapping[str, str]) -> Change:
    """Wait until a change has ended; return how."""
    while change.state == "running":
        time.sleep(POLL_S)
        progress = _asked(url, headers, "GET", TIMEOUT_S, _Progress)
        if progress.change is None or progress.change.after != change.after:
            raise NoAnswerError(f"{url} knows nothing of the change any more: was the server restarted?")
        if sys.stderr.isatty() and progress.change.turn != change.turn:
            print(f"turn {progress.change.turn} of {progress.change.turns}", file=sys.stderr)
        change = progress.change
    return change


def _asked(url: str, headers: Mapping[str, str], method: str, timeout: float, kind: type[_Answer]) -> _Answer:
    body = ask(url, headers, timeout=timeout, most_bytes=MOST_BYTES, line=_line, method=method, explain=_message)
    try:
        return msgspec.json.decode(body, type=kind)
    except (ValueError, RecursionError) as error:
        raise NoAnswerError(f"{url} answers with what is no change: {_line(error)}") from None


def _message(error: urllib.error.HTTPError) -> str:
    """Return what the server says of it, or what is known of the code."""
    try:
        said = plain(json.loads(error.read(MOST_BYTES))["error"]["message"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        said = ""
    if error.code == 401 or not said:
        return key_hint(error) or "; is that a moewe server of this version?"
    return f": {said[:600]}"


def _line(error: object) -> str:
    return plain(str(error))[:200]
