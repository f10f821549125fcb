"""`--dcgm-url` against small exporters over real HTTP: sound, silent, slow, large, broken, gone and back."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from moewe.runtime.metrics.dcgm import GpuReading
from moewe.server.commands.serve import server_options
from moewe.server.http.exporter_watch import ExporterWatch, check_exporter_url, look
from tests.runtime.test_dcgm import UUID, sample

PAGE = sample("PROF_DRAM_ACTIVE", 0.25) + sample("DEV_TOTAL_ENERGY_CONSUMPTION", 1_000)


class Exporter(ThreadingHTTPServer):
    """Answers `page` with `status` at /metrics, a redirection at /elsewhere."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        super().__init__(address, Handler)
        self.page, self.status = PAGE, 200
        self.url = f"http://127.0.0.1:{self.server_address[1]}/metrics"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def end(self) -> None:
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        exporter = self.server
        assert isinstance(exporter, Exporter)
        if self.path != "/metrics":
            self.send_response(302)
            self.send_header("Location", exporter.url)
            self.end_headers()
            return
        self.send_response(exporter.status)
        self.end_headers()
        self.wfile.write(exporter.page.encode())

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def exporter() -> Iterator[Exporter]:
    found = Exporter()
    yield found
    found.end()


@contextmanager
def saying(*pieces: bytes, pause: float) -> Iterator[str]:
    """The URL of somebody who sends `pieces` again and again with pauses between them, whatever is asked."""
    over = threading.Event()

    def answer() -> None:
        with suppress(OSError), listener.accept()[0] as connection:
            while not over.is_set():
                for piece in pieces:
                    connection.sendall(piece)
                over.wait(pause)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/metrics"
        over.set()
    thread.join()


def test_a_look_reads_counters(exporter: Exporter) -> None:
    assert look(exporter.url) == {UUID: GpuReading(0.25, 1_000)}


@pytest.mark.parametrize("status", [302, 404, 500])
def test_other_answers_are_no_readings(exporter: Exporter, status: int) -> None:
    exporter.status = status
    with pytest.raises(ValueError, match=f"it answers {status}"):
        look(exporter.url)
    with pytest.raises(ValueError, match="it answers 302"):
        look(exporter.url.replace("metrics", "elsewhere"))  # not followed


def test_too_much_is_not_read(exporter: Exporter) -> None:
    exporter.page = PAGE * 1_000
    with pytest.raises(ValueError, match="it answers more than 64 KiB"):
        look(exporter.url, most_bytes=1 << 16)


@pytest.mark.parametrize(
    "pieces",
    [[b""], [b"HTTP/1.1 200 OK\r\nA: b\r\n"], [b"HTTP/1.1 200 OK\r\n\r\n", b"# a line\n"], [b"x"]],
    ids=["silent", "headers without end", "a body without end", "no line end"],
)
def test_who_drips_is_left_in_time(pieces: list[bytes]) -> None:
    """Each piece comes within the time of one wait; only a limit on all of them ends it."""
    with saying(*pieces, pause=0.05) as url, pytest.raises((OSError, HTTPException)):
        look(url, seconds=0.4)


@pytest.mark.parametrize(
    "answer", [b"SSH-2.0-x\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n\xff", b"\0" * 99999]
)
def test_what_is_no_http_or_no_text_harms_nobody(answer: bytes) -> None:
    with saying(answer, pause=5.0) as url:
        with suppress(OSError, HTTPException, ValueError):
            assert look(url, seconds=0.3) == {}


def test_a_watch_says_once_what_is_wrong_and_goes_on(exporter: Exporter, caplog: pytest.LogCaptureFixture) -> None:
    heard: list[object] = []
    exporter.status = 503
    with caplog.at_level(logging.WARNING):
        watch = ExporterWatch(exporter.url, heard.append, every=0.01)
        wait_until(lambda: "it answers 503" in caplog.text)
        time.sleep(0.1)
        assert caplog.text.count("it answers 503") == 1 and not heard
        exporter.status = 200
        wait_until(lambda: len(heard) >= 2)
        watch.say("")
        exporter.end()
        wait_until(lambda: "refused" in caplog.text)
        watch.close()
        watch._thread.join(10)
    assert heard[0] == {UUID: GpuReading(0.25, 1_000)} and "all is well again" in caplog.text
    assert not watch._thread.is_alive()


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("http://h:9400", "http://h:9400/metrics"),
        ("http://h:9400/", "http://h:9400/metrics"),
        ("https://[::1]/x?y=z", "https://[::1]/x?y=z"),
    ],
)
def test_addresses(url: str, path: str) -> None:
    assert check_exporter_url(url) == path
    assert server_options({"dcgm_url": url}).dcgm_url == path


@pytest.mark.parametrize(
    "url",
    ["", "h:9400", "file:///etc/passwd", "http://", "http://h:99999/", "http://h:0/", "http://[::1/", "http://a b/",
     "http://h/\r\nX: y", "http://user:secret@h/", "http://h/#x"],
)  # fmt: skip
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"--dcgm-url .*use http://HOST:PORT/metrics") as refused:
        check_exporter_url(url)
    assert "\n" not in str(refused.value) and "secret" not in str(refused.value)
