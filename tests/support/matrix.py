"""Which family runs in which topology and chunk size, and which of these runs are quick enough for every run of pytest.

Not tests. Units: tokens; a case is (fixture, topology, largest chunk).
"""

from __future__ import annotations

from collections.abc import Container, Iterable

import pytest

from .fixtures_table import DENSE_FIXTURES, MOE_FIXTURES

TOPOLOGIES = ("EP1DP1", "EP2DP1", "EP4DP1", "EP2DP2")
DENSE_TOPOLOGIES = ("EP1DP1", "EP1DP2")
CHUNKS = (1, 7, 512)

Case = tuple[str, str, int]
# Every topology with chunks of 7; rows one by one in the first, and whole prompts in the second.
MATRIX: list[Case] = [
    (name, topology, chunk)
    for names, topologies in ((MOE_FIXTURES, TOPOLOGIES), (DENSE_FIXTURES, DENSE_TOPOLOGIES))
    for name in names
    for topology in topologies
    for chunk in CHUNKS
    if chunk == 7 or (topology, chunk) in ((topologies[0], 1), (topologies[1], 512))
]
MATRIX += [(n, "EP4DP2", 7) for n in ("T-QW3", "T-DS3", "T-GOS")]


def _quick() -> set[Case]:
    """Every family once, and every topology and chunk size with some family."""
    cases = [("EP2DP1", 7), ("EP1DP1", 7), ("EP2DP1", 512), ("EP1DP1", 7)]
    quick = {(name, *cases[i % len(cases)]) for i, name in enumerate(MOE_FIXTURES)}
    quick |= {(name, "EP1DP1", 7) for name in DENSE_FIXTURES}
    return quick | {("T-QW3", "EP4DP1", 7), ("T-OLM", "EP2DP2", 7), ("T-DS3", "EP1DP1", 1), ("T-QWD", "EP1DP2", 512)}


QUICK = _quick()


# Families that differ most: plain, latent, windows with sinks, runs of positions, another router, dense with windows.
UNLIKE = ("T-QW3", "T-DS3", "T-GOS", "T-LL4", "T-PHI", "T-MIS")


def parameters(cases: Iterable[Case] = MATRIX, quick: Container[Case] = QUICK) -> list[object]:
    """Return `cases` as parameters of a test, marked slow where they are not quick."""
    return [
        pytest.param(*case, marks=() if case in quick else pytest.mark.slow, id="-".join(map(str, case)))
        for case in cases
    ]


def of_each(names: Iterable[str]) -> list[object]:
    """Return families as parameters of a test, marked slow where they are like others."""
    return [pytest.param(name, marks=() if name in UNLIKE else pytest.mark.slow) for name in names]


def num_ranks(topology: str) -> int:
    """Return the ranks of all replicas."""
    return int(topology[2]) * int(topology[5])
