"""Turns of a change of layout: nobody begins in a place that is still taken, and somebody always serves."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from moewe.topologies import Topology, TopologyError, make_topology, parse_topology
from moewe.topologies.advisor.turns import Turn, beside, in_turns, work_lost

LAYOUTS = st.builds(make_topology, st.integers(1, 6), st.integers(1, 12))


def place(topology: Topology, index: int, is_shared: bool) -> tuple[Fraction, Fraction]:
    """Return from where to where a replica stands: parts of a host, or devices."""
    width = Fraction(1, topology.dp) if is_shared else Fraction(topology.ep)
    return index * width, (index + 1) * width


@given(LAYOUTS, LAYOUTS, st.booleans())
@example(make_topology(3, 2), make_topology(2, 3), False)
def test_places_change_hands_while_others_serve(before: Topology, after: Topology, is_shared: bool) -> None:
    try:
        turns = in_turns(before, after, is_shared=is_shared)
    except TopologyError as error:
        assert f"restart the server with --topology {after.short()}" in str(error)
        first = place(after, 0, is_shared)[1]
        assert place(before, before.dp - 1, is_shared)[0] < first, "the first new replica needs all places"
        return
    assert [index for turn in turns for index in turn.old] == list(range(before.dp))
    assert [index for turn in turns for index in turn.new] == list(range(after.dp))
    standing, begun = list(range(before.dp)), 0
    for turn in turns:
        standing = [index for index in standing if index not in turn.old]
        assert standing or begun, "nobody serves"
        for index in turn.new:
            start, stop = place(after, index, is_shared)
            assert all(place(before, old, is_shared)[0] >= stop or place(before, old, is_shared)[1] <= start
                       for old in standing), (turn, index)  # fmt: skip
        begun += len(turn.new)
    assert 0 < work_lost(turns, before, after) <= len(turns)


@pytest.mark.parametrize(
    ("before", "after", "is_shared", "turns"),
    [
        ("EP2DP2", "EP1DP4", True, [((0,), (0, 1)), ((1,), (2, 3))]),
        ("EP1DP2", "EP2DP2", True, [((0,), (0,)), ((1,), (1,))]),  # more ranks, each with less of the host
        ("EP1DP3", "EP1DP2", True, [((0, 1), (0,)), ((2,), (1,))]),
        ("EP2DP3", "EP3DP2", False, [((0, 1), (0,)), ((2,), (1,))]),
        ("EP1DP4", "EP1DP2", False, [((0,), (0,)), ((1,), (1,)), ((2, 3), ())]),  # two devices are left empty
        ("EP2DP2", "EP2DP3", False, [((0,), (0,)), ((1,), (1, 2))]),
    ],
)
def test_a_turn_takes_as_few_replicas_as_a_new_one_needs(
    before: str, after: str, is_shared: bool, turns: list[tuple[tuple[int, ...], tuple[int, ...]]]
) -> None:
    found = in_turns(parse_topology(before), parse_topology(after), is_shared=is_shared)
    assert list(found) == [Turn(*one) for one in turns]


@pytest.mark.parametrize(
    ("before", "after", "is_shared"),
    [("EP4DP1", "EP2DP2", True), ("EP1DP2", "EP2DP1", False), ("EP1DP2", "EP2DP1", True)],
)
def test_what_would_leave_nobody_serving_is_refused(before: str, after: str, is_shared: bool) -> None:
    with pytest.raises(TopologyError, match=f"{before} to {after} would end all replicas"):
        in_turns(parse_topology(before), parse_topology(after), is_shared=is_shared)
    assert len(beside(parse_topology(before), parse_topology(after))) == 1
