"""Which experts to move, and whether to: a move has to save more step time than its transfer costs. Pure.

Not the transfer and not a placement from nothing (placement/balanced.py): it changes what stands, slot by slot.
Nothing calls it while serving yet. Units: seconds; loads in tokens per expert over a window of `steps` steps.
L MoE layers, E experts, P slots, W ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..placement.quotas import choose_replicas
from ..placement.record import ExpertPlacement, placement_of
from .expected import expected_rows

# Seconds of one MoE layer in one step, of the rows of each rank [W].
LayerTime = Callable[[np.ndarray], float]
# Candidates that are looked at closely; the others lost in an estimate.
_LOOKED_AT = 4


@dataclass(frozen=True, kw_only=True)
class PolicyOptions:
    """When a move pays.

    Attributes:
        within_s, between_s: to bring an expert of a layer from a rank of the same domain, of another one.
        horizon_steps: for how many steps what was saved counts.
        hysteresis: by how much of the transfer what is saved has to be more than it.
        noise: a rank's surplus has to exceed this many standard deviations of what chance alone makes of even loads.
        max_moves: transfers of one decision.
        spend: part of all step time so far that transfers may take before they have brought anything.
    """

    within_s: float
    between_s: float
    horizon_steps: int
    hysteresis: float = 0.25
    noise: float = 6.0
    max_moves: int = 8
    spend: float = 0.01


@dataclass(frozen=True, kw_only=True)
class Move:
    """One transfer: `slot` of `layer` gets the expert that `source` holds."""

    layer: int
    slot: int
    source: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Decision:
    """What to do now.

    Attributes:
        moves: transfers, those of one exchange of two experts side by side; all are read before any is written.
        placement: what stands afterwards.
        transfer_s: what the moves cost.
        saved_s: predicted, of a step.
    """

    moves: tuple[Move, ...]
    placement: ExpertPlacement
    transfer_s: float
    saved_s: float


@dataclass(frozen=True, kw_only=True)
class _Action:
    """Moves of one layer that belong together, and what they make of its slots."""

    slots: np.ndarray
    moves: tuple[Move, ...]
    transfer_s: float
    saved_s: float


def choose_moves(
    placement: ExpertPlacement,
    windows: Sequence[np.ndarray],
    *,
    steps: int,
    layer_time: LayerTime,
    options: PolicyOptions,
    budget_s: float = np.inf,
) -> Decision:
    """Return the moves that pay, dearest layer first; none where nothing does.

    What a move saves is the least of what it would have saved in each window: load that does not stay moves nothing.

    Args:
        placement: what stands.
        windows: loads [L, E] of as many steps each, oldest first, at least two; the moves are found by the newest.
        steps: of each window.
        layer_time: of one layer.
        options: when a move pays.
        budget_s: what transfers may cost together.
    """
    if len(windows) < 2 or steps < 1:
        raise ValueError(f"at least 2 windows of at least 1 step are needed, got {len(windows)} of {steps}")
    slots = placement.physical_to_logical.copy()
    layers = [_Layer(placement, layer, windows, steps, layer_time, options) for layer in range(placement.num_layers)]
    moves: list[Move] = []
    transfer_s = saved_s = 0.0
    for layer in sorted(layers, key=lambda one: (-one.surplus(slots[one.number]), one.number)):
        while len(moves) < options.max_moves:
            action = layer.best(slots[layer.number], most=options.max_moves - len(moves))
            if action is None or transfer_s + action.transfer_s > budget_s:
                break
            slots[layer.number] = action.slots
            moves += action.moves
            transfer_s, saved_s = transfer_s + action.transfer_s, saved_s + action.saved_s
    newest = windows[-1].astype(np.float64) if moves else placement.load
    after = placement_of(
        slots, placement.num_experts, placement.slot_ranges, domains=placement.domains, load=newest
    )  # fmt: skip
    return Decision(moves=tuple(moves), placement=after if moves else placement, transfer_s=transfer_s, saved_s=saved_s)


class _Layer:
    """One layer: what its slots get, and what could be changed."""

    def __init__(
        self,
        placement: ExpertPlacement,
        number: int,
        windows: Sequence[np.ndarray],
        steps: int,
        layer_time: LayerTime,
        options: PolicyOptions,
    ) -> None:
        self.number, self._steps, self._time, self._options = number, steps, layer_time, options
        self._loads = [window[number].astype(np.float64) for window in windows]
        self._num_experts, self._rank, self._domain = placement.num_experts, placement.slot_rank, placement.rank_domain
        self._num_ranks = placement.num_ranks

    def surplus(self, slots: np.ndarray) -> float:
        """Return the rows of the fullest rank above the mean, in the newest window."""
        rows = self._rows(self._slot_rows(slots)[-1])
        return float(rows.max() - rows.mean())

    def best(self, slots: np.ndarray, *, most: int) -> _Action | None:
        """Return the change that saves most for what it costs, of at most `most` moves, if one pays."""
        by_slot = self._slot_rows(slots)
        rows = self._rows(by_slot[-1])
        if rows.max() - rows.mean() <= self._options.noise * np.sqrt(rows.mean()):
            return None
        before = self._seconds(by_slot)
        found = []
        for changed, moves in self._candidates(slots, by_slot[-1], rows, most):
            after = self._seconds(self._slot_rows(changed))
            saved = float((before - after).min())
            cost = sum(self._cost(move) for move in moves)
            if saved * self._options.horizon_steps > cost * (1 + self._options.hysteresis):
                net = saved * self._options.horizon_steps - cost
                found.append((net, _Action(slots=changed, moves=moves, transfer_s=cost, saved_s=saved)))
        return max(found, key=lambda pair: pair[0])[1] if found else None

    def _candidates(
        self, slots: np.ndarray, by_slot: np.ndarray, rows: np.ndarray, most: int
    ) -> list[tuple[np.ndarray, tuple[Move, ...]]]:
        """Return changes that take rows off the fullest rank: two slots swapped, or a spare replica replaced."""
        full = int(rows.argmax())
        own, other = np.flatnonzero(self._rank == full), np.flatnonzero(self._rank != full)
        count = np.bincount(slots, minlength=self._num_experts)
        held = np.zeros((self._num_ranks, self._num_experts), bool)
        held[self._rank, slots] = True
        target = rows[self._rank[other]]
        # Swaps: [own, other], the fuller of the two ranks afterwards.
        shift = by_slot[own][:, None] - by_slot[other][None]
        worst = np.maximum(rows[full] - shift, target[None] + shift)
        worst[held[self._rank[other]][:, slots[own]].T | held[full, slots[other]][None]] = np.inf
        ways = [
            (float(worst.flat[i]), *divmod(int(i), len(other)), 2)
            for i in np.argsort(worst, None, "stable")[:_LOOKED_AT]
        ]
        # One more replica: an expert of the fullest rank, which others may use too, in place of a spare one.
        share = by_slot[own] / (count[slots[own]] + 1)
        worst = np.maximum(rows[full] - share[:, None], target[None] - by_slot[other][None] + share[:, None])
        worst[held[self._rank[other]][:, slots[own]].T | (count[slots[other]] < 2)[None]] = np.inf
        ways += [
            (float(worst.flat[i]), *divmod(int(i), len(other)), 1)
            for i in np.argsort(worst, None, "stable")[:_LOOKED_AT]
        ]
        made = []
        for value, i, j, number in ways:
            if not np.isfinite(value) or number > most:
                continue
            a, b, changed = int(own[i]), int(other[j]), slots.copy()
            changed[b] = slots[a]
            moves = [Move(layer=self.number, slot=b, source=a)]
            if number == 2:
                changed[a] = slots[b]
                moves.append(Move(layer=self.number, slot=a, source=b))
            made.append((changed, tuple(moves)))
        return made

    def _cost(self, move: Move) -> float:
        one, other = self._domain[self._rank[move.slot]], self._domain[self._rank[move.source]]
        return self._options.within_s if one == other else self._options.between_s

    def _slot_rows(self, slots: np.ndarray) -> list[np.ndarray]:
        """Return the rows of each slot in each window, [P] each; replicas are shared out by the newest load."""
        order = np.argsort(slots, kind="stable")
        first = np.searchsorted(slots[order], slots[order])
        where = np.full((self._num_experts, int(np.bincount(slots).max())), -1, np.int32)
        where[slots[order], np.arange(len(slots)) - first] = order
        chosen = choose_replicas(where, self._rank, self._domain, self._loads[-1])  # [W, E]
        return [
            np.bincount(chosen.ravel(), np.tile(load / self._num_ranks, self._num_ranks), len(slots))
            for load in self._loads
        ]

    def _rows(self, by_slot: np.ndarray) -> np.ndarray:
        return np.bincount(self._rank, by_slot, self._num_ranks)

    def _seconds(self, by_slot: Sequence[np.ndarray]) -> np.ndarray:
        """Return the seconds of a step in each window."""
        return np.array([self._time(self._rows(one) / self._steps) for one in by_slot])


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """A trace of windows, once as it began and once with moves; `seconds` holds what transfers took too."""

    off_seconds: float
    seconds: float
    transfer_seconds: float
    num_moves: int


def simulate(
    placement: ExpertPlacement,
    windows: Sequence[np.ndarray],
    *,
    steps: int,
    layer_time: LayerTime,
    options: PolicyOptions,
) -> Simulated:
    """Return what the policy would make of recorded loads [L, E], deciding after each window by it and the one before.

    Transfers may cost `options.spend` of the time so far, and what earlier moves have really saved.
    """
    off = spent = moved = 0.0
    num_moves, current = 0, placement
    for number, load in enumerate(windows):
        off += steps * _seconds(placement, load / steps, layer_time)
        moved += steps * _seconds(current, load / steps, layer_time)
        if number:
            budget = options.spend * off + off - moved - spent
            decision = choose_moves(
                current, windows[number - 1 : number + 1], steps=steps, layer_time=layer_time, options=options,
                budget_s=budget,
            )  # fmt: skip
            current, num_moves = decision.placement, num_moves + len(decision.moves)
            spent += decision.transfer_s
    return Simulated(off_seconds=off, seconds=moved + spent, transfer_seconds=spent, num_moves=num_moves)


def _seconds(placement: ExpertPlacement, load: np.ndarray, layer_time: LayerTime) -> float:
    return float(sum(layer_time(rows) for rows in expected_rows(placement, load)))
