"""Turns of a change of layout: every place changes hands once, and never all of them at a time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moewe.topologies import TopologyError, make_topology, parse_topology
from moewe.topologies.advisor.turns import beside, in_turns


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 4))
def test_places_change_hands_once(old: int, new: int, times: int) -> None:
    ranks = old * new * times
    before, after = make_topology(old, ranks // old), make_topology(new, ranks // new)
    try:
        turns = in_turns(before, after)
    except TopologyError as error:
        assert "restart the server with --topology" in str(error)
        return
    assert len(turns) > 1
    for side, ep, dp in (("old", old, before.dp), ("new", new, after.dp)):
        assert [index for turn in turns for index in getattr(turn, side)] == list(range(dp))
        places = [{rank for index in getattr(turn, side) for rank in range(index * ep, (index + 1) * ep)}
                  for turn in turns]  # fmt: skip
        assert places == [
            {rank for index in turn.old for rank in range(index * old, (index + 1) * old)} for turn in turns
        ]


@pytest.mark.parametrize(
    ("before", "after", "why"),
    [
        ("EP4DP1", "EP2DP2", "all replicas at once"),
        ("EP2DP2", "EP1DP2", "from 4 to 2"),
        ("EP2DP3", "EP3DP2", "at once"),
    ],
)
def test_what_would_leave_nobody_serving_is_refused(before: str, after: str, why: str) -> None:
    with pytest.raises(TopologyError, match=why):
        in_turns(parse_topology(before), parse_topology(after))
    assert len(beside(parse_topology(before), parse_topology(after))) == 1
