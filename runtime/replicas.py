"""`ReplicaSet`: y engines behind one door. Requests go to the least loaded one, deltas come back.

Not HTTP and not `LLM`, which both stand on it; nothing here decides what an engine does.
Units: seconds, token ids. Use it from one thread: with `poll` (LLM), or from one event loop after `attach` (server).
"""

from __future__ import annotations

import asyncio
import select
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from ..topologies.kv_sizes import shared_groups
from ..topologies.overlap_choice import moe_load
from .balance import least_loaded
from .config import EngineConfig
from .engine_main import run_engine
from .messages import Delta, Failed, FromEngine, Loading, Ready, Stats, Submit, ToEngine
from .params import SamplingParams
from .processes.group import GroupParts
from .processes.launch import EngineStart, Member, spawn_process, spawn_thread
from .processes.supervision import wait_gone
from .replica import Replica
from .resolve import Resolved, resolve
from .trace_session import TraceSession

ENGINE_MODULE = "moewe.runtime.engine_main"
CHECK_EVERY_S = 0.5
CLOSE_TIMEOUT_S = 8.0

OnDeltas = Callable[[Sequence[Delta]], None]
OnFailure = Callable[[Failed], None]
OnLoading = Callable[[int, Loading], None]


class ReplicaLost(RuntimeError):
    """A replica could not start, or none is left; the text is one line."""


class ReplicaSet:
    """Running engines. Made by `start`; `close` leaves no process, thread or descriptor.

    Args:
        resolved: what they run.
        replicas: the engines.
        spawner: the thread that started them and must outlive them.

    Attributes:
        resolved: with the config as every engine has it.
    """

    def __init__(self, resolved: Resolved, replicas: Sequence[Replica], spawner: ThreadPoolExecutor) -> None:
        self.resolved = resolved
        self._replicas = list(replicas)
        self._spawner = spawner
        self._most_requests = resolved.most_requests
        self._backlog: list[Delta] = []  # deltas that came while nobody asked for any
        self._last_check = time.monotonic()
        self._settled = threading.Event()
        self._told: set[int] = set()  # replicas whose failure was reported
        self._loop: _LoopPump | None = None
        self._closed = False

    @classmethod
    def start(
        cls,
        config: EngineConfig | Resolved,
        *,
        engines: str | None = None,
        on_loading: OnLoading | None = None,
        parts: GroupParts | None = None,
    ) -> ReplicaSet:
        """Start all replicas of `config` and return at once; they load meanwhile.

        Args:
            config: what to run; resolved here unless it is already.
            engines: `processes`, or `threads` of this process; None takes threads where ranks are threads too.
            on_loading: called with (replica, progress) from whoever polls or waits.
            parts: what ranks are made of, where engines are threads (tests).

        Raises:
            ValueError: the config cannot run; one line with the fix.
        """
        resolved = config if isinstance(config, Resolved) else resolve(config)
        engines = engines or resolved.config.parallel.ranks
        # The kernel ends a child with the thread that started it, so that thread lives as long as this set.
        spawner = ThreadPoolExecutor(1, thread_name_prefix="moewe-spawner")
        many = resolved.topology.dp > 1
        replicas: list[Replica] = []
        try:
            for index in range(resolved.topology.dp):
                start = _engine_start(resolved, index)
                member = spawner.submit(_spawn_engine, start, engines, parts).result()
                name = f"replica {index}" if many else ""
                watched = engines == "processes"
                replicas.append(Replica(index, name, member, watched=watched, on_loading=on_loading))
        except BaseException:
            for replica in replicas:
                replica.member.kill()
                replica.member.join(CLOSE_TIMEOUT_S)
            spawner.shutdown()
            raise
        return cls(resolved, replicas, spawner)

    # --- what is known ---------------------------------------------------------------------------------------------
    @property
    def ready(self) -> list[Ready]:
        """What each replica said when it was ready, in order; complete when `is_ready`."""
        return [replica.ready for replica in self._replicas if replica.ready is not None]

    @property
    def is_ready(self) -> bool:
        """True when every replica can take requests."""
        return all(replica.ready is not None and replica.lives for replica in self._replicas)

    @property
    def failure(self) -> Failed | None:
        """The first loss of a replica, or None."""
        return next((replica.failure for replica in self._replicas if replica.failure is not None), None)

    @property
    def drained(self) -> bool:
        """True when no replica is at work any more: all have stopped, or are lost."""
        return not any(replica.lives for replica in self._replicas)

    def stats(self) -> list[Stats]:
        """Return the newest statistics of each replica, in order (zeros before the first)."""
        nothing = Stats(num_running=0, num_waiting=0, num_preemptions=0, num_steps=0)
        return [replica.stats or nothing for replica in self._replicas]

    # --- requests --------------------------------------------------------------------------------------------------
    def submit(self, request_id: str, prompt: bytes, params: SamplingParams, priority: int = 0) -> None:
        """Hand a request to the least loaded replica; its deltas follow, the last one with a finish reason.

        Args:
            request_id: unique among those that have not had their last delta.
            prompt: ids of the model, checked and `packed` at the door (runtime/prompts.py).
            params: how to go on; checked there too.
            priority: lower runs first.

        Raises:
            ValueError: a `request_id` in use.
            ReplicaLost: no replica is left.
        """
        if any(replica.owes(request_id) for replica in self._replicas):
            raise ValueError(f"request_id {request_id!r} is already in use; choose another")
        index = self._choose()
        if index < 0:
            raise ReplicaLost(self.failure.reason if self.failure is not None else "the engines have been stopped")
        message = Submit(request_id=request_id, prompt_token_ids=prompt, params=params, priority=priority)
        self._replicas[index].submit(message)
        self._after_command()

    def _choose(self) -> int:
        """Return the least loaded replica whose queue has room, or at least one that lives; -1 when none does."""
        outstanding = [r.outstanding for r in self._replicas]
        index = least_loaded(outstanding, [r.lives and r.num_requests < self._most_requests for r in self._replicas])
        # What was aborted counts until the engine says so; it will have room, or refuse.
        return index if index >= 0 else least_loaded(outstanding, [r.lives for r in self._replicas])

    def abort(self, request_id: str) -> None:
        """Ask to forget a request; its last delta says `abort`. Unknown ids are ignored."""
        for replica in self._replicas:
            if replica.owes(request_id):
                replica.abort(request_id)
        self._after_command()

    def trace(self, num_steps: int) -> TraceSession:
        """Let every replica record where the time of its next `num_steps` steps goes; one trace at a time."""
        return TraceSession(self._replicas, num_steps, self._after_command)

    def _after_command(self) -> None:
        if self._loop is not None:
            self._loop.watch()

    # --- waiting ---------------------------------------------------------------------------------------------------
    def poll(self, timeout: float | None = 0.0) -> list[Delta]:
        """Return the deltas that have come, waiting up to `timeout` seconds for the first (None: while one lives)."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            deltas = self.collect()
            left = CHECK_EVERY_S if deadline is None else min(CHECK_EVERY_S, deadline - time.monotonic())
            if deltas or left <= 0 or self.drained:
                return deltas
            self._sleep(left)

    def wait_ready(self, timeout: float | None = None) -> None:
        """Wait until every replica is ready; works before `attach`, and after it from another thread.

        Raises:
            ValueError: the user's mistake (a bad checkpoint, too little memory); one line.
            ReplicaLost: an engine could not start.
            TimeoutError: not within `timeout` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._settled.is_set():
            left = CHECK_EVERY_S if deadline is None else min(CHECK_EVERY_S, deadline - time.monotonic())
            if left <= 0:
                raise TimeoutError(f"the engines were not ready after {timeout} s")
            if self._loop is not None:
                self._settled.wait(left)
            else:
                self._backlog = self.collect()
                if not self._settled.is_set():
                    self._sleep(left)
        if self.failure is not None:
            raise (ValueError if self.failure.user_error else ReplicaLost)(self.failure.reason)

    def attach(
        self,
        loop: asyncio.AbstractEventLoop,
        on_deltas: OnDeltas,
        on_failure: OnFailure,
        on_ready: Callable[[], None] | None = None,
    ) -> None:
        """Let `loop` do the waiting from now on (call this, and everything else but `wait_ready`, in its thread).

        Args:
            loop: the running event loop.
            on_deltas: called with those that came together, in order.
            on_failure: called once for each replica that is lost, after the last deltas of its requests.
            on_ready: called once, when all replicas are ready.
        """
        self._loop = _LoopPump(self, self._replicas, loop, (on_deltas, on_failure, on_ready))
        self._loop.turn()

    def collect(self) -> list[Delta]:
        """Take in, without waiting, whatever has come, and see who is silent."""
        deltas, self._backlog = self._backlog, []
        for replica in self._replicas:
            deltas += replica.pump()
        now = time.monotonic()
        if now - self._last_check >= CHECK_EVERY_S:
            self._last_check = now
            for replica in self._replicas:
                deltas += replica.check(now)
        if self.is_ready or self.failure is not None:
            self._settled.set()
        return deltas

    def new_failures(self) -> list[Failed]:
        """Return losses that this method has not returned yet."""
        lost = [r for r in self._replicas if r.failure is not None and r.index not in self._told]
        self._told.update(replica.index for replica in lost)
        return [replica.failure for replica in lost if replica.failure is not None]

    def _sleep(self, seconds: float) -> None:
        """Wait in the kernel until an engine has something to say or takes what is queued."""
        poll = select.poll()
        for replica in self._replicas:
            if replica.lives:
                channel = replica.member.channel
                poll.register(channel, select.POLLIN | (select.POLLOUT if channel.pending_bytes else 0))
        poll.poll(max(0.0, seconds) * 1000)

    # --- the end ---------------------------------------------------------------------------------------------------
    def drain(self) -> None:
        """Let all replicas finish what they have and stop; go on polling until `drained`, then `close`."""
        for replica in self._replicas:
            replica.shut_down(drain=True)
        self._after_command()

    def close(self, timeout: float = CLOSE_TIMEOUT_S) -> None:
        """End everything: in order within `timeout` seconds, then by force. Requests that still run get an error delta,
        which `poll` returns. May be called again."""
        if self._closed:
            return
        self._closed = True
        if self._loop is not None:
            self._loop.detach()
            self._loop = None
        for replica in self._replicas:
            if replica.imports:
                replica.member.kill()  # it would not listen for a while
            replica.shut_down(drain=False)
        deadline = time.monotonic() + timeout
        while not self.drained and time.monotonic() < deadline:
            self._backlog = self.collect()
            if not self.drained:
                self._sleep(0.1)
        for replica in self._replicas:
            self._end(replica)
        self._spawner.shutdown()

    def _end(self, replica: Replica) -> None:
        member = replica.member
        if replica.ends_itself:
            member.join(CLOSE_TIMEOUT_S)
        member.kill()
        member.join(CLOSE_TIMEOUT_S)
        if replica.ready is not None:
            wait_gone([pid for pid in replica.ready.pids if pid != member.pid], CLOSE_TIMEOUT_S)


class _LoopPump:
    """Turns readable channels into callbacks of an event loop."""

    def __init__(
        self,
        replicas: ReplicaSet,
        members: Sequence[Replica],
        loop: asyncio.AbstractEventLoop,
        callbacks: tuple[OnDeltas, OnFailure, Callable[[], None] | None],
    ) -> None:
        self._set = replicas
        self._members = members
        self._event_loop = loop
        self._on_deltas, self._on_failure, self._on_ready = callbacks
        self._reading: set[int] = set()
        self._writing: set[int] = set()
        self._timer = loop.call_later(CHECK_EVERY_S, self._tick)

    def turn(self) -> None:
        """Deliver what has come."""
        deltas = self._set.collect()
        if deltas:
            self._on_deltas(deltas)
        for failure in self._set.new_failures():
            self._on_failure(failure)
        if self._on_ready is not None and self._set.is_ready:
            on_ready, self._on_ready = self._on_ready, None
            on_ready()
        self.watch()

    def watch(self) -> None:
        """Ask the loop for exactly those channels that can bring something."""
        living = [replica.member.channel for replica in self._members if replica.lives]
        readable = {channel.fileno() for channel in living}
        writable = {channel.fileno() for channel in living if channel.pending_bytes}
        for fd in self._reading - readable:
            self._event_loop.remove_reader(fd)
        for fd in readable - self._reading:
            self._event_loop.add_reader(fd, self.turn)
        for fd in self._writing - writable:
            self._event_loop.remove_writer(fd)
        for fd in writable - self._writing:
            self._event_loop.add_writer(fd, self.turn)
        self._reading, self._writing = readable, writable

    def detach(self) -> None:
        """Leave the loop alone from now on."""
        self._timer.cancel()
        for fd in self._reading:
            self._event_loop.remove_reader(fd)
        for fd in self._writing:
            self._event_loop.remove_writer(fd)
        self._reading, self._writing = set(), set()

    def _tick(self) -> None:
        self._timer = self._event_loop.call_later(CHECK_EVERY_S, self._tick)
        self.turn()


def _engine_start(resolved: Resolved, index: int) -> EngineStart:
    num_ranks = resolved.topology.ep
    return EngineStart(
        config=resolved.config,
        replica=index,
        num_layers=resolved.model.num_layers,
        vocab_size=resolved.model.vocab_size,
        eos_token_ids=resolved.model.eos_token_ids,
        kv_groups=shared_groups(resolved.footprint.kv_groups, resolved.topology.atp),
        moe_load=moe_load(resolved.footprint),
        fixed_max_model_len=resolved.fixed_max_model_len,
        cpus=resolved.cpus[index * num_ranks : (index + 1) * num_ranks],
        label=f"replica {index} " if resolved.topology.dp > 1 else "",
    )


def _spawn_engine(start: EngineStart, engines: str, parts: GroupParts | None) -> Member:
    if engines == "processes":
        threads = start.config.parallel.threads or 1
        return spawn_process(ENGINE_MODULE, start, FromEngine, threads=threads)
    return spawn_thread(
        f"moewe-engine-{start.replica}", lambda channel: run_engine(channel, start, parts), FromEngine, ToEngine
    )
