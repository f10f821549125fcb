"""The command `moewe top`: reads servers again and again and draws them, or prints one reading as JSON.

Not the figures and not the drawing. A server that does not answer is shown as such and asked again: a restart is
nothing to stop for. Units: seconds.
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rich.console import Console
from rich.live import Live

from ..client.asking import DEFAULT_URL, NoAnswerError, server_at
from ..terminal.stdout import put
from .figures import ServerFigures, figures, restarted
from .scrape import Reading, read_server
from .view import Lost, draw

INTERVAL_S, SHORTEST_INTERVAL_S = 2.0, 0.2
SPAN_S = 10.0  # figures are over at least so long, once there are readings from so long ago


class Server:
    """One server and its latest readings.

    Args:
        root: without /v1.
        headers: of every request.
    """

    def __init__(self, root: str, headers: Mapping[str, str]) -> None:
        self.root, self._headers = root, headers
        self._readings: deque[Reading] = deque()
        self._lost: str | None = None

    def read(self) -> None:
        """Take a reading; figures are over two of them."""
        try:
            reading = read_server(self.root, self._headers)
        except NoAnswerError as error:
            self._lost = str(error)
            return
        self._lost = None
        if self._readings and restarted(self._readings[-1], reading):
            self._readings.clear()
        self._readings.append(reading)
        while len(self._readings) > 2 and reading.taken - self._readings[1].taken >= SPAN_S:
            self._readings.popleft()

    def shown(self) -> ServerFigures | Lost:
        """Return the figures, or why there are none."""
        if self._lost is not None:
            return Lost(self.root, self._lost)
        if len(self._readings) < 2:
            return Lost(self.root, "one reading so far, figures come with the next")
        return figures(self.root, self._readings[0], self._readings[-1])


def top(tool: Mapping[str, Any]) -> int:
    """Run the command.

    Args:
        tool: the flags, by field name.

    Returns:
        1 when `--once` found a server without figures, else 0.
    """
    interval = tool.get("interval", INTERVAL_S)
    if not interval >= SHORTEST_INTERVAL_S:
        raise ValueError(f"--interval {interval} is not allowed; use at least {SHORTEST_INTERVAL_S} (seconds)")
    if tool.get("json") and not tool.get("once"):
        raise ValueError("--json prints one reading; add --once")
    servers = [_server(url, tool) for url in dict.fromkeys(tool.get("url", (DEFAULT_URL,)))]
    with ThreadPoolExecutor(len(servers)) as pool:
        try:
            if tool.get("once"):
                return _once(servers, pool, interval, as_json=bool(tool.get("json")))
            _watch(servers, pool, interval)
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
    return 0


def _server(url: str, tool: Mapping[str, Any]) -> Server:
    target = server_at(url, tool)
    return Server(target.root, target.headers)


def _once(servers: Sequence[Server], pool: ThreadPoolExecutor, interval: float, *, as_json: bool) -> int:
    for pause in (interval, 0.0):
        list(pool.map(Server.read, servers))
        time.sleep(pause)
    shown = [server.shown() for server in servers]
    if as_json:
        rows = [{"url": each.url, "error": each.reason} if isinstance(each, Lost) else each.as_dict() for each in shown]
        put(json.dumps(rows, indent=2) + "\n")
    else:
        console = Console()
        height = max(console.height, 24) if console.is_terminal else sys.maxsize  # a file has room for all
        console.print(draw(shown, console.width, height))
    return int(any(isinstance(each, Lost) for each in shown))


def _watch(servers: Sequence[Server], pool: ThreadPoolExecutor, interval: float) -> None:
    console = Console()
    if not console.is_terminal:
        raise ValueError("stdout is no terminal; use --once, or --once --json for a script")
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            started = time.monotonic()
            list(pool.map(Server.read, servers))
            shown = [server.shown() for server in servers]
            live.update(draw(shown, console.width, console.height), refresh=True)
            time.sleep(max(0.0, interval - (time.monotonic() - started)))
