"""Which experts to move, and whether to: a move has to save more step time than its transfer costs. Pure.

Not the transfer (runtime/rebalancing/) and not a placement from nothing (placement/balanced.py): it changes what
stands, slot by slot. Units: seconds; loads in rows of experts over the steps of a window (load_steps.py).
L MoE layers, E experts, P slots, W ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..placement.quotas import choose_replicas
from ..placement.record import ExpertPlacement
from .expected import expected_rows
from .load_steps import LoadSteps, total_load, total_steps

# Seconds of one MoE layer in one step, of the expected rows of each slot [P] (`topologies.cost` makes one).
LayerTime = Callable[[np.ndarray], float]
# Candidates that are looked at closely; the others lost in an estimate.
_LOOKED_AT = 4


@dataclass(frozen=True, kw_only=True)
class PolicyOptions:
    """When a move pays.

    Attributes:
        transfer_s: to bring an expert of a layer to a slot.
        horizon_steps: for how many steps what was saved counts.
        hysteresis: by how much of the transfer what is saved has to be more than it.
        noise: a rank's surplus has to exceed this many standard deviations of what chance alone makes of even loads.
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
        takes_back: so many decisions before it are undone, which did harm.
    """

    moves: tuple[Move, ...]
    placement: ExpertPlacement
    transfer_s: float
    saved_s: float
    takes_back: int = 0


@dataclass(frozen=True, kw_only=True)
class _Action:
    """Moves of one layer that belong together, and what they make of its slots."""

    slots: np.ndarray
    moves: tuple[Move, ...]
    transfer_s: float
    saved_s: float


def choose_moves(
    placement: ExpertPlacement,
    windows: Sequence[LoadSteps],
    *,
    layer_time: LayerTime,
    options: PolicyOptions,
    budget_s: float = np.inf,
    turn: int = 0,
) -> Decision:
    """Return the moves that pay, fullest layer first; none where nothing does.

    What a move saves is the least of what it would have saved in each window: load that does not stay moves nothing.

    Args:
        placement: what stands.
        windows: oldest first, at least two; the moves are found by the newest.
        layer_time: of one layer.
        options: when a move pays.
        budget_s: what transfers may cost together.
        turn: decisions in a row that found nothing: each looks at other layers.
    """
    if len(windows) < 2 or any(total_steps(window) < 1 for window in windows):
        raise ValueError(f"at least 2 windows of at least 1 step are needed, got {len(windows)}")
    newest = total_load(windows[-1])
    rows = expected_rows(placement, newest)  # [L, W]
    surplus = rows.max(1) - rows.mean(1)
    uneven = np.flatnonzero(surplus > options.noise * np.sqrt(rows.mean(1)))
    uneven = uneven[np.argsort(-surplus[uneven], kind="stable")]
    if uneven.size > options.max_layers:
        uneven = np.roll(uneven, -turn * options.max_layers)[: options.max_layers]
    slots = placement.physical_to_logical.copy()
    moves: list[Move] = []
    transfer_s = saved_s = 0.0
    for number in uneven.tolist():
        layer = _Layer(placement, number, windows, layer_time, options)
        while len(moves) < options.max_moves:
            action = layer.best(slots[number], most=options.max_moves - len(moves))
            if action is None or transfer_s + action.transfer_s > budget_s:
                break
            slots[number] = action.slots
            moves += action.moves
            transfer_s, saved_s = transfer_s + action.transfer_s, saved_s + action.saved_s
    last = {(move.layer, move.slot): move for move in moves}  # all come into force together
    moves = [move for move in last.values() if placement.physical_to_logical[move.layer, move.slot] != move.expert]
    if not moves:
        return Decision(moves=(), placement=placement, transfer_s=0.0, saved_s=0.0)
    after = placement.with_layers(slots, newest, sorted({move.layer for move in moves}))
    return Decision(moves=tuple(moves), placement=after, transfer_s=len(moves) * options.transfer_s, saved_s=saved_s)


class _Layer:
    """One layer: what its slots get, and what could be changed."""

    def __init__(
        self,
        placement: ExpertPlacement,
        number: int,
        windows: Sequence[LoadSteps],
        layer_time: LayerTime,
        options: PolicyOptions,
    ) -> None:
        self.number, self._time, self._options = number, layer_time, options
        # Of each window its phases: rows of experts [E] in one step, and steps.
        self._windows = [
            [(phase.load[number] / phase.steps, phase.steps) for phase in window if phase.steps] for window in windows
        ]
        self._newest = total_load(windows[-1])[number]
        self._num_experts, self._rank, self._domain = placement.num_experts, placement.slot_rank, placement.rank_domain
        self._num_ranks = placement.num_ranks

    def best(self, slots: np.ndarray, *, most: int) -> _Action | None:
        """Return the change that saves most for what it costs, of at most `most` moves, if one pays."""
        chosen = self._chosen(slots)
        by_slot = self._slot_rows(chosen, self._newest)
        rows = np.bincount(self._rank, by_slot, self._num_ranks)
        if rows.max() - rows.mean() <= self._options.noise * np.sqrt(rows.mean()):
            return None
        before = self._step_seconds(chosen)
        found = []
        for changed, moves in self._candidates(slots, by_slot, rows, most):
            saved = float((before - self._step_seconds(self._chosen(changed))).min())
            cost = len(moves) * self._options.transfer_s
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
            moves = [Move(layer=self.number, slot=b, expert=int(slots[a]))]
            if number == 2:
                changed[a] = slots[b]
                moves.append(Move(layer=self.number, slot=a, expert=int(slots[b])))
            made.append((changed, tuple(moves)))
        return made

    def _chosen(self, slots: np.ndarray) -> np.ndarray:
        """Return the slot of each rank for each expert, [W, E]; replicas are shared out by the newest load."""
        order = np.argsort(slots, kind="stable")
        first = np.searchsorted(slots[order], slots[order])
        where = np.full((self._num_experts, int(np.bincount(slots).max())), -1, np.int32)
        where[slots[order], np.arange(len(slots)) - first] = order
        return choose_replicas(where, self._rank, self._domain, self._newest)

    def _slot_rows(self, chosen: np.ndarray, load: np.ndarray) -> np.ndarray:
        """Return the rows of each slot [P] of a load [E]."""
        part = np.broadcast_to(load / self._num_ranks, chosen.shape)
        return np.bincount(chosen.ravel(), part.ravel(), len(self._rank))

    def _step_seconds(self, chosen: np.ndarray) -> np.ndarray:
        """Return the mean seconds of a step in each window."""
        return np.array(
            [
                sum(steps * self._time(self._slot_rows(chosen, load)) for load, steps in window)
                / sum(steps for _, steps in window)
                for window in self._windows
            ]
        )
