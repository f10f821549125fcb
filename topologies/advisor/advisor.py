"""`Advisor`: windows in, an advice after each; it changes its mind slowly and always the same way for the same windows.

Not the model (ranking.py) and no clock: what comes in decides alone, so a recorded trace gives the advice it gave.
Units: seconds; gains are tokens/s over those of the layout that runs, less 1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..spec import parse_topology
from . import reasons
from .ranking import Ranking, rank_layouts
from .records import CHANGE, EXCHANGE_BOUND, IDLE, OBSERVING, STAY, Advice, Candidate, Facts, Observation


@dataclass(frozen=True, kw_only=True)
class Rules:
    """When an advice is given and taken back.

    Attributes:
        windows: so many in a row must agree before the advice changes.
        margin: least gain of a layout that is advised, over that which runs and over that advised so far.
        keep: an advice stands while its gain is at least this.
        least_steps: of a window that says something.
        idle_share: a rank with more of its time idle gains nothing from faster steps, as in a window without steps.
        horizon_s: the work lost by a change must come back within this.
        most_shown: candidates of an advice, beside the layout that runs.
    """

    windows: int = 3
    margin: float = 0.10
    keep: float = 0.05
    least_steps: float = 8.0
    idle_share: float = 0.8
    horizon_s: float = 3600.0
    most_shown: int = 12


class Advisor:
    """Watches one layout.

    Args:
        facts: of the server.
        rules: when to change one's mind.
    """

    def __init__(self, facts: Facts, rules: Rules | None = None) -> None:
        self.facts, self.rules = facts, rules or Rules()
        self._number = 0
        self._judged = 0  # windows that said something
        self._standing = ""  # the layout that is advised
        self._challenger = ""  # the one that may take its place; the layout that runs stands for none
        self._streak = 0
        self._change: Advice | None = None  # what was last said for the layout that is advised

    def observe(self, seen: Observation) -> Advice:
        """Return the advice after one more window."""
        self._number += 1
        idle, is_short = seen.shares.get("idle", 0.0), seen.num_steps < self.rules.least_steps
        is_idle = seen.num_steps == 0 or idle > self.rules.idle_share
        if is_idle or is_short:
            ran = f"{seen.num_steps:.0f} steps in {seen.seconds:.0f} s"
            return self._not_judged(seen, is_idle, ran if is_short else f"ranks are idle {idle:.0%} of the time")
        self._judged += 1
        ranking = rank_layouts(self.facts, seen)
        self._weigh(ranking)
        if self._standing:
            found = next(one for one in ranking.candidates if one.topology == self._standing)
            why = reasons.change(self.facts, seen, found, ranking)
            self._change = self._advice(seen, ranking, CHANGE, found, why)
            return self._change
        best = ranking.candidates[0]
        if self._judged < self.rules.windows or self._streak:
            why = f"{reasons.what_ran(self.facts, seen)}; watching, window {self._judged}"
            if self._streak:
                challenger = parse_topology(self._challenger).short()
                why += f": {challenger} leads in {self._streak} of {self.rules.windows} windows"
            return self._advice(seen, ranking, OBSERVING, best, why)
        if (wider := self._held_back(ranking)) is not None:
            why = reasons.exchange_bound(self.facts, seen, wider, ranking)
            return self._advice(seen, ranking, EXCHANGE_BOUND, best, why)
        return self._advice(seen, ranking, STAY, best, reasons.stay(self.facts, seen, ranking))

    def _weigh(self, ranking: Ranking) -> None:
        """Let a layout take the place of what is advised once it has won as many windows in a row as it must."""
        gains = {one.topology: one.gain for one in ranking.candidates}
        # A layout that cannot hold the load any more is no advice, whatever it was.
        standing = gains.get(self._standing, 0.0) if self._standing else 0.0
        if self._standing not in gains:
            self._standing = ""
        best = next((one for one in ranking.candidates if self._pays(one, ranking.here)), None)
        wins = best is not None and 1 + best.gain >= (1 + standing) * (1 + self.rules.margin)
        if wins and best is not None and best.topology != self._standing:
            self._challenge(best.topology)
        elif self._standing and standing < self.rules.keep:
            self._challenge(ranking.here.topology)
        else:
            self._challenger, self._streak = "", 0

    def _challenge(self, topology: str) -> None:
        self._streak = self._streak + 1 if topology == self._challenger else 1
        self._challenger = topology
        if self._streak >= self.rules.windows:
            self._standing = "" if topology == self.facts.topology else topology
            self._challenger, self._streak = "", 0

    def _pays(self, one: Candidate, here: Candidate) -> bool:
        """Tell whether a layout gains enough, and gives back within the horizon what a change costs."""
        cost = max(one.restart_s, one.lost_s)
        return one.gain >= self.rules.margin and cost <= one.gain * self.rules.horizon_s

    def _held_back(self, ranking: Ranking) -> Candidate | None:
        """Return the widest-gaining wider layout that would read and multiply for less time, but for its exchange."""
        ep = parse_topology(self.facts.topology).ep
        here = ranking.here

        def is_held(one: Candidate) -> bool:
            saved = here.products_s - one.products_s
            longer = one.exchange_share * one.step_s - here.exchange_share * here.step_s
            return saved >= self.rules.margin * here.step_s and longer > 0 and one.gain < self.rules.margin

        wider = [one for one in ranking.candidates if parse_topology(one.topology).ep > ep and is_held(one)]
        return wider[0] if wider else None

    def _not_judged(self, seen: Observation, is_idle: bool, what: str) -> Advice:
        """Return what is said of a window with nothing to gain, or too few steps to tell; no layout wins in it."""
        if self._standing and is_idle:
            self._challenge(self.facts.topology)
        else:
            self._challenger, self._streak = "", 0
        if self._standing:
            assert self._change is not None, "the window in which it won was judged"
            why = f"{what}; the advice stands for now: {self._change.reason}"
            return replace(self._change, number=self._number, time=seen.time, reason=why)
        verdict, why = (IDLE, "nothing to gain") if is_idle else (OBSERVING, "too little to judge by")
        reason = f"{why}: {what}"
        if seen.num_steps >= self.rules.least_steps:
            ranking = rank_layouts(self.facts, seen)
            return self._advice(seen, ranking, verdict, ranking.candidates[0], reason)
        return Advice(
            number=self._number, time=seen.time, topology=self.facts.topology, verdict=verdict,
            advised=self.facts.topology, gain=0.0, reason=reason,
        )  # fmt: skip

    def _advice(self, seen: Observation, ranking: Ranking, verdict: str, best: Candidate, reason: str) -> Advice:
        shown = [one for one in ranking.candidates if one is not ranking.here][: self.rules.most_shown]
        shown = [one for one in ranking.candidates if one is ranking.here or one in shown]
        return Advice(
            number=self._number, time=seen.time, topology=self.facts.topology, verdict=verdict,
            advised=best.topology if verdict == CHANGE else self.facts.topology, gain=best.gain, reason=reason,
            candidates=tuple(shown), calibration=ranking.calibration,
            excluded=ranking.excluded[: self.rules.most_shown],
        )  # fmt: skip
