"""Domains of a topology: spelled in brackets or in a file, the same everywhere, refused where they do not add up."""

from __future__ import annotations

from pathlib import Path

import pytest

from moewe.topologies import RankGrid, TopologyError, expansion, load_layout, parse_topology

LONG = "EP4DP2[adp=4,atp=1,red=0,domains=3+1,rate=200,delay=500]"


def test_domains_round_trip() -> None:
    topology = parse_topology("ep4dp2[domains=3+1, rate=200, delay=500]")
    assert topology.long() == LONG and parse_topology(LONG) == topology
    assert (topology.domains, topology.rate, topology.delay) == ((3, 1), 200, 500)
    assert parse_topology("EP4DP1").long() == "EP4DP1[adp=4,atp=1,red=0]"


def test_a_file_lists_ranks(tmp_path: Path) -> None:
    file = tmp_path / "two.yaml"
    file.write_text(
        "serve: EP4DP2\ndomains: [[0, 1, 2], [3]]\nlink: {megabytes_per_second: 200, delay_microseconds: 500}\n"
    )
    assert load_layout(str(file)).single().long() == LONG
    file.write_text("serve: EP4DP2\ndomains: [[0, 1], [2, 3]]\n")
    assert load_layout(str(file)).single().long() == "EP4DP2[adp=4,atp=1,red=0,domains=2+2]"


def test_the_grid_has_the_domains_of_every_replica() -> None:
    grid = RankGrid(parse_topology(LONG), 8)
    assert grid.spans_domains and grid.group_domains == (3, 1) and grid.num_domains == 4
    assert [grid.coords(rank).domain for rank in range(8)] == [0, 0, 0, 1, 2, 2, 2, 3]
    assert "domain 1: replica 0 [3]\n" in str(grid) and "idle" not in str(grid)
    assert RankGrid(parse_topology("EP10DP1"), 4).group_domains == (4, 4, 2)
    assert RankGrid(parse_topology("EP4DP1"), 8).group_domains == (4,)
    one = RankGrid(parse_topology("EP4DP1[domains=4]"), 2)
    assert not one.spans_domains and one.num_domains == 1


def test_the_expansion_says_what_is_emulated() -> None:
    text = expansion(parse_topology(LONG))
    assert "domains    3 + 1 ranks of a group" in text and "200 MB/s" in text and "500 us" in text
    assert "domains" not in expansion(parse_topology("EP4DP2"))
    assert "MB/s" not in expansion(parse_topology("EP4DP2[domains=2+2]"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("EP4DP1[domains=2+3]", ["domains=2+3", "5 ranks", "ep=4"]),
        ("EP4DP1[domains=4+0]", ["domains=4+0", "at least 1"]),
        ("EP4DP1[domains=x]", ["domains='x'", "2+2"]),
        ("EP4DP1[domains=2+2,rate=x]", ["rate='x'", "whole number"]),
        ("EP4DP1[rate=5]", ["rate=5", "domains"]),
        ("EP4DP1[domains=4,delay=5]", ["delay=5", "domains"]),
        ("EP4DP1[domains=2+2,delay=9000000]", ["delay=9000000", "1000000"]),
        ("EP4DP1[domains=2+2,domains=2+2]", ["domains twice"]),
    ],
)
def test_domains_that_do_not_add_up_are_refused(text: str, words: list[str]) -> None:
    with pytest.raises(TopologyError) as error:
        parse_topology(text)
    assert all(word in str(error.value) for word in words), error.value
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("serve: EP4DP1\ndomains: [[0, 2], [1, 3]]\n", ["domains", "consecutive", "[[0, 1], [2, 3]]"]),
        ("serve: EP4DP1\ndomains: 2\n", ["domains", "[[0, 1], [2, 3]]"]),
        ("serve: EP4DP1\ndomains: [[0, 1], []]\n", ["domains"]),
        ("serve: EP4DP1\ndomains: [[0, 1]]\n", ["2 ranks", "ep=4"]),
        ("serve: EP4DP1\nlink: {delay_microseconds: 5}\n", ["delay=5", "domains"]),
        ("serve: EP4DP1\ndomains: [[0, 1], [2, 3]]\nlink: 5\n", ["link", "megabytes_per_second"]),
        ("serve: EP4DP1\ndomains: [[0, 1], [2, 3]]\nlink: {speed: 5}\n", ["'speed'", "megabytes_per_second"]),
        ("serve: EP4DP1\ndomains: [[0, 1], [2, 3]]\nlink: {delay_microseconds: 1.5}\n", ["delay=1.5"]),
        ("a: EP4DP1\nb: EP4DP1\ndomains: [[0, 1], [2, 3]]\n", ["one pool", "EP4DP1[domains=2+2]"]),
    ],
)
def test_a_file_with_wrong_domains_is_refused(tmp_path: Path, text: str, words: list[str]) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text(text)
    with pytest.raises(TopologyError) as error:
        load_layout(str(file))
    assert all(word in str(error.value) for word in words), error.value
    assert "\n" not in str(error.value)
