"""`moewe serve` as a user starts it: a process, its address, its children, its log, and an end that leaves nothing.

Not a fake: everything is real. Units: seconds.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import httpx
import openai
import psutil

from tests.support.scraped import sums

NAME = "gull"
START_TIMEOUT_S = 90.0


def _die_with_parent() -> None:
    """Have the kernel kill this process when the test run is killed, which has no chance to tidy up."""
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


class ServerProcess:
    """A server on a free port; on leaving the context it and all its children are killed.

    Args:
        model: folder of the checkpoint, or the word `demo`.
        flags: further command-line flags.
        wait: return only when /ready answers 200.
    """

    def __init__(self, model: Path | str, *flags: str, topology: str = "EP2DP1", wait: bool = True) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed in __exit__
        command = [sys.executable, "-m", "moewe", "serve", str(model), "--topology", topology, "--port", str(self.port)]
        command += ["--served-model-name", NAME, "--threads", "1", *flags]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, stdout=self._log, stderr=subprocess.STDOUT, env=environment, start_new_session=True,
            preexec_fn=_die_with_parent,
        )  # fmt: skip
        self.children: list[psutil.Process] = []
        if wait:
            self.wait_ready()

    def wait_ready(self, within: float = START_TIMEOUT_S) -> None:
        """Wait until requests are taken."""
        deadline = time.monotonic() + within
        while self.status("/ready") != 200:
            assert self.process.poll() is None, self.log()
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.2)
        self.children = psutil.Process(self.process.pid).children(recursive=True)

    def status(self, path: str) -> int:
        """Return the status of a GET, 0 when nobody answers."""
        try:
            return self.get(path).status_code
        except httpx.HTTPError:
            return 0

    def get(self, path: str) -> httpx.Response:
        """Ask the server itself for something; what needs a key or TLS overrides it."""
        return httpx.get(self.url + path, timeout=20, verify=False)  # or each would read the world's certificates

    def client(self, **options: object) -> openai.OpenAI:
        """Return an OpenAI client that does not try again by itself."""
        settings: dict[str, Any] = {"max_retries": 0, "timeout": 60, **options}
        http = openai.DefaultHttpxClient(verify=False)
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", http_client=http, **settings)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the server process alone."""
        self.process.send_signal(number)

    def exit_code(self, timeout: float) -> int:
        """Wait for the server's end and return its exit code."""
        return self.process.wait(timeout)

    def counters(self) -> dict[str, float]:
        """Return the metrics, summed over all labels but `reason`, which stands after the name: `name|reason`."""
        return sums(self.get("/metrics").text, "reason")

    def wait_idle(self, within: float, *, aborts: float = 0) -> None:
        """Wait until nothing runs, waits or holds a block.

        The gauges are what an engine said last, up to a second ago; where streams are cut right after they began, say
        how many `aborts` the counter has to show in the end, or what was idle before them is taken for the end.
        """
        deadline = time.monotonic() + within
        while (seen := self.counters()["moewe_requests_finished_total|abort"]) < aborts:
            assert time.monotonic() < deadline, (seen, aborts)
            time.sleep(0.05)
        names = ("moewe_requests_running", "moewe_requests_waiting", "moewe_kv_blocks_used")
        while any(values := [self.counters()[name] for name in names]):
            assert time.monotonic() < deadline, values
            time.sleep(0.05)

    def survivors(self, within: float = 2.0) -> list[psutil.Process]:
        """Return children that still run after a moment."""
        _, alive = psutil.wait_procs(self.children, timeout=within)
        return [child for child in alive if child.status() != psutil.STATUS_ZOMBIE]

    def log(self) -> str:
        """Return all that the server wrote so far."""
        self._log.flush()
        position = self._log.tell()
        self._log.seek(0)
        text = self._log.read()
        self._log.seek(position)
        return text

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            children = psutil.Process(self.process.pid).children(recursive=True)
            self.process.kill()
            self.process.wait()
            for child in children:
                if child.is_running():
                    child.kill()
        self._log.close()
