"""Asks a DCGM exporter now and then (`--dcgm-url`), on a thread of its own: nothing waits for it.

Not what its answer means (runtime/metrics/dcgm.py). Whatever it says, or does not, only its figures are missing: each
look is limited in time and size, redirections are not followed, and a line in the log says once what is wrong.
Units: seconds, bytes.
"""

from __future__ import annotations

import contextlib
import http.client
import logging
import socket
import threading
import urllib.parse
from collections.abc import Callable, Mapping

from ...runtime.metrics.dcgm import GpuReading, read_exporter
from ...text.one_line import one_line

log = logging.getLogger(__name__)

EVERY_S = 10.0
LOOK_S = 5.0
MOST_BYTES = 4 << 20


def check_exporter_url(url: str) -> str:
    """Return `url`, with /metrics where it names no path.

    Raises:
        ValueError: it is no URL of an exporter; one line with the fix.
    """
    fix = "use http://HOST:PORT/metrics, the address of a dcgm-exporter"
    try:
        parts = urllib.parse.urlsplit(url)
        named = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        named = False
    if not named or any(ord(letter) <= 32 or ord(letter) == 127 for letter in url):
        raise ValueError(f"--dcgm-url {url!r} is no HTTP address; {fix}")
    if parts.username is not None or parts.fragment:
        raise ValueError("--dcgm-url has a user name or a fragment, which are not sent; " + fix)
    return parts._replace(path=parts.path if parts.path not in ("", "/") else "/metrics").geturl()


def look(url: str, seconds: float = LOOK_S, most_bytes: int = MOST_BYTES) -> dict[str, GpuReading]:
    """Return what the exporter at `url` says now, by UUID of a GPU.

    Args:
        url: see `check_exporter_url`.
        seconds: that it may take to answer, from the connection to the last byte.
        most_bytes: of its answer.

    Raises:
        OSError, http.client.HTTPException, ValueError: why there is no answer.
    """
    parts = urllib.parse.urlsplit(url)
    make = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    assert parts.hostname is not None
    with contextlib.closing(make(parts.hostname, parts.port, timeout=seconds)) as connection:
        connection.connect()
        # The time limit of a socket is of each wait; this one is of all of them.
        is_late = threading.Event()
        end = threading.Timer(seconds, _end, [connection.sock, is_late])
        end.daemon = True
        end.start()
        try:
            connection.request("GET", parts._replace(scheme="", netloc="").geturl(), headers={"Accept": "text/plain"})
            answer = connection.getresponse()
            if answer.status != http.client.OK:
                raise ValueError(f"it answers {answer.status}")
            body = answer.read(most_bytes + 1)
        finally:
            end.cancel()
    if is_late.is_set():
        raise TimeoutError(f"no whole answer within {seconds:g} s")
    if len(body) > most_bytes:
        raise ValueError(f"it answers more than {most_bytes >> 10} KiB")
    return read_exporter(body.decode(errors="replace"))


def _end(connection: socket.socket, is_late: threading.Event) -> None:
    is_late.set()
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class ExporterWatch:
    """Looks at an exporter until it is closed.

    Args:
        url: see `check_exporter_url`.
        tell: gets the readings, on the watch's thread.
        every: seconds between looks.
    """

    def __init__(self, url: str, tell: Callable[[Mapping[str, GpuReading]], None], every: float = EVERY_S) -> None:
        self._url, self._tell, self._every = url, tell, every
        self._closed = threading.Event()
        self._problem = ""
        self._thread = threading.Thread(target=self._run, name="dcgm exporter", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Look no more; a look that is under way ends by itself."""
        self._closed.set()

    def say(self, problem: str) -> None:
        """Log what is wrong when it changes; an empty text is all well."""
        if problem != self._problem:
            log.warning("--dcgm-url %s: %s", self._url, problem or "all is well again")
        self._problem = problem

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                readings = look(self._url)
            except Exception as error:  # what an exporter says must end nothing
                self.say(one_line(error)[:200] or type(error).__name__)
            else:
                self._tell(readings)
            self._closed.wait(self._every)
