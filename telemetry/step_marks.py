"""Where the time of one step went on one rank: marks, each of which ends a part that began at the mark before it.

Not counters (counters.py) and not a profiler: there are marks only while somebody records a step trace. As parts follow
each other without gaps, they never overlap, and together they take no longer than their step.
Units: nanoseconds of CLOCK_MONOTONIC, which all processes of a host share; layers count from 0, -1 is outside of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

PARTS = (
    "inputs", "attention", "routing", "dispatch", "wait", "experts", "shared", "combine", "dense", "head", "sampling",
    "results",
)  # fmt: skip
(
    INPUTS, ATTENTION, ROUTING, DISPATCH, WAIT, EXPERTS, SHARED, COMBINE, DENSE, HEAD, SAMPLING, RESULTS,
) = range(len(PARTS))  # fmt: skip
NO_LAYER = -1
_HEAD_NUMBERS = 2  # of what `packed` returns: waited_from and began stand before the marks
_PART_BITS = 8


@dataclass(frozen=True, kw_only=True)
class ReadMarks:
    """The marks of a step, as they came from a rank.

    Attributes:
        waited_from: since when the rank waited for the plan while it had sequences to run; 0 where it did not.
        began: when the step did.
        ends: [n] i64, when each part ended.
        parts: [n] i64, indices into PARTS.
        layers: [n] i64.
    """

    waited_from: int
    began: int
    ends: np.ndarray
    parts: np.ndarray
    layers: np.ndarray


class StepMarks:
    """The marks of one step, in the making.

    Args:
        waited_from: see `ReadMarks`.
        clock: nanoseconds.

    Attributes:
        layer: which one is marked from now on; NO_LAYER outside of them.
    """

    def __init__(self, waited_from: int = 0, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock = clock
        self._head = [waited_from, clock()]
        self._ends: list[int] = []
        self._codes: list[int] = []
        self.layer = NO_LAYER

    def mark(self, part: int) -> None:
        """End `part` now."""
        self._ends.append(self._clock())
        self._codes.append(_code(part, self.layer))

    def add_layers(self, ends: np.ndarray, parts: tuple[int, ...]) -> None:
        """Take marks over that native code made.

        Args:
            ends: [L, n] i64, when each part of each layer ended; 0 where it did not run.
            parts: what the columns are.
        """
        layers, columns = np.nonzero(ends)
        self._ends += ends[layers, columns].tolist()
        self._codes += [_code(parts[c], layer) for layer, c in zip(layers.tolist(), columns.tolist(), strict=True)]

    def packed(self) -> bytes:
        """Return all of it as little-endian i64, for `unpack_marks`."""
        return np.array([*self._head, *self._ends, *self._codes], "<i8").tobytes()


def _code(part: int, layer: int) -> int:
    return part | (layer + 1) << _PART_BITS


def num_marks(packed: bytes) -> int:
    """Return how many marks there are in what `StepMarks.packed` returned."""
    return (len(packed) // 8 - _HEAD_NUMBERS) // 2


def unpack_marks(packed: bytes) -> ReadMarks:
    """Return what `StepMarks.packed` wrote."""
    numbers = np.frombuffer(packed, "<i8")
    (waited_from, began), marks = numbers[:_HEAD_NUMBERS].tolist(), numbers[_HEAD_NUMBERS:]
    ends, codes = marks[: len(marks) // 2], marks[len(marks) // 2 :]
    return ReadMarks(
        waited_from=waited_from,
        began=began,
        ends=ends,
        parts=codes & ((1 << _PART_BITS) - 1),
        layers=(codes >> _PART_BITS) - 1,
    )
