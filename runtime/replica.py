"""One replica as its client sees it: an engine at the other end of a channel, what it owes, and whether it lives.

Not the choice between replicas (runtime/balance.py) and not the set of them (runtime/replicas.py).
Units: seconds of a monotonic clock, tokens.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

from .balance import token_work
from .messages import (
    ENGINE_BUSY,
    Abort,
    Capturing,
    Delta,
    Failed,
    Loading,
    Message,
    Outputs,
    Ready,
    Shutdown,
    StartTrace,
    Stats,
    Stopped,
    StopTrace,
    Submit,
    Traced,
    TraceProgress,
    refusal,
)
from .plan import unpack
from .processes.channel import ChannelClosed, ChannelFull
from .processes.launch import Member
from .processes.supervision import MOST_CREDITED_S, has_children, process_state

log = logging.getLogger(__name__)

# An engine speaks each second. Before its first word it has to start an interpreter on what may be a busy machine.
SILENCE_S = 10.0
FIRST_WORD_S = 120.0
STOPPED_S = 5.0


class Silence:
    """How long nothing was heard, not counting time in which nobody listened."""

    def __init__(self, now: float) -> None:
        self.seconds = 0.0
        self.heard_once = False
        self._asked = now

    def hear(self) -> None:
        """Something was heard."""
        self.seconds = 0.0
        self.heard_once = True

    def pass_time(self, now: float) -> None:
        """Count the time since the last call, at most a moment of it: a client that slept must not blame the engine."""
        self.seconds += min(now - self._asked, MOST_CREDITED_S)
        self._asked = now


class Replica:
    """The client's end of one engine.

    Args:
        index: its number.
        name: how a failure calls it; empty when it is the only one.
        member: the engine.
        watched: it is a process, whose silence means something.
        on_loading: told of progress.

    Attributes:
        ready: what it said when it was; None before.
        stats: the newest statistics, with the counters of all ranks.
        failure: why it is lost, or None.
        stopped: it has ended as it was told to.
        ends_itself: it has said its last word and ended its ranks; the process is about to exit.
        outstanding: tokens that it still has to run, as expected.
        on_trace: shown what it says of a trace; None: nobody traces.
    """

    def __init__(
        self,
        index: int,
        name: str,
        member: Member,
        *,
        watched: bool,
        on_loading: Callable[[int, Loading | Capturing], None] | None,
    ) -> None:
        self.index = index
        self.member = member
        self.ready: Ready | None = None
        self.stats: Stats | None = None
        self.failure: Failed | None = None
        self.stopped = False
        self.ends_itself = False
        self.outstanding = 0
        self._ending = False
        self.on_trace: Callable[[TraceProgress | Traced], None] | None = None
        self._name = name
        self._watched = watched
        self._on_loading = on_loading
        # Per live request: [prompt tokens not known to have run, all work left, all work].
        self._owed: dict[str, list[int]] = {}
        self._refused: list[Delta] = []  # answers to requests that found the channel full
        # What found it full and still has to be said.
        self._unsaid: deque[Abort | Shutdown | StartTrace | StopTrace] = deque()
        self._silence = Silence(time.monotonic())

    @property
    def lives(self) -> bool:
        """True while it can take requests and answer them."""
        return self.failure is None and not self.stopped

    @property
    def takes_requests(self) -> bool:
        """True while it is ready and was not told to end."""
        return self.lives and self.ready is not None and not self._ending

    @property
    def num_requests(self) -> int:
        """Requests that have not had their last delta."""
        return len(self._owed)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each of them, prompt and expected output."""
        return [work for _, _, work in self._owed.values()]

    @property
    def imports(self) -> bool:
        """True while it is a process that has neither spoken nor started a rank: it may be killed without a trace."""
        return self._watched and not self._silence.heard_once and not has_children(self.member.pid)

    def owes(self, request_id: str) -> bool:
        """True while `request_id` has not had its last delta."""
        return request_id in self._owed

    # --- commands --------------------------------------------------------------------------------------------------
    def submit(self, request: Submit) -> None:
        """Hand over a request; if the engine turns out to be lost, `pump` tells."""
        num_prompt_tokens = len(unpack(request.prompt_token_ids))
        work = token_work(num_prompt_tokens, request.params)
        self._owed[request.request_id] = [num_prompt_tokens, work, work]
        self.outstanding += work
        try:
            self._post(request)
        except ChannelFull as error:
            self._refused.append(refusal(request.request_id, f"the engine is busy: {error}", ENGINE_BUSY))

    def abort(self, request_id: str) -> None:
        """Ask to forget a request; its last delta says so."""
        self._unsaid.append(Abort(request_ids=(request_id,)))
        self._say()

    def shut_down(self, *, drain: bool) -> None:
        """Ask to end."""
        self._ending = True
        self._unsaid.append(Shutdown(drain=drain))
        self._say()

    def trace(self, order: StartTrace | StopTrace) -> None:
        """Ask to record steps, or to stop that; `on_trace` hears of it."""
        self._unsaid.append(order)
        self._say()

    def _say(self) -> None:
        """Post what must not be dropped; what finds the channel full goes with the next `pump`."""
        try:
            while self._unsaid:
                self._post(self._unsaid[0])
                self._unsaid.popleft()
        except ChannelFull as error:
            log.warning("the engine cannot be told yet: %s", error)

    def _post(self, message: Message) -> None:
        if not self.lives:
            return
        try:
            self.member.channel.post(message)
        except ChannelClosed as error:
            log.warning("the engine cannot be told: %s", error)  # `pump` or `check` finds out why

    # --- answers ---------------------------------------------------------------------------------------------------
    def pump(self) -> list[Delta]:
        """Send what is queued and take in what has come, without waiting; returns deltas, errors of a loss included."""
        if not self.lives:
            return []
        deltas = [delta for delta in self._refused if self._settle(delta)]
        self._refused.clear()
        try:
            self.member.channel.flush()
            self._say()
            for message in self.member.channel.receive_ready():
                self._silence.hear()
                deltas += self._take(message)
        except ChannelClosed:
            if self.lives:
                deltas += self._lose(self._how_it_ended())
        return deltas

    def _take(self, message: Message) -> list[Delta]:
        match message:
            case Outputs(deltas=deltas):
                return [delta for delta in deltas if self._settle(delta)]
            case Stats():
                self.stats = message
            case TraceProgress() | Traced():
                if self.on_trace is not None:
                    self.on_trace(message)
            case Loading() | Capturing():
                if self._on_loading is not None:
                    self._on_loading(self.index, message)
            case Ready():
                self.ready = message
            case Failed():
                self.ends_itself = True
                return self._lose(message)
            case Stopped():
                self.ends_itself = self.stopped = True
                return self._give_up("the engine was stopped")
        return []

    def _settle(self, delta: Delta) -> bool:
        """Book what `delta` brought; False when nobody waits for it any more."""
        owed = self._owed.get(delta.request_id)
        if owed is None:
            return False
        done = len(delta.token_ids)
        if done:
            done, owed[0] = done + owed[0], 0
        if delta.finish_reason is not None:
            del self._owed[delta.request_id]
            done = owed[1]
        done = min(done, owed[1])
        owed[1] -= done
        self.outstanding -= done
        return True

    # --- loss ------------------------------------------------------------------------------------------------------
    def check(self, now: float) -> list[Delta]:
        """Lose an engine that is silent for too long; returns the errors of its requests."""
        self._silence.pass_time(now)
        if not self.lives or not self._watched:
            return []
        silent = self._silence.seconds
        pid = self.member.pid
        if silent > STOPPED_S and process_state(pid) in ("T", "t"):
            return self._lose(Failed(reason=f"the engine (process {pid}) is stopped by a signal (state T)"))
        if silent > (SILENCE_S if self._silence.heard_once else FIRST_WORD_S):
            return self._lose(Failed(reason=f"the engine (process {pid}) gave no sign of life for {silent:.0f} s"))
        return []

    def _how_it_ended(self) -> Failed:
        for _ in range(50):
            reason = self.member.exit_reason()
            if reason is not None:
                return Failed(reason=f"the engine is lost: {reason}")
            time.sleep(0.01)
        return Failed(reason="the engine is lost: it closed its channel")

    def _lose(self, failed: Failed) -> list[Delta]:
        if not self.ends_itself:
            self.member.kill()
        reason = f"{self._name}: {failed.reason}" if self._name else failed.reason
        self.failure = Failed(reason=reason, rank=failed.rank, user_error=failed.user_error)
        return self._give_up(reason)

    def _give_up(self, reason: str) -> list[Delta]:
        deltas = [Delta(request_id=request_id, finish_reason="error", error=reason) for request_id in self._owed]
        self._owed.clear()
        self.outstanding = 0
        return deltas
