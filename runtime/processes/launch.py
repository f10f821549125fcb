"""Starting ranks and engines, as processes or as threads of this process, behind one handle.

Not what they do (worker_main.py, engine_main.py) and not the decision to end them (supervision.py).
Units: seconds, process ids. A child process gets one end of a socket pair and its start message, nothing else.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec

from ...topologies import KVGroup
from ...topologies.overlap_choice import MoELoad
from ..config import EngineConfig
from ..messages import Message
from .channel import Channel
from .supervision import process_state


class WorkerStart(Message, frozen=True, kw_only=True):
    """First message to a worker process.

    Attributes:
        config: resolved.
        rank, num_ranks: position in its group.
        run_directory: where the group's rendezvous file and progress board are.
        device_index: which of the host's devices it uses, where it has several.
        cpus: logical CPUs to run on; empty keeps those of the parent.
        has_cores: every compute thread of all ranks on the host has a core to itself.
        label: how log lines call it.
        exchanges: names of what joins the group; each step uses one of them.
    """

    config: EngineConfig
    rank: int
    num_ranks: int
    run_directory: str
    device_index: int = 0
    cpus: tuple[int, ...] = ()
    has_cores: bool = False
    label: str = "rank"
    exchanges: tuple[str, ...] = ("local",)


class EngineStart(Message, frozen=True, kw_only=True):
    """First message to an engine.

    Attributes:
        config: resolved.
        replica: which of the replicas behind one server it is.
        num_layers: of the model, to predict the time of one.
        vocab_size: rows of its embedding.
        eos_token_ids: of the model.
        kv_groups: its cache groups, as a rank holds them.
        moe_load: what one of its MoE layers asks of a rank; None for a dense model.
        fixed_max_model_len: `max_model_len` was asked for, so it may not be lowered.
        cpus: per rank, logical CPUs to run on; empty binds nothing.
        label: what log lines put before `engine` and `rank`; empty for the only replica.
    """

    config: EngineConfig
    replica: int
    num_layers: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    kv_groups: tuple[KVGroup, ...]
    moe_load: MoELoad | None = None
    fixed_max_model_len: bool = False
    cpus: tuple[tuple[int, ...], ...] = ()
    label: str = ""


class Member(Protocol):
    """A running engine or rank, seen from the side that started it."""

    channel: Channel[Any]
    pid: int

    def exit_reason(self) -> str | None:
        """Return how it ended, or None while it runs."""
        ...

    def stopped(self) -> bool:
        """True when a signal stopped its process (state T)."""
        ...

    def dump_stack(self) -> None:
        """Let its process write its stacks to stderr, if it is one."""
        ...

    def kill(self) -> None:
        """End it at once; a thread is only cut off."""
        ...

    def join(self, timeout: float) -> bool:
        """Wait until it ended, then free its channel; False after `timeout`."""
        ...


class ProcessMember:
    """A child process."""

    def __init__(self, process: subprocess.Popen[bytes], channel: Channel[Any]) -> None:
        self._process = process
        self.channel = channel
        self.pid = process.pid

    def exit_reason(self) -> str | None:
        """Return how the process ended, or None while it runs."""
        code = self._process.poll()
        if code is None:
            return None
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"process {self.pid} was killed by {signal.Signals(-code).name}"
        return f"process {self.pid} exited with code {code}"

    @property
    def exit_code(self) -> int | None:
        """Code of the ended process, negative for a signal; None while it runs."""
        return self._process.poll()

    def stopped(self) -> bool:
        """True when a signal stopped the process."""
        return process_state(self.pid) in ("T", "t")

    def dump_stack(self) -> None:
        """Let the process write its stacks to stderr."""
        self._signal(signal.SIGUSR1)

    def kill(self) -> None:
        """End the process at once (a stopped one too)."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def join(self, timeout: float) -> bool:
        """Wait for the process, then free its channel."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        self.channel.close()
        return True


class ThreadMember:
    """A thread of this process."""

    def __init__(self, thread: threading.Thread, channel: Channel[Any]) -> None:
        self._thread = thread
        self.channel = channel
        self.pid = os.getpid()

    def exit_reason(self) -> str | None:
        """Return that the thread ended, or None while it runs."""
        return None if self._thread.is_alive() else f"thread {self._thread.name} ended"

    def stopped(self) -> bool:
        """Never: who could ask would be stopped too."""
        return False

    def dump_stack(self) -> None:
        """Nothing: the stacks are those of this process."""

    def kill(self) -> None:
        """Cut the thread off; it ends when it next looks at its channel."""
        self.channel.shutdown()

    def join(self, timeout: float) -> bool:
        """Wait for the thread, then free its channel."""
        self._thread.join(timeout)
        if self._thread.is_alive():
            return False
        self.channel.close()
        return True


def spawn_process(module: str, start: msgspec.Struct, receives: Any, *, threads: int) -> ProcessMember:
    """Start `python -m module` with one end of a socket pair and send it `start`.

    The child ends with the calling thread, so call this from a thread that lives as long as the child shall.

    Args:
        module: calls `child.enter_child` first.
        start: its first message.
        receives: what this end accepts.
        threads: compute threads of its numeric libraries.
    """
    ours, theirs = socket.socketpair()
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    with theirs:
        process = subprocess.Popen(
            # -P: a folder called `moewe` where the user happens to stand must not be taken for the package.
            [sys.executable, "-P", "-m", module, str(theirs.fileno()), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            env=environment,
            process_group=0,
        )
    channel: Channel[Any] = Channel(ours, receives)
    channel.post(start)
    return ProcessMember(process, channel)


def spawn_thread(name: str, target: Callable[[Channel[Any]], object], receives: Any, sends: Any) -> ThreadMember:
    """Run `target(channel)` in a daemon thread; the channel is closed when it returns.

    Args:
        name: of the thread.
        target: its body.
        receives: what this end accepts.
        sends: what the thread's end accepts.
    """
    ours, theirs = socket.socketpair()
    channel: Channel[Any] = Channel(theirs, sends)

    def run() -> None:
        try:
            target(channel)
        finally:
            channel.close()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return ThreadMember(thread, Channel(ours, receives))


class RunDirectory:
    """A folder that only this user can enter, where the ranks of one group meet; removed as soon as they have met."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="moewe-"))

    @property
    def board_path(self) -> Path:
        """File of the progress board; maps stay valid after `remove`."""
        return board_path(self.path)

    def remove(self) -> None:
        """Remove the folder, if it still is there."""
        shutil.rmtree(self.path, ignore_errors=True)


def board_path(run_directory: Path) -> Path:
    """Return where the ranks of a group report their progress."""
    return run_directory / "progress"


def exchange_path(run_directory: Path) -> Path:
    """Return the file that says where the memory is through which the ranks of a group exchange rows."""
    return run_directory / "exchange"


def attention_path(run_directory: Path, replica: int) -> Path:
    """Return the file that says where the memory is by which the ranks of an attention replica join their heads."""
    return run_directory / f"attention-{replica}"


def store_path(run_directory: Path) -> Path:
    """Return the file through which the ranks of a group find each other."""
    return run_directory / "store"
