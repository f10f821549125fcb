"""Which experts to move, and whether to: a move has to save more step time than its transfer costs. Pure.

Not the transfer (runtime/rebalancing/) and not a placement from nothing (placement/balanced.py): it changes what
stands, slot by slot, and what a change is worth the model of a layer's time says, which knows links and domains.
Units: seconds; loads in rows of experts over the steps of a window (load_steps.py).
L MoE layers, E experts, P slots, W ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..placement.record import ExpertPlacement
from .candidates import Change, LayerSlots, into_domains, off_fullest
from .expected import expected_rows, rows_by_origin
from .load_steps import LoadSteps, total_load, total_steps
from .way_back import FEW_CHOICES, LayerModel, Stand, chosen_slots

# Seconds that have to be in reserve where some layers would stand so.
Reserve = Callable[[Mapping[int, Stand]], float]


@dataclass(frozen=True, kw_only=True)
class PolicyOptions:
    """When a move pays.

    Attributes:
        transfer_s: to bring an expert of a layer to a slot.
        horizon_steps: for how many steps what was saved counts.
        hysteresis: by how much of the transfer what is saved has to be more than it.
        noise: a rank's surplus, or what a domain would no longer send out, has to exceed this many standard deviations
            of what chance alone makes of even loads.
        max_moves: transfers of one decision.
        max_layers: layers of one decision; looking at one takes time.
    """

    transfer_s: float
    horizon_steps: int
    hysteresis: float = 0.25
    noise: float = 6.0
    max_moves: int = 8
    max_layers: int = 4


@dataclass(frozen=True, kw_only=True)
class Move:
    """One transfer: `slot` of `layer` gets `expert`."""

    layer: int
    slot: int
    expert: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Decision:
    """What to do now.

    Attributes:
        moves: transfers, those of one exchange of two experts side by side; all come into force together.
        placement: what stands afterwards.
        transfer_s: what the moves cost.
        saved_s: predicted, of a step.
        takes_back: layers stand again as at the start, or are on their way there.
    """

    moves: tuple[Move, ...]
    placement: ExpertPlacement
    transfer_s: float
    saved_s: float
    takes_back: bool = False


@dataclass(frozen=True, kw_only=True)
class _Action:
    """Moves of one layer that belong together, and what they make of its slots."""

    stand: Stand
    moves: tuple[Move, ...]
    transfer_s: float
    saved_s: float


def choose_moves(
    placement: ExpertPlacement,
    windows: Sequence[LoadSteps],
    *,
    model: LayerModel,
    options: PolicyOptions,
    budget_s: float = np.inf,
    reserve: Reserve = lambda stands: 0.0,
    choices: int = FEW_CHOICES,
    turn: int = 0,
) -> Decision:
    """Return the moves that pay; none where nothing does. Layers are looked at that have most to win, first of all.

    What a move saves is the least of what it would have saved in each window: load that does not stay moves nothing.

    Args:
        placement: what stands.
        windows: oldest first, at least two; the moves are found by the newest.
        model: of one layer.
        options: when a move pays.
        budget_s: what transfers and what is in reserve may come to together.
        reserve: what has to be in reserve where the layers that are changed stand so.
        choices: between replicas that a layer may change off its fullest ranks, times ranks.
        turn: decisions in a row that found nothing: each looks at other layers.
    """
    if len(windows) < 2 or any(total_steps(window) < 1 for window in windows):
        raise ValueError(f"at least 2 windows of at least 1 step are needed, got {len(windows)}")
    newest = total_load(windows[-1])
    worth = _worth(placement, newest, options.noise)
    promising = np.flatnonzero(worth)
    promising = promising[np.argsort(-worth[promising], kind="stable")]
    if promising.size > options.max_layers:
        promising = np.roll(promising, -turn * options.max_layers)[: options.max_layers]
    slots = placement.physical_to_logical.copy()
    stands: dict[int, Stand] = {}
    moves: list[Move] = []
    transfer_s = saved_s = 0.0
    for number in promising.tolist():
        layer = _Layer(placement, number, windows, model, options, choices)
        while len(moves) < options.max_moves:
            for action in layer.paying(slots[number], most=options.max_moves - len(moves)):
                after_s = transfer_s + action.transfer_s
                if after_s <= budget_s and after_s + reserve({**stands, number: action.stand}) <= budget_s:
                    break
            else:
                break
            stands[number], slots[number] = action.stand, action.stand.slots
            moves += action.moves
            transfer_s, saved_s = after_s, saved_s + action.saved_s
    last = {(move.layer, move.slot): move for move in moves}  # all come into force together
    moves = [move for move in last.values() if placement.physical_to_logical[move.layer, move.slot] != move.expert]
    if not moves:
        return Decision(moves=(), placement=placement, transfer_s=0.0, saved_s=0.0)
    layers = sorted({move.layer for move in moves})
    after = placement.with_layers(slots, newest, layers, moves_per_rank=choices)
    return Decision(moves=tuple(moves), placement=after, transfer_s=len(moves) * options.transfer_s, saved_s=saved_s)


def _worth(placement: ExpertPlacement, load: np.ndarray, noise: float) -> np.ndarray:
    """Return what there may be to win in each layer, in rows [L]: 0 where chance explains what is uneven."""
    rows = expected_rows(placement, load)  # [L, W]
    surplus = rows.max(1) - rows.mean(1)
    worth: np.ndarray = np.where(surplus > noise * np.sqrt(rows.mean(1)), surplus, 0.0)
    if np.ptp(placement.rank_domain):
        for layer, experts in enumerate(placement.physical_to_logical):
            found = into_domains(_slots_of(placement, experts), load[layer], noise=noise)
            worth[layer] += found[0][0] if found else 0.0
    return worth


def _slots_of(placement: ExpertPlacement, experts: np.ndarray) -> LayerSlots:
    """Return `placement` with `experts` [P] in the slots of a layer."""
    return LayerSlots(
        experts=experts, rank=placement.slot_rank, domain=placement.rank_domain, num_experts=placement.num_experts
    )


class _Layer:
    """One layer: what its slots get, and what could be changed."""

    def __init__(
        self,
        placement: ExpertPlacement,
        number: int,
        windows: Sequence[LoadSteps],
        model: LayerModel,
        options: PolicyOptions,
        choices: int,
    ) -> None:
        self.number, self._model, self._options, self._choices = number, model, options, choices
        self._placement, self._newest = placement, total_load(windows[-1])[number]
        self._spans_domains = bool(np.ptp(placement.rank_domain))
        # Of each window its phases: rows of experts in one step by their origin [W, E], and steps.
        self._windows = [
            [
                (rows_by_origin(phase.load[number] / phase.steps, placement.num_ranks, phase.origin), phase.steps)
                for phase in window
                if phase.steps
            ]
            for window in windows
        ]

    def paying(self, slots: np.ndarray, *, most: int) -> list[_Action]:
        """Return the changes of at most `most` moves that pay, what saves most for what it costs first."""
        chosen = self._chosen(slots)
        before: np.ndarray | None = None
        found = []
        for change in self._candidates(slots, chosen):
            if len(change) > most:
                continue
            changed = slots.copy()
            for slot, expert in change:
                changed[slot] = expert
            before = self._step_seconds(chosen) if before is None else before
            stand = Stand(slots=changed, chosen=self._chosen(changed), load=self._newest)
            saved = float((before - self._step_seconds(stand.chosen)).min())
            cost = len(change) * self._options.transfer_s
            if saved * self._options.horizon_steps > cost * (1 + self._options.hysteresis):
                moves = tuple(Move(layer=self.number, slot=slot, expert=expert) for slot, expert in change)
                net = saved * self._options.horizon_steps - cost
                found.append((net, _Action(stand=stand, moves=moves, transfer_s=cost, saved_s=saved)))
        return [action for _, action in sorted(found, key=lambda pair: -pair[0])]

    def _candidates(self, slots: np.ndarray, chosen: np.ndarray) -> list[Change]:
        """Return changes off the fullest rank, where not chance alone made it so, and into domains."""
        at, noise = _slots_of(self._placement, slots), self._options.noise
        by_slot = np.bincount(chosen.ravel(), rows_by_origin(self._newest, at.num_ranks).ravel(), len(slots))
        rows = np.bincount(at.rank, by_slot, at.num_ranks)
        found = off_fullest(at, by_slot) if rows.max() - rows.mean() > noise * np.sqrt(rows.mean()) else []
        if self._spans_domains:
            found += [change for _, change in into_domains(at, self._newest, noise=noise)]
        return found

    def _chosen(self, slots: np.ndarray) -> np.ndarray:
        """Return the slot of each rank for each expert, [W, E]; replicas are shared out by the newest load."""
        return chosen_slots(self._placement, slots, self._newest, self._choices)

    def _step_seconds(self, chosen: np.ndarray) -> np.ndarray:
        """Return the mean seconds of a step in each window."""
        return np.array(
            [
                sum(steps * self._model.seconds(rows, chosen) for rows, steps in window)
                / sum(steps for _, steps in window)
                for window in self._windows
            ]
        )
