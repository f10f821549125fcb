"""What moves have cost and brought so far, by the model of step time, and what to do about it; pure, no clock.

Not one decision by itself (policy.py) and not the transfer (runtime/rebalancing/): seconds are those of a model,
transfers come as they were measured or assumed. L MoE layers, E experts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ..placement.record import ExpertPlacement
from .expected import expected_slot_rows
from .load_steps import LoadSteps, total_steps
from .policy import Decision, LayerTime, Move, PolicyOptions, choose_moves

# Windows that have to agree before anything moves.
WINDOWS = 3
# Part of all time so far that transfers may take before they have brought anything, and that moves may lose.
SPEND = 0.005
# Decisions that can be taken back.
_MOST_REMEMBERED = 64


@dataclass(kw_only=True)
class Ledger:
    """Seconds won and spent.

    Attributes:
        off_s: what the layers of all windows would have taken without a move.
        now_s: what they took as experts stood.
        last_s: what moves have saved in the newest window; negative where they did harm.
        predicted_s: what decisions in force promised for the steps of all windows since.
        spent_s: of transfers.
        busy_s: what steps really took, layers and everything else.
    """

    off_s: float = 0.0
    now_s: float = 0.0
    last_s: float = 0.0
    predicted_s: float = 0.0
    spent_s: float = 0.0
    busy_s: float = 0.0

    @property
    def realised_s(self) -> float:
        """What moves have saved on the traffic that came; negative where they did harm."""
        return self.off_s - self.now_s

    @property
    def allowed_s(self) -> float:
        """What may be lost."""
        return SPEND * max(self.busy_s, self.off_s)

    @property
    def budget_s(self) -> float:
        """What transfers may cost now: a part of the time so far and what earlier ones have won."""
        return self.allowed_s + self.realised_s - self.spent_s


@dataclass(frozen=True, kw_only=True)
class _Before:
    """What stood before a decision, in the layers that it changed, and what it promised."""

    layers: tuple[int, ...]
    slots: np.ndarray
    load: np.ndarray
    saved_s: float


@dataclass(kw_only=True)
class Planner:
    """Windows go in, decisions come out; whoever carries one out says so.

    Args:
        start: what stands before any move.
        layer_time: of one layer.

    Attributes:
        placement: what stands now.
        ledger: the books.
    """

    start: ExpertPlacement
    layer_time: LayerTime
    placement: ExpertPlacement = field(init=False)
    ledger: Ledger = field(default_factory=Ledger, init=False)
    _windows: deque[LoadSteps] = field(default_factory=lambda: deque(maxlen=WINDOWS), init=False)
    _before: deque[_Before] = field(default_factory=lambda: deque(maxlen=_MOST_REMEMBERED), init=False)
    _turn: int = field(default=0, init=False)
    _patience: int = field(default=WINDOWS, init=False)  # windows to wait after the next decision that is taken back
    _promised_s: float = field(default=0.0, init=False)  # of a step, by decisions in force
    _quiet: int = field(default=0, init=False)  # windows still to wait

    def __post_init__(self) -> None:
        self.placement = self.start

    def add(self, window: LoadSteps, busy_s: float = 0.0) -> None:
        """Book a window that ran under what stands now, in steps that took `busy_s`."""
        off_s = window_seconds(self.start, window, self.layer_time)
        now_s = off_s if self.placement is self.start else window_seconds(self.placement, window, self.layer_time)
        ledger = self.ledger
        ledger.off_s, ledger.now_s, ledger.last_s = ledger.off_s + off_s, ledger.now_s + now_s, off_s - now_s
        ledger.busy_s += busy_s
        ledger.predicted_s += self._promised_s * total_steps(window)
        self._windows.append(window)
        self._quiet = max(0, self._quiet - 1)
        if ledger.last_s > 0 and ledger.realised_s > 0:
            self._patience = WINDOWS

    def decide(self, options: PolicyOptions) -> Decision | None:
        """Return what to move now, if anything; nothing changes but whose turn it is to be looked at.

        Where moves have lost half of what they may, and still lose, the last decisions are taken back, as many as
        bring no more moves than one decision may; each time that happens it takes twice as long until the next move,
        until moves have won something.
        """
        if len(self._windows) < WINDOWS:
            return None
        ledger = self.ledger
        if self._before and ledger.last_s < 0 and ledger.budget_s < ledger.allowed_s / 2:
            return self._back(options)
        if ledger.budget_s <= 0 or self._quiet:
            return None
        decision = choose_moves(
            self.placement,
            list(self._windows),
            layer_time=self.layer_time,
            options=options,
            budget_s=ledger.budget_s,
            turn=self._turn,
        )
        self._turn = 0 if decision.moves else self._turn + 1
        return decision if decision.moves else None

    def carry_out(self, decision: Decision, seconds: float) -> None:
        """Book that `decision` is in force, after transfers of `seconds`."""
        if decision.takes_back:
            for _ in range(decision.takes_back):
                self._promised_s -= self._before.pop().saved_s
            self._quiet, self._patience = self._patience, 2 * self._patience
        else:
            layers, now = tuple(sorted({move.layer for move in decision.moves})), self.placement
            load = np.zeros((len(layers), now.num_experts)) if now.load is None else now.load[list(layers)]
            slots = now.physical_to_logical[list(layers)]
            self._before.append(_Before(layers=layers, slots=slots, load=load, saved_s=decision.saved_s))
            self._promised_s += decision.saved_s
        self.placement = decision.placement
        self.ledger.spent_s += seconds

    def _back(self, options: PolicyOptions) -> Decision:
        now = self.placement
        slots, load = now.physical_to_logical.copy(), np.zeros((now.num_layers, now.num_experts))
        layers: set[int] = set()
        number = 0
        for before in reversed(self._before):
            earlier, own = slots.copy(), list(before.layers)
            earlier[own] = before.slots
            if number and (earlier != now.physical_to_logical).sum() > options.max_moves:
                break
            slots, load[own], number = earlier, before.load, number + 1
            layers.update(own)
        changed = np.argwhere(slots != now.physical_to_logical).tolist()
        return Decision(
            moves=tuple(Move(layer=layer, slot=slot, expert=int(slots[layer, slot])) for layer, slot in changed),
            placement=now.with_layers(slots, load, sorted(layers)),
            transfer_s=len(changed) * options.transfer_s,
            saved_s=0.0,
            takes_back=number,
        )


def window_seconds(placement: ExpertPlacement, window: LoadSteps, layer_time: LayerTime) -> float:
    """Return what all layers of all steps of a window take."""
    seconds = 0.0
    for phase in window:
        rows = expected_slot_rows(placement, phase.load / phase.steps)
        seconds += phase.steps * sum(map(layer_time, rows))
    return seconds


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """A trace of windows, once as it began and once with moves; `seconds` holds what transfers took too.

    Attributes:
        placement: what stands at the end.
    """

    off_seconds: float
    seconds: float
    transfer_seconds: float
    num_moves: int
    placement: ExpertPlacement


def simulate(
    placement: ExpertPlacement, windows: Sequence[LoadSteps], *, layer_time: LayerTime, options: PolicyOptions
) -> Simulated:
    """Return what would become of recorded loads where each decision is carried out at once."""
    planner = Planner(start=placement, layer_time=layer_time)
    num_moves = 0
    for window in windows:
        planner.add(window)
        if (decision := planner.decide(options)) is not None:
            planner.carry_out(decision, decision.transfer_s)
            num_moves += len(decision.moves)
    ledger = planner.ledger
    return Simulated(
        off_seconds=ledger.off_s,
        seconds=ledger.now_s + ledger.spent_s,
        transfer_seconds=ledger.spent_s,
        num_moves=num_moves,
        placement=planner.placement,
    )
