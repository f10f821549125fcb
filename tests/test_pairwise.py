"""Cases by pairs: all pairs are there, in far fewer cases than the product has."""

from __future__ import annotations

import itertools

import pytest

from tests.support.pairwise import pairwise


@pytest.mark.parametrize(("sizes", "most"), [([9, 11, 4], 110), ([6, 7, 6], 55), ([2, 2, 2, 2, 3], 8), ([1, 5], 5)])
def test_every_two_values_meet(sizes: list[int], most: int) -> None:
    cases = pairwise(sizes)
    assert len(set(cases)) == len(cases) <= most
    for a, b in itertools.combinations(range(len(sizes)), 2):
        assert {(case[a], case[b]) for case in cases} == set(itertools.product(range(sizes[a]), range(sizes[b])))
