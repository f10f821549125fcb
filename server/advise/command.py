"""The command `moewe advise`: asks a server which layout suits its load, or replays a log of such advice.

Not the advisor (topologies/advisor/). What a server or a file says is not trusted. Units: seconds, bytes.
"""

from __future__ import annotations

import json
import time
import urllib.error
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ...topologies.advisor.records import Advice, AdviceError
from ...topologies.advisor.trace import Replayed, read_trace, replay
from ..client.asking import DEFAULT_URL, NoAnswerError, ask, key_hint, server_at
from ..terminal.stdout import put
from .view import headline, plain, short_name, table

TIMEOUT_S = 10.0
MOST_BYTES = 4 << 20


def advise(tool: Mapping[str, Any]) -> int:
    """Run the command.

    Args:
        tool: the flags, by field name.

    Returns:
        1 when a replayed log holds other advice than it leads to, else 0.
    """
    as_json = bool(tool.get("json"))
    if (trace := tool.get("trace")) is not None:
        if tool.get("url"):
            raise ValueError("--trace replays a log and asks no server; leave out one of the two")
        return _replay(Path(trace), as_json=as_json)
    urls = tool.get("url", (DEFAULT_URL,))
    if len(urls) != 1:
        raise ValueError(f"{len(urls)} servers are named; ask one at a time")
    target = server_at(urls[0], tool)
    advice = asked(f"{target.api}/topology/advice", target.headers)
    _show(advice, as_json=as_json)
    return 0


def asked(url: str, headers: Mapping[str, str]) -> Advice:
    """Return the advice of a server.

    Raises:
        NoAnswerError: it has none, or what it says is none.
    """
    body = ask(url, headers, timeout=TIMEOUT_S, most_bytes=MOST_BYTES, line=_line, explain=_why)
    try:
        return msgspec.json.decode(body, type=Advice)
    except (ValueError, RecursionError) as error:
        raise NoAnswerError(f"{url} answers with what is no advice: {_line(error)}") from None


def _why(error: urllib.error.HTTPError) -> str:
    return key_hint(error) or ("; is that a moewe server of this version?" if error.code == 404 else "")


def _show(advice: Advice, *, as_json: bool) -> None:
    if as_json:
        put(json.dumps(msgspec.to_builtins(advice), indent=2) + "\n")
    else:
        put(f"{headline(advice)}\n{table(advice)}".rstrip() + "\n")


def _replay(path: Path, *, as_json: bool) -> int:
    """Say what each window of a log leads to, and whether that is what the log has."""
    count, others, last = 0, 0, None
    for one in replay(path, read_trace(path)):
        count, others, last = count + 1, others + (not one.is_same), one
        put(_window(one, as_json=as_json) + "\n")
    if last is None:
        raise AdviceError(f"{path} holds no window, so there is nothing to advise on; windows end after "
                          "--advice-interval seconds")  # fmt: skip
    if not as_json:
        put(f"{table(last.advice)}\n{count} windows; {_agreement(count, others)}\n")
    return int(others > 0)


def _agreement(count: int, others: int) -> str:
    return f"{others} of {count} lead to other advice than the log has" if others else "the same advice as in the log"


def _window(one: Replayed, *, as_json: bool) -> str:
    if as_json:
        shown = {"line": one.line, "same": one.is_same, "advice": msgspec.to_builtins(one.advice)}
        return json.dumps(shown)
    when = time.strftime("%H:%M:%S", time.gmtime(min(one.seen.time, 1e11)))
    other = "" if one.is_same else f"  (the log has: {short_name(one.recorded.advised) if one.recorded else ''})"
    return f"{when}  {headline(one.advice)}{other}"


def _line(error: object) -> str:
    return plain(str(error))[:200]
