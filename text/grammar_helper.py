"""The process in which grammars of strangers are tried first: `python -m moewe.text.grammar_helper FD`.

Not the engine's use of them. It holds no model. For every grammar it forks a child with a limit on CPU time and memory;
the child says in one message what is wrong, or that nothing is, and what that took. A child that dies says nothing,
which is an answer too.
Units: seconds of CPU, bytes.
"""

from __future__ import annotations

import os
import random
import resource
import signal
import socket
import sys
import time

import msgspec

from .grammar import GrammarError, byte_tokens, compile_source

# What a child says first; then comes what is wrong, and the CPU that its trial took. If nothing follows, it met a
# limit; if not even this comes, nobody tried the grammar.
STARTED = b"+"
CPU_SECONDS = 0.25
MEMORY_BYTES = 2 << 30
# How far a text is written on trial: what a grammar costs shows in its masks, too.
TRIAL_BYTES = 48


def try_grammar(source: str) -> str:
    """Compile what `grammar_source` made and write the beginning of a text with it; return what is wrong, or ""."""
    try:
        state = compile_source(source, byte_tokens())
    except GrammarError as error:
        return str(error)
    choices = random.Random(0)
    for _ in range(TRIAL_BYTES):
        if state.is_stopped():
            break
        words = state.compute_bitmask()
        allowed = [byte for byte in range(256) if words[byte // 8] >> byte % 8 & 1]
        if not allowed or not state.consume_token(choices.choice(allowed)):
            break
    return "it is too complex; make it simpler" if state.is_error() else ""


def serve(control: socket.socket) -> None:
    """Fork a child for every socket that comes, until nobody is left who could send one."""
    byte_tokens()  # before the first fork: all children share it
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks for exit codes
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server ends us by closing its end
    while True:
        data, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not data:
            return
        for fd in fds:
            with socket.socket(fileno=fd) as connection:
                if os.fork() == 0:
                    control.close()
                    _be_child(connection)


def _be_child(connection: socket.socket) -> None:
    """Answer one trial and end; the kernel ends us where that takes too long."""
    try:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        connection.sendall(STARTED)
        parts = []
        while part := connection.recv(1 << 16):
            parts.append(part)
        seconds, source = msgspec.msgpack.decode(b"".join(parts), type=tuple[float, str])
        signal.setitimer(signal.ITIMER_PROF, seconds)
        problem = try_grammar(source)
        connection.sendall(msgspec.msgpack.encode((problem, time.process_time())))
    finally:
        os._exit(0)


def main() -> None:
    """Serve the socket whose number is the argument."""
    os.nice(5)  # running requests come first
    with socket.socket(fileno=int(sys.argv[1])) as control:
        serve(control)


if __name__ == "__main__":
    main()
