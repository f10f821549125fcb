"""A worker process of peers.py: started, asked, put to sleep, woken and ended. It neither measures nor knows a runtime.

Whatever a worker starts shares its session, so signals go to all processes of that session, whatever groups they made.
Units: seconds; memory in MiB.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

END_S = 20.0


class Lost(Exception):
    """A worker that died, hung or answered wrongly; the text is one line that says how."""


class Worker:
    """One process that speaks JSON lines, asleep but while it is asked."""

    def __init__(self, name: str, command: list[str], environment: dict[str, str], limit_s: float) -> None:
        """Start `command`.

        Args:
            name: for messages.
            command: must answer each line on stdin with one on stdout.
            environment: set on top of ours.
            limit_s: how long any answer may take.
        """
        self.name, self._limit_s = name, limit_s
        # A file: a pipe that nobody reads would fill up and block the worker. `kill` closes it.
        self._said = tempfile.TemporaryFile()  # noqa: SIM115
        self._unread = b""
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said,
            env=os.environ | environment, start_new_session=True,
            cwd=tempfile.gettempdir(),  # not here: libraries take kernels.py for a package that they know
        )  # fmt: skip

    def ask(self, message: dict[str, Any], doing: str) -> dict[str, Any]:
        """Send `message` and return the answer; `Lost` says what happened while `doing` instead."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._lost(doing) from None
        line = self._line(doing)
        try:
            answer = json.loads(line)
        except ValueError:
            raise Lost(f"{self.name}: answered {line[:80]!r} instead of JSON while {doing}") from None
        if not isinstance(answer, dict):
            raise Lost(f"{self.name}: answered {line[:80]!r} instead of an object while {doing}")
        return answer

    def _line(self, doing: str) -> bytes:
        assert self._process.stdout is not None
        descriptor, deadline = self._process.stdout.fileno(), time.monotonic() + self._limit_s
        while b"\n" not in self._unread:
            ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise Lost(f"{self.name}: no answer within {self._limit_s:g} s (--limit-s) while {doing}{self._last()}")
            got = os.read(descriptor, 1 << 20)
            if not got:
                raise self._lost(doing)
            self._unread += got
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _lost(self, doing: str) -> Lost:
        try:
            code = self._process.wait(3 * END_S)  # Python closes its streams well before it has ended
        except subprocess.TimeoutExpired:
            return Lost(f"{self.name}: closed its output while {doing}{self._last()}")
        how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        return Lost(f"{self.name}: died with {how} while {doing}{self._last()}")

    def _last(self) -> str:
        """Return the last line of stderr, for the end of a message."""
        self._said.seek(0)
        lines = [line for line in self._said.read().decode(errors="replace").splitlines() if line.strip()]
        return f"; last line of its stderr: {lines[-1].strip()[:300]}" if lines else "; nothing on its stderr"

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """Let the worker run inside the block only.

        The thread pools of these libraries spin for a while, some for as long as they live, before they sleep: a worker
        that has nothing to do would take a core from the one that is measured.
        """
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def memory_mib(self) -> float:
        """Return the resident memory of all its processes; a page that several share counts once."""
        kib = 0
        for pid in self._members():
            with contextlib.suppress(OSError):
                for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                    if line.startswith("Pss:"):
                        kib += int(line.split()[1])
        return kib / 1024

    def end(self) -> None:
        """Let the worker end by itself, as some tidy up then."""
        self._signal(signal.SIGCONT)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)

    def kill(self) -> None:
        """Kill every process of the session that is left. Safe to call again."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        deadline = time.monotonic() + END_S
        while self._members() and time.monotonic() < deadline:
            self._signal(signal.SIGKILL)  # again: what was started meanwhile
            time.sleep(0.01)
        self._said.close()

    def _members(self) -> list[int]:
        """Return the processes of its session that have not ended."""
        found = []
        for name in os.listdir("/proc"):
            if name.isdigit():
                with contextlib.suppress(OSError):  # it may end while we look
                    state = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[0]
                    if os.getsid(int(name)) == self._process.pid and state not in "ZX":
                        found.append(int(name))
        return found

    def _signal(self, number: int) -> None:
        for pid in self._members():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
