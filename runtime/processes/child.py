"""The first lines of every process that moewe starts: it obeys its parent only, and dies with it.

Not the work of the process (engine_main.py, worker_main.py) and not its parent's side (launch.py).
Units: seconds, file descriptors, process ids.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import select
import signal
import socket
import sys
import threading
from typing import Any

from ...telemetry.logs import set_up_inherited_logs
from .channel import Channel

_PR_SET_PDEATHSIG = 1
EXIT_ORPHANED = 4


def enter_child(receives: Any) -> Channel[Any]:
    """Make this process a child that cannot outlive its parent and return the channel to it.

    SIGINT and SIGTERM are ignored: a terminal or a service manager sends them to everybody, and the parent decides.
    SIGUSR1 writes the stacks of all threads to stderr. The arguments are those of `launch.spawn_process`.
    """
    fd, parent = int(sys.argv[1]), int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    die_with_parent(parent)
    sock = socket.socket(fileno=fd)
    hold_lifeline(sock)
    return Channel(sock, receives)


def die_with_parent(parent: int) -> None:
    """Ask the kernel for SIGKILL when the thread that started this process ends, however that happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before we asked
        os._exit(EXIT_ORPHANED)


def hold_lifeline(sock: socket.socket) -> None:
    """End this process at once when the other end of `sock` is gone, whatever its other threads do."""

    def wait() -> None:
        poll = select.poll()
        poll.register(sock, 0)  # no events asked: only the hang-up is reported
        poll.poll()
        os._exit(EXIT_ORPHANED)

    threading.Thread(target=wait, name="moewe-lifeline", daemon=True).start()


def freeze_heap() -> None:
    """Leave everything that exists now out of garbage collections, in a process that is ours and ready to work.

    Modules, tables and weights live as long as it; to visit them again and again takes milliseconds of a step.
    """
    gc.collect()
    gc.freeze()


def log_as(name: str) -> None:
    """Write log lines of this process to stderr, marked with `name`, in the form that was asked for."""
    set_up_inherited_logs(name)
