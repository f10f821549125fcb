"""Changes the layout of a server at work: new replicas begin and take requests, old ones finish theirs and end.

Not what to change to (topologies/advisor/) and not in which turns (topologies/advisor/turns.py). Runs in the event
loop. When a new replica cannot start, what was ended is started again and the old layout goes on. Units: seconds.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from ...runtime.fleet import Fleet
from ...runtime.kernels import prepare_kernels
from ...runtime.messages import Failed
from ...runtime.new_layout import NewLayout, new_layout
from ...runtime.prompts import with_ends
from ...runtime.replicas import ReplicaSet
from ...runtime.resolve import Resolved
from ...topologies.advisor.records import CHANGE
from ...topologies.advisor.turns import BESIDE, Turn
from ...topologies.spec import Topology, parse_topology
from ..errors import ApiError, invalid
from ..intake.token_ids import in_thread
from ..state import ServerState

log = logging.getLogger(__name__)

_POLL_S = 0.05
_TELL_S = 60.0  # how often the log says that a change waits for requests
RUNNING, DONE, FAILED = "running", "done", "failed"


class _NotStartedError(RuntimeError):
    """A replica could not start."""


@dataclass
class ChangeStatus:
    """How far a change is.

    Attributes:
        before, after: layouts in their long form.
        way: beside what runs, or in turns.
        turns, turn: how many, and the one that runs, from 1.
        state: RUNNING, DONE or FAILED.
        reason: why it failed.
        seconds: how long it took, as far as it has.
    """

    before: str
    after: str
    way: str
    turns: int
    turn: int = 0
    state: str = RUNNING
    reason: str = ""
    seconds: float = 0.0


class LayoutChanger:
    """The changes of one server, one at a time.

    Args:
        state: of the server.
        fleet: what serves.
        running: what that is.
        on_failure: told of a replica that is lost, but for those that begin: then the change fails.
        on_changed: told of a change at its end: how it ended, and what runs with how long it took to start.
        start: makes a set of which no replica runs yet.
    """

    def __init__(
        self,
        state: ServerState,
        fleet: Fleet,
        running: Resolved,
        on_failure: Callable[[Failed], None],
        on_changed: Callable[[ChangeStatus, Resolved, float], None],
        start: Callable[[Resolved], ReplicaSet] = lambda resolved: ReplicaSet.start(resolved, first=0),
    ) -> None:
        self._state, self._fleet, self._running = state, fleet, running
        self._on_failure, self._on_changed = on_failure, on_changed
        self._start_set = start
        self._new: ReplicaSet | None = None
        self._starting: Sequence[int] = ()  # replicas of it whose loss ends the change, not the server
        self._is_planning = False
        self._began = 0.0
        self._task: asyncio.Task[None] | None = None
        self.status: ChangeStatus | None = None

    @property
    def is_running(self) -> bool:
        """True while a change is under way."""
        return self._is_planning or (self._task is not None and not self._task.done())

    def view(self) -> dict[str, Any] | None:
        """Return the latest change as JSON; None before the first."""
        if self.status is not None and self.status.state == RUNNING:
            self.status.seconds = time.monotonic() - self._began
        return None if self.status is None else asdict(self.status)

    async def begin(self, asked: str | None) -> ChangeStatus:
        """Begin to change to the layout `asked` for, by default to the advised one; it goes on by itself.

        Raises:
            ApiError: it is not allowed, not advised, makes no sense, or another change runs.
        """
        state = self._state
        if not state.options.allow_apply:
            raise ApiError(403, "this server does not change its layout; start it with --allow-apply", code="forbidden")
        state.require_ready()
        if self.is_running:
            raise ApiError(409, "the layout is being changed already; wait until it is done", code="change_running")
        topology = self._wanted(asked)
        self._is_planning = True
        try:
            lengths = self._fleet.lengths()
            layout = await in_thread(lambda: self._planned(topology, lengths))
        except ValueError as error:
            raise invalid(str(error), "topology") from None
        finally:
            self._is_planning = False
        state.require_ready()  # it may have begun to end meanwhile
        self.status = ChangeStatus(
            before=self._running.topology.long(), after=topology.long(), way=layout.way, turns=len(layout.turns)
        )
        self._began = time.monotonic()
        self._task = asyncio.ensure_future(self._change(self.status, layout))
        return self.status

    def _wanted(self, asked: str | None) -> Topology:
        advice = self._state.advice
        if asked is None and (advice is None or advice.verdict != CHANGE):
            raise ApiError(409, "no other layout is advised; name one as topology=EPxDPy", code="not_advised")
        text = asked if asked is not None else advice.advised if advice is not None else ""
        try:
            topology = parse_topology(text)
        except ValueError as error:
            raise invalid(str(error), "topology") from None
        if topology == self._running.topology:
            raise invalid(f"{topology.short()} runs already; name another layout", "topology")
        return topology

    def _planned(self, topology: Topology, lengths: Sequence[int]) -> NewLayout:
        layout = new_layout(self._running, topology, least_model_len=self._state.max_model_len, lengths=lengths)
        prepare_kernels(layout.resolved.config)
        return layout

    # --- the change --------------------------------------------------------------------------------------------------
    async def _change(self, status: ChangeStatus, layout: NewLayout) -> None:
        old = self._fleet.current
        start_s, outcome = 0.0, FAILED
        log.info("layout: from %s to %s, %s, %d turns", status.before, status.after, layout.way, len(layout.turns))
        try:
            resolved = with_ends(layout.resolved, self._state.tokenizer, self._state.defaults.end_token_ids)
            for turn in layout.turns:
                status.turn += 1
                if layout.way != BESIDE:
                    await self._end(old, turn.old)
                launched = time.monotonic()
                await self._start(resolved, turn)
                start_s = max(start_s, time.monotonic() - launched)
            self._show(resolved)
            if layout.way == BESIDE:
                await self._end(old, layout.turns[0].old)
            self._fleet.sets.remove(old)
            old.close()
            self._running, self._new, outcome = resolved, None, DONE
            log.info("layout: %s runs after %.1f s", status.after, time.monotonic() - self._began)
        except Exception as error:  # whatever it is: the old layout goes on, or the server ends
            status.reason = _line(error)
            is_known = isinstance(error, _NotStartedError)
            log.error("layout: %s could not start: %s", status.after, status.reason, exc_info=not is_known)
            await self._go_back(old, layout.turns[: status.turn] if layout.way != BESIDE else ())
        status.seconds, status.state = time.monotonic() - self._began, outcome
        self._state.metrics.advice.changes[outcome] += 1
        self._on_changed(status, self._running, start_s)

    async def _start(self, resolved: Resolved, turn: Turn) -> None:
        """Start the new replicas of a turn and wait until they take requests."""
        new, self._starting = self._new, turn.new
        if new is None:
            new = self._new = self._start_set(resolved)
            new.attach(asyncio.get_running_loop(), self._state.hub.on_deltas, partial(self._lost, new))
        await new.launch_aside(turn.new)
        while not new.are_ready(turn.new):
            if failures := new.failures(turn.new):
                raise _NotStartedError(failures[0].reason)
            await asyncio.sleep(_POLL_S)
        self._starting = ()
        if new not in self._fleet.sets:
            self._fleet.sets.insert(0, new)  # all that were to begin take requests; it is not shown yet

    async def _end(self, replicas: ReplicaSet, indices: Sequence[int]) -> None:
        """Let replicas finish what they have, however long that takes, and end."""
        replicas.retire(indices)
        told = time.monotonic()
        while not replicas.have_ended(indices):
            if time.monotonic() - told >= _TELL_S:
                told = time.monotonic()
                names, layout = ", ".join(map(str, indices)), replicas.resolved.topology.short()
                log.warning("layout: the change waits for requests on replicas %s of %s", names, layout)
            await asyncio.sleep(_POLL_S)
        await asyncio.to_thread(replicas.free, indices)  # processes take their time, and requests go on

    async def _go_back(self, old: ReplicaSet, turns: Sequence[Turn]) -> None:
        """Undo turns; a server that cannot even do that is lost."""
        try:
            await self._undo(old, turns)
            log.info("layout: %s goes on", self._running.topology.long())
        except Exception as error:
            log.exception("layout: what ran cannot go on")
            self._on_failure(Failed(reason=f"the layout that ran could not start again: {_line(error)}"))

    async def _undo(self, old: ReplicaSet, turns: Sequence[Turn]) -> None:
        """Start again what was ended, last turn first, so that as few places as possible stand empty."""
        if self._fleet.current is not old:
            raise RuntimeError("its replicas have ended")
        new = self._new
        if new is not None:
            self._starting = range(len(new.stats()))  # nothing of it goes on
        for turn in reversed(turns):
            if new is not None and turn.new and len(new.stats()) > max(turn.new):
                await self._end(new, turn.new)
            await old.launch_aside(turn.old)
            while not old.are_ready(turn.old):
                if failures := old.failures(turn.old):
                    raise _NotStartedError(failures[0].reason)
                await asyncio.sleep(_POLL_S)
        if new is not None:
            await self._end(new, range(len(new.stats())))  # while its deltas still reach those who wait for them
            if new in self._fleet.sets:
                self._fleet.sets.remove(new)
            new.close()
        if turns:
            self._state.move_to(self._running, old.ready)  # other processes, whose counters begin anew
        self._new, self._starting = None, ()

    def _show(self, resolved: Resolved) -> None:
        """Let figures and /v1/topology be of the new layout from now on."""
        new = self._new
        assert new is not None
        self._fleet.sets.remove(new)
        self._fleet.sets.append(new)
        self._state.move_to(resolved, new.ready)

    def _lost(self, replicas: ReplicaSet, failed: Failed) -> None:
        """A replica of a set that was started here is lost: while it starts, who waits for it sees that."""
        if replicas is not self._new or failed not in replicas.failures(self._starting):
            self._on_failure(failed)

    def close(self) -> None:
        """Go no further; a set that begins ends with the fleet."""
        if self._task is not None:
            self._task.cancel()
        if self._new is not None and self._new not in self._fleet.sets:
            self._fleet.sets.insert(0, self._new)


def _line(error: Exception) -> str:
    """Return why a change failed, in a line."""
    text = " ".join(str(error).split())
    return text if isinstance(error, _NotStartedError) else f"{type(error).__name__}: {text}"
