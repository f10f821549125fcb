"""The map as text: names for few ranks, numbers for many."""

from __future__ import annotations

import numpy as np

from moewe.moe.wide_ep.placement import (
    balanced_placement,
    draw_placement,
    linear_placement,
    placement_of,
    round_robin_placement,
)


def test_few_ranks_show_their_experts() -> None:
    assert draw_placement(linear_placement(1, 10, 4)).splitlines() == [
        "domain 0: 4 ranks, 10 slots, 10 experts",
        "  rank 0  slots 0-2  experts 0-2",
        "  rank 1  slots 3-5  experts 3-5",
        "  rank 2  slots 6-7  experts 6 7",
        "  rank 3  slots 8-9  experts 8 9",
    ]


def test_domains_and_replicas_are_named() -> None:
    slots = np.array([[0, 1, 2, 0, 3, 0]], np.int32)
    placement = placement_of(slots, 5, ((0, 2), (2, 4), (4, 6)), domains=(0, 0, 1))
    assert draw_placement(placement).splitlines() == [
        "domain 0: 2 ranks, 4 slots, 3 experts",
        "  rank 0  slots 0-1  experts 0 1",
        "  rank 1  slots 2-3  experts 2 0",
        "domain 1: 1 rank, 2 slots, 2 experts",
        "  rank 2  slots 4-5  experts 3 0",
        "3 replicas: expert 0",
        "nowhere: experts 4",
    ]


def test_many_ranks_are_drawn_in_numbers() -> None:
    domains = tuple(rank // 8 for rank in range(72))
    load = np.arange(256, 0, -1.0)[None]
    placement = balanced_placement(load, num_redundant=44, domains=domains)
    lines = draw_placement(placement).splitlines()
    assert lines[0].startswith("domain 0: 8 ranks, 40 slots, ")
    assert lines[1].startswith("  ranks 0-7: 5 slots each (0-39), ")
    assert lines[2].startswith("domain 1: 8 ranks, 36 slots, ")
    assert lines[3].startswith("  ranks 8-11: 5 slots each (40-59), ")
    assert lines[4].startswith("  ranks 12-15: 4 slots each (60-75), ")
    assert sum(line.startswith("domain") for line in lines) == 9
    assert "replicas: expert" in lines[-1]
    assert len(lines) < 40 and max(map(len, lines)) < 400


def test_uneven_ranks_are_split_into_runs() -> None:
    placement = round_robin_placement(1, 21, 20)
    lines = draw_placement(placement).splitlines()
    assert lines == [
        "domain 0: 20 ranks, 21 slots, 21 experts",
        "  rank 0: 2 slots each (0-1)",
        "  ranks 1-19: 1 slot each (2-20)",
    ]


def test_a_dense_model_has_nothing_to_draw() -> None:
    assert draw_placement(linear_placement(0, 0, 1)) == "no expert slots"
