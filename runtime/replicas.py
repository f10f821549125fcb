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

from .balance import least_loaded
from .config import EngineConfig
from .launcher import Launcher, OnLoading
from .loop_pump import CHECK_EVERY_S, LoopPump, OnDeltas, OnFailure
from .messages import Delta, Failed, Ready, Stats, Submit
from .params import SamplingParams
from .processes.group import GroupParts
from .processes.supervision import wait_gone
from .replica import Replica
from .resolve import Resolved, resolve
from .trace_session import TraceSession

CLOSE_TIMEOUT_S = 8.0


class ReplicaLost(RuntimeError):
    """A replica could not start, or none is left; the text is one line."""


class ReplicaSet:
    """Running engines. Made by `start`; `close` leaves no process, thread or descriptor.

    Args:
        resolved: what they run.
        launcher: starts engines.

    Attributes:
        resolved: with the config as every engine has it.
    """

    def __init__(self, resolved: Resolved, launcher: Launcher) -> None:
        self.resolved = resolved
        self._launcher = launcher
        self._replicas: list[Replica] = []
        self._begun: list[Replica] = []  # started, and not among them yet
        self._most_requests = resolved.most_requests
        self._backlog: list[Delta] = []  # deltas that came while nobody asked for any
        self._last_check = time.monotonic()
        self._settled = threading.Event()
        self._told: set[int] = set()  # replicas whose failure was reported
        self._loop: LoopPump | None = None
        self._closed = False

    @classmethod
    def start(
        cls,
        config: EngineConfig | Resolved,
        *,
        engines: str | None = None,
        on_loading: OnLoading | None = None,
        parts: GroupParts | None = None,
        first: int | None = None,
    ) -> ReplicaSet:
        """Start all replicas of `config` and return at once; they load meanwhile.

        Args:
            config: what to run; resolved here unless it is already.
            engines: `processes`, or `threads` of this process; None takes threads where ranks are threads too.
            on_loading: called with (replica, progress) from whoever polls or waits.
            parts: what ranks are made of, where engines are threads (tests).
            first: so many replicas only; `launch` and `launch_aside` start the others.

        Raises:
            ValueError: the config cannot run; one line with the fix.
        """
        resolved = config if isinstance(config, Resolved) else resolve(config)
        made = cls(resolved, Launcher(engines or resolved.config.parallel.ranks, on_loading, parts))
        try:
            made.launch(range(resolved.topology.dp if first is None else first))
        except BaseException:
            made._launcher.close()
            raise
        return made

    def launch(self, indices: Sequence[int]) -> None:
        """Start the replicas of these numbers, each the next one or in place of one that has ended."""
        self._spawn(indices)
        self._add()

    async def launch_aside(self, indices: Sequence[int]) -> None:
        """The same from an event loop, which goes on while processes are started; `close` may be called meanwhile."""
        await asyncio.to_thread(self._spawn, indices)
        self._add()

    def _spawn(self, indices: Sequence[int]) -> None:
        """Start engines, all of them or none; from any thread."""
        begun = self._begun
        try:
            for index in indices:
                assert index <= len(self._replicas) + len(begun), (index, len(self._replicas))
                begun.append(self._launcher.replica(self.resolved, index))
            if self._closed:
                raise ReplicaLost("the engines have been stopped")
        except BaseException:
            self._drop_begun()
            raise

    def _drop_begun(self) -> None:
        """End engines that nobody has seen yet."""
        for replica in self._begun:
            replica.member.kill()
            replica.member.join(CLOSE_TIMEOUT_S)
        self._begun.clear()

    def _add(self) -> None:
        """Let the engines that were started be replicas of the set."""
        for replica in self._begun:
            self._replicas[replica.index : replica.index + 1] = [replica]
            self._told.discard(replica.index)
        self._begun.clear()
        self._after_command()

    def retire(self, indices: Sequence[int]) -> None:
        """Let these replicas finish what they have and stop, while others go on; see `have_ended`."""
        for index in indices:
            self._replicas[index].shut_down(drain=True)
        self._after_command()

    def have_ended(self, indices: Sequence[int]) -> bool:
        """Tell whether these replicas are at work no more; `free` then waits for their processes."""
        return not any(self._replicas[index].lives for index in indices)

    def free(self, indices: Sequence[int]) -> None:
        """Wait until nothing is left of replicas that have ended, or end it by force; from any thread."""
        for index in indices:
            self._end(self._replicas[index])

    def are_ready(self, indices: Sequence[int]) -> bool:
        """Tell whether these replicas can take requests."""
        return all(self._replicas[index].ready is not None and self._replicas[index].lives for index in indices)

    @property
    def lengths(self) -> list[int]:
        """Tokens that each request which runs or waits is expected to hold at its end, prompt and output."""
        return [length for replica in self._replicas for length in replica.lengths]

    @property
    def least_outstanding(self) -> int | None:
        """The work of the replica that has least of those that take requests; None where none does."""
        return min((replica.outstanding for replica in self._replicas if replica.takes_requests), default=None)

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
        return next(iter(self.failures(range(len(self._replicas)))), None)

    def failures(self, indices: Sequence[int]) -> list[Failed]:
        """Return the losses among the replicas of these numbers, in order."""
        return [r.failure for r in self._replicas if r.index in indices and r.failure is not None]

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
        takes = [r.takes_requests for r in self._replicas]
        roomy = [fine and r.num_requests < self._most_requests for fine, r in zip(takes, self._replicas)]
        index = least_loaded(outstanding, roomy if any(takes) else [r.lives for r in self._replicas])
        # What was aborted counts until the engine says so; it will have room, or refuse.
        if index < 0 and any(takes):
            index = least_loaded(outstanding, takes)
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
        self._loop = LoopPump(self, self._replicas, loop, (on_deltas, on_failure, on_ready))
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
        self._launcher.close()
        self._drop_begun()

    def _end(self, replica: Replica) -> None:
        member = replica.member
        if replica.ends_itself:
            member.join(CLOSE_TIMEOUT_S)
        member.kill()
        member.join(CLOSE_TIMEOUT_S)
        if replica.ready is not None:
            wait_gone([pid for pid in replica.ready.pids if pid != member.pid], CLOSE_TIMEOUT_S)
