"""Tries grammars of strangers before an engine sees them: `GrammarCheck.check` answers, or refuses within a second.

Not a compiler for a model (`grammar.py`): it says whether a grammar can be used. Checks that cost nothing are made
here; the rest in a helper process (`grammar_helper.py`), started at the first grammar, whose children the kernel ends
at their limit. What was tried is remembered, refusals apart from the rest, so that many of them push nothing else out.
Who is tried when is not decided here (server/grammar_queue.py).
Units: seconds.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from threading import BoundedSemaphore, Lock

import msgspec

from .grammar import GrammarError, grammar_source
from .grammar_helper import CPU_SECONDS, STARTED

# Of each kind: grammars that can be used, and refusals.
REMEMBERED = 1024
# At once; the others wait. A child may take all of a core for its time.
MOST_TRIALS = 2
# Of the clock, where a machine is too busy to give a child its share; the limit on CPU is the helper's.
PATIENCE_S = 10.0
TOO_COMPLEX = "it takes too long to compile; make it simpler: fewer nested repetitions, alternatives and patterns"


class GrammarUntried(RuntimeError):
    """Nobody could say whether a grammar can be used: the machine is too busy, or helpers do not live."""


class GrammarUndecided(RuntimeError):
    """A trial met a limit below the one that counts."""


@dataclass(frozen=True)
class Trial:
    """What a trial found.

    Attributes:
        problem: what is wrong with the grammar, one line; empty when nothing is.
        cpu_seconds: what the trial took of a core, however busy the machine was; 0 where its end was known.
    """

    problem: str
    cpu_seconds: float


class GrammarCheck:
    """Safe to use from many threads; `close` ends the helper."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._trials = BoundedSemaphore(MOST_TRIALS)
        self._sound: OrderedDict[bytes, str] = OrderedDict()
        self._refused: OrderedDict[bytes, str] = OrderedDict()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self.num_trials = 0

    def remembered(self, kind: str, text: str) -> str | None:
        """Return what is wrong with a grammar that was tried, empty when nothing is; None when nobody knows."""
        key = _key(kind, text)
        with self._lock:
            for verdicts in (self._sound, self._refused):
                if key in verdicts:
                    verdicts.move_to_end(key)
                    return verdicts[key]
        return None

    def check(self, kind: str, text: str, *, cpu_seconds: float = CPU_SECONDS) -> Trial:
        """Say whether a grammar can be used; may wait for others. Not for an event loop.

        Args:
            kind, text: see `grammar_source`.
            cpu_seconds: what the trial may take; less than the default leaves it undecided there.

        Raises:
            GrammarUndecided: it takes longer than `cpu_seconds`; nothing is remembered of it.
            GrammarUntried: try again later; nothing is remembered of it.
        """
        known = self.remembered(kind, text)
        if known is not None:
            return Trial(known, 0.0)
        try:
            source = grammar_source(kind, text)
        except GrammarError as error:
            return Trial(str(error), 0.0)
        with self._trials:
            trial = self._try(source, cpu_seconds)
        if trial.problem == TOO_COMPLEX and cpu_seconds < CPU_SECONDS:
            raise GrammarUndecided
        self._remember(_key(kind, text), trial.problem)
        return trial

    def _remember(self, key: bytes, problem: str) -> None:
        with self._lock:
            verdicts = self._refused if problem else self._sound
            verdicts[key] = problem
            while len(verdicts) > REMEMBERED:
                verdicts.popitem(last=False)

    def close(self) -> None:
        """End the helper; a later check starts another."""
        with self._lock:
            self._end()

    def _try(self, source: str, cpu_seconds: float) -> Trial:
        for _ in range(2):  # a helper may end between two trials, or with a trial in its hands
            answer = self._ask(source, cpu_seconds)
            if answer.startswith(STARTED):
                said = answer.removeprefix(STARTED)
                if not said:
                    return Trial(TOO_COMPLEX, cpu_seconds)
                return Trial(*msgspec.msgpack.decode(said, type=tuple[str, float]))
        raise GrammarUntried("the helper that tries grammars ended twice")

    def _ask(self, source: str, cpu_seconds: float) -> bytes:
        """Return all that a child says about a grammar before it ends."""
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                self._send(theirs)
            ours.settimeout(PATIENCE_S)
            answer = b""
            try:
                with suppress(BrokenPipeError):  # the child died while it read, but may have spoken before
                    ours.sendall(msgspec.msgpack.encode((cpu_seconds, source)))
                    ours.shutdown(socket.SHUT_WR)
                with suppress(ConnectionResetError):
                    while part := ours.recv(1 << 16):
                        answer += part
            except TimeoutError:
                raise GrammarUntried(f"no verdict within {PATIENCE_S:g} s") from None
            return answer

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
        raise GrammarUntried("the helper that tries grammars does not start; see the log of the server")

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


def _key(kind: str, text: str) -> bytes:
    return sha256(f"{kind}\0{text}".encode("utf-8", "surrogatepass")).digest()
