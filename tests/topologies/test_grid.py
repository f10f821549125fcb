"""Ranks as a grid: coordinates, groups that partition the ranks, domains, expert slots."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moewe.topologies import RankGrid, Topology, TopologyError, parse_topology, placement_summary, slot_ranges
from moewe.topologies.grid import AXES

GRIDS = st.builds(
    lambda adp, atp, dp, domain: RankGrid(Topology(ep=adp * atp, dp=dp, adp=adp, atp=atp), domain),
    st.integers(1, 6),
    st.integers(1, 4),
    st.integers(1, 5),
    st.integers(1, 30),
)


@given(GRIDS)
def test_groups_of_every_axis_partition_the_ranks(grid: RankGrid) -> None:
    ranks = range(grid.topology.num_ranks)
    sizes = {"ep": grid.topology.ep, "dp": grid.topology.dp, "adp": grid.topology.adp, "atp": grid.topology.atp}
    for axis in AXES:
        for rank in ranks:
            group = grid.group(axis, rank)
            assert rank in group and len(group) == sizes[axis] and list(group) == sorted(set(group))
            assert all(grid.group(axis, other) == group for other in group)


@given(GRIDS)
def test_a_group_that_fits_sits_in_one_domain_and_no_domain_overflows(grid: RankGrid) -> None:
    domains = [grid.coords(rank).domain for rank in range(grid.topology.num_ranks)]
    assert all(domains.count(domain) <= grid.domain_size for domain in set(domains))
    assert max(domains) + 1 == grid.num_domains
    for rank in range(grid.topology.num_ranks):
        in_group = {grid.coords(other).domain for other in grid.group("ep", rank)}
        assert (len(in_group) > 1) == grid.spans_domains


def test_drawing_shows_domains_replicas_and_idle_places() -> None:
    text = str(RankGrid(parse_topology("EP3DP3"), 8))
    assert text.splitlines() == [
        "EP3DP3[adp=3,atp=1,red=0] on domains of 8",
        "  domain 0: replica 0 [0 1 2]  replica 1 [3 4 5]  (2 idle)",
        "  domain 1: replica 2 [6 7 8]  (5 idle)",
    ]
    assert "replica 0 [0..63]  (8 idle)" in str(RankGrid(parse_topology("EP64DP3"), 72))
    assert RankGrid(parse_topology("EP64DP3"), 72).num_idle == 24


def test_wrong_rank_axis_and_domain_are_refused() -> None:
    grid = RankGrid(parse_topology("EP2DP1"), 8)
    with pytest.raises(TopologyError, match="0 to 1"):
        grid.coords(2)
    with pytest.raises(TopologyError, match="axis 'tp'"):
        grid.group("tp", 0)
    with pytest.raises(TopologyError, match="domain_size=0"):
        RankGrid(parse_topology("EP2DP1"), 0)


@given(st.integers(0, 300), st.integers(1, 40))
def test_slot_ranges_cover_all_slots_evenly(num_slots: int, num_ranks: int) -> None:
    ranges = slot_ranges(num_slots, num_ranks)
    assert ranges[0][0] == 0 and ranges[-1][1] == num_slots and len(ranges) == num_ranks
    assert all(left[1] == right[0] for left, right in pairwise(ranges))
    sizes = [stop - start for start, stop in ranges]
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)


def test_domains_of_a_group_follow_its_positions() -> None:
    grid = RankGrid(parse_topology("EP12DP2"), 8)
    assert grid.domains() == (0,) * 8 + (1,) * 4
    assert grid.domains(1) == (2,) * 8 + (3,) * 4
    assert RankGrid(parse_topology("EP4DP3"), 8).domains(2) == (1,) * 4


def test_placement_summary_groups_ranks_of_equal_size() -> None:
    assert placement_summary(parse_topology("EP4DP1"), 10).splitlines() == [
        "ranks 0..1: slots 0..5, 3 each",
        "ranks 2..3: slots 6..9, 2 each",
    ]
    assert placement_summary(parse_topology("EP2DP1"), 16) == "ranks 0..1: slots 0..15, 8 each"
