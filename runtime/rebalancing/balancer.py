"""Rounds of moves over all ranks of a group: from counters of steps to a placement that holds from one step on.

Not which experts move (moe/wide_ep/balancing/) and not the weights (rank_moves.py). It lives beside the engine: it
marks plans, hears what ranks have counted and prepared, and has the planner think in a thread, which alone touches it.
Units: seconds, bytes. L MoE layers, E experts, W ranks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import msgspec
import numpy as np

from ...moe.wide_ep.balancing import (
    ClockedGain,
    Decision,
    LoadCollector,
    PhaseTime,
    Planner,
    PolicyOptions,
    total_steps,
)
from ...telemetry import PHASES, RankCounters
from ...topologies.budget import most_moves
from ..messages import DropMoves, Message, MovesPrepared, PrepareMoves
from ..metrics.stats import counters_of
from ..plan import StepPlan, pack
from ..rank_stats import BalanceStats

log = logging.getLogger(__name__)

COUNT_EVERY_S = 0.25
# For how long a saving counts, in which a move has to pay.
HORIZON_S = 60.0
# Part of the time that deciding may take.
DECIDE_SHARE = 0.02
# After a round that some rank could not prepare: so long until the next, then twice as long each time.
RETRY_S, MOST_RETRY_S = 10.0, 3600.0
# What reading is taken to reach until it was measured, bytes/s.
READ_BANDWIDTH = 5e8


class Ranks(Protocol):
    """What this asks of the ranks (runtime/processes/workers.py)."""

    @property
    def num_ranks(self) -> int:
        """W."""
        ...

    def send(self, rank: int, message: Message) -> None:
        """Send `message` to `rank`."""
        ...


@dataclass(kw_only=True)
class _Round:
    """A decision on its way; `closing` from the last step of the old placement on."""

    placement: int
    decision: Decision
    reports: dict[int, MovesPrepared] = field(default_factory=dict)
    closing: bool = False
    from_step: int = -1

    @property
    def seconds(self) -> float:
        """What the slowest rank needed."""
        return max(report.seconds for report in self.reports.values())


class Balancer:
    """Moves experts to where the load that comes makes ranks even.

    Args:
        ranks: to talk to.
        planner: decides; what it holds stands at the start.
        top_k: K of the model.
        expert_bytes: of one expert of one layer, as ranks hold it.
        least_tokens: of a window.
        decider: runs decisions; None starts a thread for them.
        clock: seconds.
    """

    def __init__(
        self,
        ranks: Ranks,
        planner: Planner,
        *,
        top_k: int,
        expert_bytes: int,
        least_tokens: int,
        decider: Executor | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ranks, self._planner, self._clock = ranks, planner, clock
        self._clocked = ClockedGain()
        self._counted_placement = 0  # that steps up to the last count ran under
        self._collector = LoadCollector(planner.placement, top_k=top_k, least_tokens=least_tokens)
        self._decider = decider or ThreadPoolExecutor(1, "decide-moves")
        self._max_moves = most_moves(expert_bytes)
        self._transfer_s = expert_bytes / READ_BANDWIDTH  # of one expert
        self._next_count = self._next_decision = 0.0
        self._retry_s = RETRY_S
        self._busy_s = 0.0
        self._step_s = 0.0  # of a step in the newest window
        self._news: list[Callable[[], None]] = []  # what the planner has still to be told, by the thread that it is on
        self._deciding: Future[Decision | None] | None = None
        self._deciding_since: float | None = None  # None: it is only told news
        self._round: _Round | None = None
        self._placement = self._prepared = 0
        self._shown = planner.placement
        self._moves = self._rounds = self._failures = self._taken_back = 0
        self._move_seconds = 0.0

    # --- engine ------------------------------------------------------------------------------------------------------
    def mark(self, plan: StepPlan) -> StepPlan:
        """Return `plan` with the placement that holds in it, and whether ranks send their counters with its result."""
        self._look_at_decision()
        now = self._clock()
        current, counts = self._round, now >= self._next_count
        if current is not None and current.from_step < 0:
            if current.closing:  # the step before counts, so no count mixes placements
                self._placement, current.from_step = current.placement, plan.header.step
                self._shown = current.decision.placement
                counts = True
            elif len(current.reports) == self._ranks.num_ranks:
                counts = current.closing = True
        if counts:
            self._next_count = now + COUNT_EVERY_S
        if not counts and not self._placement:
            return plan
        header = msgspec.structs.replace(plan.header, placement=self._placement, counts=counts)
        return msgspec.structs.replace(plan, header=header)

    @property
    def is_open(self) -> bool:
        """True while no round is on its way and none is being decided."""
        return self._round is None and self._deciding is None

    def stats(self) -> BalanceStats:
        """Return what was done so far."""
        slots = self._shown.physical_to_logical
        return BalanceStats(
            placement=self._placement,
            slots=pack(slots[0]) if len(slots) else b"",
            moves=self._moves,
            rounds=self._rounds,
            failures=self._failures,
            taken_back=self._taken_back,
            move_seconds=self._move_seconds,
            predicted_seconds=self._planner.ledger.predicted_s,
            realised_seconds=self._planner.ledger.realised_s,
            clocked_seconds=self._clocked.saved_s,
        )

    def close(self) -> None:
        """End the thread; a decision that is being made is not waited for."""
        self._decider.shutdown(wait=False, cancel_futures=True)

    # --- ranks -------------------------------------------------------------------------------------------------------
    def counted(self, step: int, counters: Sequence[bytes]) -> None:
        """Take the counters of all ranks as of the end of one step."""
        current = self._round
        if current is not None and 0 <= current.from_step <= step:
            self._come_into_force(current)
        ranks = [counters_of(data) for data in counters]
        decode = np.concatenate([rank.expert_decode_tokens for rank in ranks], axis=1)
        every = np.concatenate([rank.expert_tokens for rank in ranks], axis=1)
        by_phase = dict(zip(PHASES, ranks[0].steps.tolist(), strict=True))
        tokens = dict(zip(PHASES, np.stack([rank.tokens for rank in ranks], axis=1), strict=True))  # [W] each
        self._clocked.observe(phase_times(ranks), moved=self._counted_placement > 0)
        window = self._collector.observe(
            {"decode": decode, "prefill": every - decode},
            {"decode": by_phase["decode"], "prefill": by_phase["prefill"] + by_phase["mixed"]},
            {"decode": tokens["decode"], "prefill": tokens["prefill"] + tokens["mixed"]},
        )
        if window is None:
            return
        busy_s = max(float(rank.busy_seconds.sum()) for rank in ranks)
        self._news.append(partial(self._planner.add, window, busy_s - self._busy_s))
        self._step_s, self._busy_s = (busy_s - self._busy_s) / total_steps(window), busy_s
        self._look_at_decision()
        if self._deciding is None:
            self._go_on()

    def prepared(self, message: MovesPrepared) -> None:
        """Take the report of a rank; where one could not, nobody switches."""
        current = self._round
        assert current is not None and message.placement == current.placement, message
        current.reports[message.rank] = message
        if len(current.reports) < self._ranks.num_ranks:
            return
        failed = [report for report in current.reports.values() if report.error]
        self._move_seconds += current.seconds
        if not failed:
            own = max(1, self._most_of_a_rank(current.decision))
            self._transfer_s = (self._transfer_s + current.seconds / own) / 2
            self._retry_s = RETRY_S
            return
        for rank in range(self._ranks.num_ranks):
            self._ranks.send(rank, DropMoves(placement=current.placement))
        self._round = None
        log.warning(
            "no experts are moved: rank %d cannot prepare them (%s); the placement stays, next try in %.0f s",
            failed[0].rank, failed[0].error, self._retry_s,
        )  # fmt: skip
        self._fail()

    def _fail(self) -> None:
        """Count a failure; the next try waits."""
        self._failures += 1
        self._next_decision = self._clock() + self._retry_s
        self._retry_s = min(2 * self._retry_s, MOST_RETRY_S)

    # --- rounds ------------------------------------------------------------------------------------------------------
    def begin(self, decision: Decision) -> None:
        """Let all ranks prepare `decision`; nothing else may be on its way."""
        assert self._round is None
        self._prepared += 1
        self._round = _Round(placement=self._prepared, decision=decision)
        after = decision.placement
        layers = tuple(sorted({move.layer for move in decision.moves}))
        for rank, (start, stop) in enumerate(after.slot_ranges):
            own = [(m.layer, m.slot - start, m.expert) for m in decision.moves if start <= m.slot < stop]
            tables = after.slot_of[list(layers), rank]  # [layers, E]
            message = PrepareMoves(
                placement=self._prepared, moves=pack(np.array(own)), layers=layers, tables=pack(tables)
            )
            self._ranks.send(rank, message)

    def _come_into_force(self, current: _Round) -> None:
        """Book a round whose placement has been counted in."""
        decision, self._round = current.decision, None
        self._counted_placement = current.placement
        self._news.append(partial(self._planner.carry_out, decision, current.seconds))
        self._collector.place(decision.placement)
        self._rounds += 1
        self._moves += len(decision.moves)
        self._taken_back += decision.takes_back
        log.info(
            "placement %d: %d experts moved in %.2f s%s", current.placement, len(decision.moves), current.seconds,
            ", back to where they were" if decision.takes_back
            else f", to save {decision.saved_s * 1e3:.3f} ms of a step of {self._step_s * 1e3:.1f} ms",
        )  # fmt: skip

    def _go_on(self) -> None:
        """Have the planner told what is new, and asked for a decision where one may be made now."""
        options: PolicyOptions | None = None
        self._deciding_since = None
        if self._round is None and self._clock() >= self._next_decision:
            self._deciding_since = self._clock()
            options = PolicyOptions(
                transfer_s=self._transfer_s,
                horizon_steps=max(1, round(HORIZON_S / max(self._step_s, 1e-6))),
                max_moves=self._max_moves,
            )
        news, self._news = self._news, []
        self._deciding = self._decider.submit(_tell_and_ask, self._planner, news, options)

    def _look_at_decision(self) -> None:
        """Begin a round where a decision has been made; the next one has to wait for its share of the time."""
        if self._deciding is None or not self._deciding.done():
            return
        made, self._deciding = self._deciding, None
        now = self._clock()
        if self._deciding_since is not None:
            self._next_decision = now + (now - self._deciding_since) / DECIDE_SHARE
        if (problem := made.exception()) is not None:
            log.error("no experts are moved: deciding failed", exc_info=problem)
            self._fail()
            return
        decision = made.result()
        if decision is not None:
            self.begin(decision)

    def _most_of_a_rank(self, decision: Decision) -> int:
        owner = decision.placement.slot_rank[[move.slot for move in decision.moves]]
        return int(np.bincount(owner).max(initial=0))


def phase_times(ranks: Sequence[RankCounters]) -> dict[str, PhaseTime]:
    """Return how long steps of prompts and of decodes took so far, each on the rank that was busy longest."""
    return {
        phase: PhaseTime(
            steps=int(ranks[0].steps[i]),
            rows=int(sum(rank.tokens[i] for rank in ranks)),
            seconds=max(float(rank.busy_seconds[i]) for rank in ranks),
        )
        for i, phase in enumerate(PHASES)
        if phase in ("prefill", "decode")
    }


def _tell_and_ask(
    planner: Planner, news: Sequence[Callable[[], None]], options: PolicyOptions | None
) -> Decision | None:
    """Tell the planner what is new, in order, and ask it for a decision (None: do not ask)."""
    for tell in news:
        tell()
    return planner.decide(options) if options is not None else None
