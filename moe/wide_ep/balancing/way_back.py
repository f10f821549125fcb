"""What may be lost until every expert stands again where it stood at the start, and the way there; pure.

Not a decision (policy.py) and not the books (ledger.py): a bound, whatever load comes, in seconds of a model.
Going back takes rounds, as moves do; until the last of them, what is not back yet may lose.
L MoE layers, E experts, P slots, W ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..placement.quotas import choose_replicas
from ..placement.record import ExpertPlacement

_MOST_KNOWN = 4096
# Choices between replicas that a layer may change off its fullest ranks, times ranks (placement/quotas.py): until moves
# have won something, and after. The fewer, the less may be lost; the first few bring most of it.
FEW_CHOICES, MORE_CHOICES = 1, 3


class LayerModel(Protocol):
    """What one MoE layer takes (`topologies.layer_cost` has such a model)."""

    def seconds(self, rows: np.ndarray, slots: np.ndarray) -> float:
        """Return what a step takes, by rows of each rank and expert [W, E] and the slots that serve them [W, E]."""
        ...

    def most_lost(self, before: np.ndarray, after: np.ndarray, *, rows: float, steps: int) -> float:
        """Return a bound on how much longer steps take with slots `after` than with `before`, whatever load comes."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Stand:
    """A layer that does not stand as it began.

    Attributes:
        slots: [P], the expert of each slot.
        chosen: [W, E], the slot that serves each rank and expert.
        load: [E], by which replicas are shared out.
        is_returning: a part of it went back: the rest goes before other layers.
    """

    slots: np.ndarray
    chosen: np.ndarray
    load: np.ndarray
    is_returning: bool = False


@dataclass(frozen=True, kw_only=True)
class Exposure:
    """How long what stands has to be borne.

    Attributes:
        rows: of a layer in a window, at most.
        steps: of a window, at most.
        windows: that end until a round is in force, at most.
        max_moves: transfers of one round.
        transfer_s: of one of them.
    """

    rows: float
    steps: int
    windows: int
    max_moves: int
    transfer_s: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Stage:
    """One layer, one round nearer to the start.

    Attributes:
        layer: which.
        slots: [P], what stands then.
        num_moves: transfers that it takes.
        risk_s: what the layer may lose in a window until it is back altogether.
        is_last: it is back then.
    """

    layer: int
    slots: np.ndarray
    num_moves: int
    risk_s: float
    is_last: bool


class WayBack:
    """The way from what stands to what stood at the start.

    Args:
        start: where everything goes back to.
        model: of one layer.
    """

    def __init__(self, start: ExpertPlacement, model: LayerModel) -> None:
        self._start, self._model = start, model
        self._known: dict[tuple[int, float, int, bytes], float] = {}

    def most_lost(self, stands: Mapping[int, Stand], exposure: Exposure) -> float:
        """Return a bound on what `stands` lose, beside the start, until all of them are back, transfers included."""
        rounds = self.rounds(stands, exposure)
        left = sum(stage.risk_s for stages in rounds for stage in stages if stage.is_last)
        total = 0.0
        for stages in rounds:
            total += left * exposure.windows + sum(stage.num_moves for stage in stages) * exposure.transfer_s
            left -= sum(stage.risk_s for stage in stages if stage.is_last)
        return total

    def rounds(self, stands: Mapping[int, Stand], exposure: Exposure) -> list[list[Stage]]:
        """Return what each round brings back: after one of them, the others are the way from there.

        Layers that may lose most go first. A round has at most `max_moves` transfers, but room for a swap.
        """
        layers = [self._stages(layer, stand, exposure) for layer, stand in stands.items()]
        order = sorted(
            (stages for stages in layers if stages),
            key=lambda stages: (not stands[stages[0].layer].is_returning, -stages[0].risk_s, stages[0].layer),
        )
        rounds: list[list[Stage]] = []
        room = 0
        for stages in order:
            for number, stage in enumerate(stages):
                if number or stage.num_moves > room:
                    rounds.append([])
                    room = max(exposure.max_moves, stage.num_moves)
                rounds[-1].append(stage)
                room -= stage.num_moves
        return rounds

    def _stages(self, layer: int, stand: Stand, exposure: Exposure) -> list[Stage]:
        way = steps_back(stand.slots, self._start.physical_to_logical[layer], exposure.max_moves)
        risk, now = self._risk(layer, stand.chosen, exposure), stand.slots
        for slots in way[:-1]:
            risk = max(risk, self._risk(layer, chosen_slots(self._start, slots, stand.load), exposure))
        stages = []
        for slots in way:
            number, is_last = int((slots != now).sum()), slots is way[-1]
            stages.append(Stage(layer=layer, slots=slots, num_moves=number, risk_s=risk, is_last=is_last))
            now = slots
        return stages

    def _risk(self, layer: int, chosen: np.ndarray, exposure: Exposure) -> float:
        key = (layer, exposure.rows, exposure.steps, chosen.tobytes())
        if key not in self._known:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[key] = self._model.most_lost(
                self._start.slot_of[layer], chosen, rows=exposure.rows, steps=exposure.steps
            )
        return self._known[key]


def chosen_slots(
    placement: ExpertPlacement, slots: np.ndarray, load: np.ndarray, choices: int = FEW_CHOICES
) -> np.ndarray:
    """Return the slot of each rank for each expert: [W, E], of the expert of each slot [P] and rows of experts [E]."""
    where = replicas_of(slots, placement.num_experts)
    return choose_replicas(where, placement.slot_rank, placement.rank_domain, load, moves_per_rank=choices)


def replicas_of(slots: np.ndarray, num_experts: int) -> np.ndarray:
    """Return the slots of each expert: [E, R] i32, padded with -1, of the expert of each slot [P].

    Example:
        >>> replicas_of(np.array([1, 0, 1]), 2).tolist()
        [[1, -1], [0, 2]]
    """
    order = np.argsort(slots, kind="stable")
    first = np.searchsorted(slots[order], slots[order])
    where = np.full((num_experts, int(np.bincount(slots).max())), -1, np.int32)
    where[slots[order], np.arange(len(slots)) - first] = order
    return where


def steps_back(slots: np.ndarray, start: np.ndarray, most: int) -> list[np.ndarray]:
    """Return what stands after each round on the way from `slots` [P] to `start` [P], of at most `most` transfers each.

    Every expert stands somewhere all the way; two slots that change places are never parted, so a round may have 2.

    Example:
        >>> [now.tolist() for now in steps_back(np.array([1, 2, 0]), np.array([0, 1, 2]), 2)]
        [[2, 1, 0], [0, 1, 2]]
    """
    way: list[np.ndarray] = []
    now = slots
    while (now != start).any():
        after = now.copy()
        while (wrong := np.flatnonzero(after != start)).size:
            tried = after.copy()
            slot = int(wrong[0])
            expert = int(after[slot])
            if (after == expert).sum() > 1:
                tried[slot] = start[slot]
            else:  # the only one: it changes places with what stands where it belongs
                home = int(np.flatnonzero(start == expert)[0])
                tried[slot], tried[home] = after[home], expert
            if (tried != now).sum() > max(most, 2):
                break
            after = tried
        way.append(after)
        now = after
    return way
