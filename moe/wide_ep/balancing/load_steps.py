"""Loads of experts in windows of many tokens, phases apart: what decides about moves looks at, from counters of slots.

Not the window of metrics (load_window.py, in seconds and slots) and not a decision (policy.py). Pure but for counts
that it remembers. Units: tokens (rows of an expert), steps. L MoE layers, P slots of the group, E experts, K top-k.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ..placement.record import ExpertPlacement
from .load_window import PHASES, logical_load

LEAST_TOKENS = 4096


@dataclass(frozen=True, kw_only=True, eq=False)
class PhaseLoad:
    """What experts got in steps of one phase.

    Attributes:
        load: [L, E] rows.
        steps: over which, at least one.
        origin: [W], the part of tokens that each rank brought; None: not known.
    """

    load: np.ndarray
    steps: int
    origin: np.ndarray | None = None


# Phases in which something ran.
LoadSteps = tuple[PhaseLoad, ...]


def total_load(window: LoadSteps) -> np.ndarray:
    """Return the rows of each expert, phases together: [L, E] f64."""
    total: np.ndarray = np.stack([phase.load for phase in window]).sum(0, dtype=np.float64)
    return total


def total_steps(window: LoadSteps) -> int:
    """Return the steps of a window."""
    return sum(phase.steps for phase in window)


class LoadCollector:
    """Turns counts of slots, which only grow, into windows of loads of experts.

    Args:
        placement: what stands in the slots that are counted.
        top_k: K, rows that a token makes in a layer.
        least_tokens: of a window; one ends with the first counts that make it so long.

    Example:
        >>> from ..placement import linear_placement
        >>> collector = LoadCollector(linear_placement(1, 4, 2), top_k=1, least_tokens=4)
        >>> window = collector.observe({"decode": np.array([[3, 1, 0, 0]])}, {"decode": 2})
        >>> window[0].load.tolist(), window[0].steps
        ([[3, 1, 0, 0]], 2)
    """

    def __init__(self, placement: ExpertPlacement, *, top_k: int, least_tokens: int = LEAST_TOKENS) -> None:
        self._placement, self._least_rows = placement, least_tokens * top_k
        shape = (placement.num_layers, placement.num_slots)
        self._counted = {phase: np.zeros(shape, np.int64) for phase in PHASES}
        self._steps_counted = dict.fromkeys(PHASES, 0)
        self._tokens_counted = {phase: np.zeros(placement.num_ranks, np.int64) for phase in PHASES}
        self._begin()

    def place(self, placement: ExpertPlacement) -> None:
        """From the last counts on, rows are those of `placement`."""
        self._placement = placement

    def observe(
        self,
        counts: Mapping[str, np.ndarray],
        steps: Mapping[str, int],
        tokens: Mapping[str, np.ndarray] | None = None,
    ) -> LoadSteps | None:
        """Take newer counts of all slots, of one and the same step.

        Args:
            counts: by phase, [L, P] i64 since the start; a phase that is left out got nothing.
            steps: by phase, since the start.
            tokens: by phase, [W] that each rank brought since the start; None, or a phase left out: not known.

        Returns:
            The window that they complete, if one is.
        """
        for phase in PHASES:
            count = counts.get(phase, self._counted[phase])
            assert count.shape == self._counted[phase].shape, (phase, count.shape, self._counted[phase].shape)
            new = count - self._counted[phase]
            self._load[phase] += logical_load(new, self._placement.physical_to_logical, self._placement.num_experts)
            self._steps[phase] += steps.get(phase, self._steps_counted[phase]) - self._steps_counted[phase]
            brought = (tokens or {}).get(phase, self._tokens_counted[phase])
            self._tokens[phase] += brought - self._tokens_counted[phase]
            self._counted[phase] = np.array(count, np.int64)
            self._steps_counted[phase] = steps.get(phase, self._steps_counted[phase])
            self._tokens_counted[phase] = np.array(brought, np.int64)
        if sum(int(load[0].sum()) for load in self._load.values()) < self._least_rows:
            return None
        window = tuple(
            PhaseLoad(load=self._load[phase], steps=self._steps[phase], origin=_parts(self._tokens[phase]))
            for phase in PHASES
            if self._steps[phase] > 0
        )
        self._begin()
        return window

    def _begin(self) -> None:
        shape = (self._placement.num_layers, self._placement.num_experts)
        self._load = {phase: np.zeros(shape, np.int64) for phase in PHASES}
        self._steps = dict.fromkeys(PHASES, 0)
        self._tokens = {phase: np.zeros(self._placement.num_ranks, np.int64) for phase in PHASES}


def _parts(tokens: np.ndarray) -> np.ndarray | None:
    """Return each one's part of all; None where there are none."""
    total = int(tokens.sum())
    return tokens / total if total else None
