"""Watches what a server does, asks the advisor after each window, and writes down what was told and said.

Not the advisor (topologies/advisor/), not the counting (runtime/metrics/observed.py) and not the file (advice_log.py).
Runs in the event loop, but for the look at all layouts, which is in a thread. Units: seconds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from ...runtime.advice_facts import advisor_facts
from ...runtime.messages import Ready
from ...runtime.metrics.observed import ObservedWindow
from ...runtime.resolve import Resolved
from ...topologies.advisor.advisor import Advisor
from ...topologies.advisor.records import CHANGE, Advice, Facts
from ...topologies.advisor.trace import VERSION, AppliedLine, FactsLine, WindowLine
from ...topologies.spec import parse_topology
from ..intake.token_ids import in_thread
from ..state import ServerState
from .advice_log import AdviceLog
from .topology_view import expert_loads

log = logging.getLogger(__name__)


class Advising:
    """The advisor of a server.

    Args:
        state: whose metrics are watched; `advice` there is the latest.
    """

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._log = AdviceLog(state.options.advice_log)
        self._advisor: Advisor | None = None
        self._window: ObservedWindow | None = None

    def begin(self, resolved: Resolved, ready: Sequence[Ready], start_s: float) -> None:
        """Watch a layout from now on, of which every replica is ready."""
        facts = self._facts(resolved, ready, start_s)
        self._advisor = Advisor(facts)
        topology, widest = parse_topology(facts.topology), facts.machine.num_devices
        self._window = ObservedWindow(topology, ready[0].block_size, time.monotonic(), widest=widest)
        self._state.advice = None
        self._log.write(FactsLine(version=VERSION, facts=facts))

    def _facts(self, resolved: Resolved, ready: Sequence[Ready], start_s: float) -> Facts:
        replica = self._state.metrics.replicas.get(0)
        return advisor_facts(resolved, ready, replica.ceilings() if replica is not None else None, start_s=start_s)

    def restart(self) -> None:
        """Begin the window anew: for a while not all replicas were at work."""
        if self._window is not None:
            self._window.begin_anew(self._state.metrics.replicas, time.monotonic())

    async def turn(self, now: float) -> None:
        """Look at what runs; at the end of a window, ask the advisor. `now` is monotonic seconds."""
        if self._window is None:
            return
        try:
            await self._turn(self._window, now)
        except Exception:  # figures and requests go on without it
            log.exception("the advisor failed and gives no advice from now on")
            self._window = None

    async def _turn(self, window: ObservedWindow, now: float) -> None:
        replicas, advisor = self._state.metrics.replicas, self._advisor
        assert advisor is not None
        if self._state.layout_changer is not None and self._state.layout_changer.is_running:
            return  # some replicas are of another layout; the window begins anew when the change is over
        window.sample(replicas)
        if window.age(now) < self._state.options.advice_interval_s:
            return
        seen = window.end(replicas, expert_loads(self._state), now, time.time())
        advice = await in_thread(lambda: advisor.observe(seen))
        if advisor is not self._advisor:
            return  # another layout runs by now
        self._tell(advice)
        self._log.write(WindowLine(seen=seen, advice=advice))

    def applied(self, line: AppliedLine) -> None:
        """Write down that the layout was changed, or was to be."""
        self._log.write(line)

    def _tell(self, advice: Advice) -> None:
        before = self._state.advice
        self._state.advice = advice
        self._state.metrics.advice.observe(advice)
        if before is None or (before.verdict, before.advised) != (advice.verdict, advice.advised):
            to = f" to {parse_topology(advice.advised).short()}" if advice.verdict == CHANGE else ""
            log.info("advice: %s%s: %s", advice.verdict, to, advice.reason)
