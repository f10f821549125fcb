"""Parameters of which each meets each of another kind in some case, in few cases: mistakes are of one or of two values.

Not random: the same axes give the same cases. Full products cost many times as much and have found no more here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

Pair = tuple[int, int, int, int]  # axis, value of it, a later axis, value of that


def pairwise(sizes: list[int]) -> list[tuple[int, ...]]:
    """Return cases, an index for each axis, in which every two values of two axes meet.

    Greedy: a case begins with the first pair that has not met, and takes of each other axis what meets most others.

    Example:
        >>> pairwise([2, 2, 2])
        [(0, 0, 0), (0, 1, 1), (1, 0, 1), (1, 1, 0)]
    """
    open_pairs: dict[Pair, None] = {
        (a, i, b, j): None
        for a, b in itertools.combinations(range(len(sizes)), 2)
        for i in range(sizes[a])
        for j in range(sizes[b])
    }

    def meets(case: dict[int, int]) -> list[Pair]:
        pairs = [(a, case[a], b, case[b]) for a, b in itertools.combinations(sorted(case), 2)]
        return [pair for pair in pairs if pair in open_pairs]

    cases = []
    while open_pairs:
        a, i, b, j = next(iter(open_pairs))
        case = {a: i, b: j}
        for axis in range(len(sizes)):
            if axis not in case:
                case[axis] = max(range(sizes[axis]), key=lambda value: (len(meets(case | {axis: value})), -value))
        for pair in meets(case):
            del open_pairs[pair]
        cases.append(tuple(case[axis] for axis in range(len(sizes))))
    return cases


def each_pair(**axes: Mapping[str, Any] | Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrise a test by `axes`, by name: its values, or a mapping of what to call them to values."""
    named = [list(axis.items() if isinstance(axis, Mapping) else ((str(v), v) for v in axis)) for axis in axes.values()]
    chosen = [[axis[i] for axis, i in zip(named, case)] for case in pairwise([len(axis) for axis in named])]
    rows = [pytest.param(*(value for _, value in row), id="-".join(name for name, _ in row)) for row in chosen]
    return pytest.mark.parametrize(tuple(axes), rows)
