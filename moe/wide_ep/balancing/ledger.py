"""What moves have cost and brought so far, by the model of step time, and what they may still cost; pure, no clock.

Not one decision by itself (policy.py) and not the transfer (runtime/rebalancing/): seconds are those of a model,
transfers come as they were measured or assumed. L MoE layers, E experts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ..placement.record import ExpertPlacement
from .expected import rows_by_origin
from .load_steps import LoadSteps, total_steps
from .policy import Decision, Move, PolicyOptions, choose_moves
from .way_back import FEW_CHOICES, MORE_CHOICES, Exposure, LayerModel, Stand, WayBack

# Windows that have to agree before anything moves.
WINDOWS = 3
# Part of all time so far that moves may lose, transfers included. The rest of the 2 % that `auto` may be slower is for
# what the model does not know.
SPEND = 0.015
# No window is taken to be longer than the longest of so many, and no round to take more windows than the last few did.
_LONGEST_OF, _ROUNDS = 256, 8


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


@dataclass(kw_only=True)
class Planner:
    """Windows go in, decisions come out; whoever carries one out says so.

    Nothing moves unless what it may lose until it is back (way_back.py) is covered by what may be lost and what moves
    have won; where that is no longer so, it goes back. So moves never lose more than `allowed_s`, whatever load comes,
    as long as windows are no longer than those before and going back takes no longer than rounds took.

    Args:
        start: what stands before any move.
        model: of one layer.

    Attributes:
        placement: what stands now.
        ledger: the books.
    """

    start: ExpertPlacement
    model: LayerModel
    placement: ExpertPlacement = field(init=False)
    ledger: Ledger = field(default_factory=Ledger, init=False)
    _windows: deque[LoadSteps] = field(default_factory=lambda: deque(maxlen=WINDOWS), init=False)
    _sizes: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_LONGEST_OF), init=False)
    _stands: dict[int, Stand] = field(default_factory=dict, init=False)
    # Of a step, by what is in force in a layer; layers of one decision are taken to have promised equally much.
    _promised_s: dict[int, float] = field(default_factory=dict, init=False)
    _turn: int = field(default=0, init=False)
    _patience: int = field(default=WINDOWS, init=False)  # windows to wait after the next decision that goes back
    _quiet: int = field(default=0, init=False)  # windows still to wait
    _since: int = field(default=0, init=False)  # windows since the last decision
    _delays: deque[int] = field(default_factory=lambda: deque([0], maxlen=_ROUNDS), init=False)

    def __post_init__(self) -> None:
        self.placement = self.start
        self._back = WayBack(self.start, self.model)

    def add(self, window: LoadSteps, busy_s: float = 0.0) -> None:
        """Book a window that ran under what stands now, in steps that took `busy_s`."""
        off_s = window_seconds(self.start, window, self.model)
        now_s = off_s if self.placement is self.start else window_seconds(self.placement, window, self.model)
        ledger = self.ledger
        ledger.off_s, ledger.now_s, ledger.last_s = ledger.off_s + off_s, ledger.now_s + now_s, off_s - now_s
        ledger.busy_s += busy_s
        ledger.predicted_s += sum(self._promised_s.values()) * total_steps(window)
        self._windows.append(window)
        self._sizes.append((sum(float(phase.load[:1].sum()) for phase in window), total_steps(window)))
        self._quiet, self._since = max(0, self._quiet - 1), self._since + 1
        if ledger.last_s > 0 and ledger.realised_s > 0:
            self._patience = WINDOWS

    def decide(self, options: PolicyOptions) -> Decision | None:
        """Return what to move now, if anything; nothing changes but whose turn it is to be looked at.

        Where what stands is not covered, a round of it goes back; each time that everything is back it takes twice as
        long until the next move, until moves have won something.
        """
        if len(self._windows) < WINDOWS:
            return None
        exposure = self._exposure(options)
        budget_s = self.ledger.budget_s
        decision: Decision | None = None
        if self._stands and self._back.most_lost(self._stands, exposure) > budget_s:
            decision = self._go_back(exposure)
        elif budget_s > 0 and not self._quiet:
            decision = choose_moves(
                self.placement,
                list(self._windows),
                model=self.model,
                options=options,
                budget_s=budget_s,
                reserve=lambda stands: self._back.most_lost({**self._stands, **stands}, exposure),
                choices=MORE_CHOICES if self.ledger.realised_s > self.ledger.spent_s else FEW_CHOICES,
                turn=self._turn,
            )
            self._turn = 0 if decision.moves else self._turn + 1
        if decision is None or not decision.moves:
            return None
        self._since = 0
        return decision

    def carry_out(self, decision: Decision, seconds: float) -> None:
        """Book that `decision` is in force, after transfers of `seconds`."""
        after, layers = decision.placement, sorted({move.layer for move in decision.moves})
        for layer in layers:
            slots = after.physical_to_logical[layer]
            if (slots == self.start.physical_to_logical[layer]).all():
                self._stands.pop(layer, None)
                self._promised_s.pop(layer, None)
                continue
            load = np.zeros(after.num_experts) if after.load is None else after.load[layer]
            self._stands[layer] = Stand(
                slots=slots, chosen=after.slot_of[layer], load=load, is_returning=decision.takes_back
            )
            self._promised_s[layer] = self._promised_s.get(layer, 0.0) + decision.saved_s / len(layers)
        if decision.takes_back and not self._stands:
            self._quiet, self._patience = self._patience, 2 * self._patience
        self._delays.append(self._since)
        self.placement = after
        self.ledger.spent_s += seconds

    def _exposure(self, options: PolicyOptions) -> Exposure:
        return Exposure(
            rows=max(rows for rows, _ in self._sizes),
            steps=max(steps for _, steps in self._sizes),
            windows=1 + max(self._delays),
            max_moves=options.max_moves,
            transfer_s=options.transfer_s,
        )

    def _go_back(self, exposure: Exposure) -> Decision:
        now, first = self.placement, self._back.rounds(self._stands, exposure)[0]
        slots, load = now.physical_to_logical.copy(), np.zeros((now.num_layers, now.num_experts))
        for stage in first:
            slots[stage.layer] = stage.slots
            if not stage.is_last:
                load[stage.layer] = self._stands[stage.layer].load
            elif self.start.load is not None:
                load[stage.layer] = self.start.load[stage.layer]
        changed = np.argwhere(slots != now.physical_to_logical).tolist()
        return Decision(
            moves=tuple(Move(layer=layer, slot=slot, expert=int(slots[layer, slot])) for layer, slot in changed),
            placement=now.with_layers(slots, load, sorted(stage.layer for stage in first), moves_per_rank=FEW_CHOICES),
            transfer_s=len(changed) * exposure.transfer_s,
            saved_s=0.0,
            takes_back=True,
        )


def window_seconds(placement: ExpertPlacement, window: LoadSteps, model: LayerModel) -> float:
    """Return what all layers of all steps of a window take."""
    seconds = 0.0
    for phase in window:
        for load, slots in zip(phase.load, placement.slot_of, strict=True):
            seconds += phase.steps * model.seconds(
                rows_by_origin(load / phase.steps, placement.num_ranks, phase.origin), slots
            )
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
    placement: ExpertPlacement, windows: Sequence[LoadSteps], *, model: LayerModel, options: PolicyOptions
) -> Simulated:
    """Return what would become of recorded loads where each decision is carried out at once."""
    planner = Planner(start=placement, model=model)
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
