"""A moving window over what expert slots got: counters that only grow go in, tokens of the last while come out.

Not a counter (telemetry counts, ranks report) and not a decision. Pure but for what it remembers, which is bounded.
Units: tokens (rows of an expert), seconds of any clock that does not go back.
L MoE layers, S slots of the whole group, E experts, W ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np

from ..placement.measures import imbalance

# What is kept apart. A step with prompts in it counts as prefill, rows that decode in it too.
PHASES = ("prefill", "decode")


class SlotWindow:
    """What the slots of all ranks got lately, between `span_s` and (1 + 1 / parts) times that.

    It keeps `parts` + 1 counts and the newest one, however often it is told. Younger than `span_s` it covers all it
    was told, the first count included: what was counted before that belongs to it too.

    Args:
        span_s: how far it reaches back.
        parts: in how many parts it moves on.

    Example:
        >>> window = SlotWindow(span_s=60.0, parts=1)
        >>> for now, count in ((0.0, 5), (60.0, 7), (120.0, 9)):
        ...     window.observe(now, {"decode": np.array([[count]])})
        >>> window.tokens("decode").tolist()
        [[4]]
    """

    def __init__(self, *, span_s: float, parts: int = 4) -> None:
        if not span_s > 0 or parts < 1:
            raise ValueError(f"a window needs span_s > 0 and at least 1 part, got span_s={span_s}, parts={parts}")
        self._part_s = span_s / parts
        self._marks: deque[dict[str, np.ndarray]] = deque(maxlen=parts + 1)  # where parts begin, oldest first
        self._mark_time = 0.0
        self._newest: dict[str, np.ndarray] = {}

    def observe(self, now: float, counts: Mapping[str, np.ndarray]) -> None:
        """Take newer counts of all slots.

        Args:
            now: when they were read.
            counts: by phase, [L, S] i64 since a start; a phase that is left out got nothing. Smaller ones than before,
                or of another shape, come from ranks that started again: then the window does too.
        """
        shape = next((count.shape for count in counts.values()), (0, 0))
        taken = {phase: np.array(counts.get(phase, np.zeros(shape)), np.int64) for phase in PHASES}
        if set(counts) - set(PHASES) or any(count.ndim != 2 or count.shape != shape for count in taken.values()):
            raise ValueError(f"counts must be [layers, slots] of {' and '.join(PHASES)}, all of one shape")
        restarted = bool(self._newest) and any(
            taken[phase].shape != self._newest[phase].shape or (taken[phase] < self._newest[phase]).any()
            for phase in PHASES
        )
        if restarted or not self._newest:
            self._marks.clear()
            self._marks.append({phase: np.zeros(shape, np.int64) for phase in PHASES})
            self._mark_time = now
        elif now - self._mark_time >= self._part_s:
            self._marks.append(taken)
            self._mark_time = now
        self._newest = taken

    def tokens(self, phase: str | None = None) -> np.ndarray:
        """Return what each slot got in the window, in one phase or (None) in both: [L, S] i64; [0, 0] before any."""
        if not self._newest:
            return np.zeros((0, 0), np.int64)
        phases = PHASES if phase is None else (phase,)
        total: np.ndarray = np.sum([self._newest[each] - self._marks[0][each] for each in phases], axis=0)
        return total


def logical_load(tokens: np.ndarray, physical_to_logical: np.ndarray, num_experts: int) -> np.ndarray:
    """Return what each expert got, its replicas together: [L, E] i64 of slots [L, S].

    Args:
        tokens: [L, S].
        physical_to_logical: [L, S], the expert of each slot (`ExpertPlacement` has it).
        num_experts: E.

    Example:
        >>> logical_load(np.array([[3, 1, 2]]), np.array([[0, 1, 0]]), 2).tolist()
        [[5, 1]]
    """
    if tokens.shape != physical_to_logical.shape:
        raise ValueError(f"tokens {tokens.shape} and physical_to_logical {physical_to_logical.shape} must agree")
    load = np.zeros((len(tokens), num_experts), np.int64)
    np.add.at(load, (np.arange(len(tokens))[:, None], physical_to_logical), tokens)
    return load


def rank_imbalance(tokens: np.ndarray, slot_ranges: Sequence[tuple[int, int]]) -> np.ndarray:
    """Return the imbalance of each layer: the fullest rank over the mean of ranks, 1.0 where nothing ran: [L].

    Args:
        tokens: [L, S].
        slot_ranges: (start, stop) of each rank.
    """
    by_rank = np.stack([tokens[:, start:stop].sum(1) for start, stop in slot_ranges], axis=1)
    return imbalance(by_rank)
