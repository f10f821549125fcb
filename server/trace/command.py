"""The command `moewe trace`: asks a server for a step trace, writes it to a file, and prints a table of shares.

Not the recording (the server's) and not the table (server/trace/shares.py). Whoever leaves ends the trace at the
server, as the connection closes. Units: seconds, bytes.
"""

from __future__ import annotations

import json
import sys
import threading
import urllib.error
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from ..client.asking import DEFAULT_URL, NoAnswerError, ask, key_hint, server_at
from ..client.target import Target
from ..terminal.stdout import put
from .limits import DEFAULT_IDLE_SECONDS, DEFAULT_STEPS, LEAST_IDLE_SECONDS, MOST_IDLE_SECONDS, MOST_SECONDS, MOST_STEPS
from .shares import Shares, engine_lines, printable, read_shares, shares_table

DEFAULT_OUTPUT = "moewe-trace.json"
MOST_BYTES = 512 << 20
WIDTH = 100  # of the table where there is no terminal
_PROGRESS_EVERY_S = 0.5
_PROGRESS_TIMEOUT_S = 5.0
_MOST_PROGRESS_BYTES = 1 << 20


def trace(tool: Mapping[str, Any]) -> int:
    """Run the command.

    Args:
        tool: the flags, by field name.

    Returns:
        1 when the server ran no step, so that there is nothing to write; else 0.
    """
    urls = tool.get("url", (DEFAULT_URL,))
    if len(urls) != 1:
        raise ValueError(f"{len(urls)} servers are named; trace one at a time")
    steps, idle_s = tool.get("steps", DEFAULT_STEPS), tool.get("idle_timeout", DEFAULT_IDLE_SECONDS)
    if not 1 <= steps <= MOST_STEPS:
        raise ValueError(f"--steps {steps} is not allowed; use 1 to {MOST_STEPS}")
    if not LEAST_IDLE_SECONDS <= idle_s <= MOST_IDLE_SECONDS:
        allowed = f"use {LEAST_IDLE_SECONDS} to {MOST_IDLE_SECONDS:.0f} (seconds)"
        raise ValueError(f"--idle-timeout {idle_s:g} is not allowed; {allowed}")
    path = Path(tool.get("output", DEFAULT_OUTPUT))
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ValueError(f"--output {path} cannot be written; name a file in a folder that exists")
    target = server_at(urls[0], tool)
    data = _record(target, steps, idle_s)
    try:
        shares = read_shares(data)
    except ValueError as error:
        raise NoAnswerError(f"{target.api}/trace: {error}") from None
    if not shares.ranks:
        raise NoAnswerError(f"no step was recorded, so nothing is written: {shares.ended_early or 'it ran none'}")
    path.write_bytes(data)
    _show(shares, path)
    return 0


def _record(target: Target, steps: int, idle_s: float) -> bytes:
    """Return the answer of the server; says how far it is while it waits."""
    print(f"tracing {steps} steps at {target.root}; Ctrl-C stops", file=sys.stderr)
    done = threading.Event()
    in_terminal = sys.stderr.isatty()
    if in_terminal:
        threading.Thread(target=_show_progress, args=(target, done), daemon=True).start()
    url = f"{target.api}/trace?steps={steps}&idle_timeout={idle_s}"
    try:
        return _answer(url, target.headers, "POST", MOST_SECONDS + MOST_IDLE_SECONDS, MOST_BYTES)
    finally:
        done.set()
        if in_terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _show_progress(target: Target, done: threading.Event) -> None:
    """Write how many steps each replica has recorded, until done."""
    while not done.wait(_PROGRESS_EVERY_S):
        try:
            data = _answer(f"{target.api}/trace", target.headers, "GET", _PROGRESS_TIMEOUT_S, _MOST_PROGRESS_BYTES)
            now = json.loads(data)
            recorded = ", ".join(str(int(count)) for count in now["recorded"])
            line = f"\r{recorded} of {int(now['steps'])} steps"
        except (NoAnswerError, ValueError, KeyError, TypeError, RecursionError):
            continue  # the answer to the trace itself says what is wrong
        if not done.is_set():
            print(line, end="", file=sys.stderr, flush=True)


def _answer(url: str, headers: Mapping[str, str], method: str, timeout: float, most: int) -> bytes:
    return ask(url, headers, timeout=timeout, most_bytes=most, line=_line, method=method, explain=_message)


def _message(error: urllib.error.HTTPError) -> str:
    """Return what the server says of it, or what is known of the code."""
    if hint := key_hint(error):
        return hint
    try:
        return f": {_line(json.loads(error.read(1 << 16))['error']['message'])}"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return "; is that a moewe server?" if error.code == 404 else ""


def _line(error: object) -> str:
    return printable(str(error)) or type(error).__name__


def _show(shares: Shares, path: Path) -> None:
    console = Console()
    width = console.width if console.is_terminal else WIDTH
    with console.capture() as shown:
        Console.print(console, shares_table(shares), width=width)
    lines = [*engine_lines(shares), f"{path}: steps {', '.join(map(str, shares.steps))} (open it at ui.perfetto.dev)"]
    if shares.ended_early:
        lines.append(f"ended before {shares.steps_asked} steps: {shares.ended_early}")
    put(shown.get() + "\n".join(lines) + "\n")
