"""Tries grammars of strangers before an engine sees them: `GrammarCheck.check` answers, or refuses within a second.

Not a compiler for a model (`grammar.py`): it says whether a grammar can be used. Checks that cost nothing are made
here; the rest in a helper process (`grammar_helper.py`), started at the first grammar, whose children the kernel ends
at their limit. What was tried is remembered.
Units: seconds.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections import OrderedDict
from hashlib import sha256
from threading import BoundedSemaphore, Lock

import msgspec

from .grammar import GrammarError, grammar_source

REMEMBERED = 1024
# At once; the others wait. A child may take all of a core for its time.
MOST_TRIALS = 2
# Of the clock, where a machine is too busy to give a child its share; the limit on CPU is the helper's.
PATIENCE_S = 10.0
TOO_COMPLEX = "it takes too long to compile; make it simpler: fewer nested repetitions, alternatives and patterns"


class GrammarCheck:
    """Safe to use from many threads; `close` ends the helper."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._trials = BoundedSemaphore(MOST_TRIALS)
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self.num_trials = 0

    def check(self, kind: str, text: str) -> None:
        """Return when a grammar can be used; may wait for others. Not for an event loop.

        Args:
            kind, text: see `grammar_source`.

        Raises:
            GrammarError: the grammar cannot be used; one line that says why.
        """
        key = sha256(f"{kind}\0{text}".encode("utf-8", "surrogatepass")).digest()
        with self._lock:
            problem = self._verdicts.get(key)
        if problem is None:
            source = grammar_source(kind, text)
            with self._trials:
                problem = self._try(source)
            with self._lock:
                self._verdicts[key] = problem
                while len(self._verdicts) > REMEMBERED:
                    self._verdicts.popitem(last=False)
        if problem:
            raise GrammarError(problem)

    def close(self) -> None:
        """End the helper; a later check starts another."""
        with self._lock:
            self._end()

    def _try(self, source: str) -> str:
        """Return what is wrong with a grammar; empty when nothing is."""
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                self._send(theirs)
            ours.settimeout(PATIENCE_S)
            try:
                ours.sendall(msgspec.msgpack.encode(source))
                ours.shutdown(socket.SHUT_WR)
                answer = b""
                while part := ours.recv(1 << 16):
                    answer += part
            except OSError:  # the child died while it read, or time is up
                answer = b""
        return msgspec.msgpack.decode(answer, type=str) if answer else TOO_COMPLEX

    def _send(self, connection: socket.socket) -> None:
        """Hand a socket to the helper, a fresh one where the old one is gone."""
        with self._lock:
            self.num_trials += 1
            for _ in range(2):
                if self._control is None:
                    self._start()
                assert self._control is not None
                try:
                    socket.send_fds(self._control, [b"t"], [connection.fileno()])
                    return
                except OSError:
                    self._end()
        raise GrammarError("the helper that tries grammars does not start; see the log of the server")

    def _start(self) -> None:
        self._control, theirs = socket.socketpair()
        with theirs:
            fd = theirs.fileno()
            command = [sys.executable, "-m", f"{__package__}.grammar_helper", str(fd)]
            environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
            self._process = subprocess.Popen(command, pass_fds=[fd], stdin=subprocess.DEVNULL, env=environment)

    def _end(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            try:
                self._process.wait(2.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
