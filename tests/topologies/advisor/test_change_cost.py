"""What a change of layout costs: beside where a host has room for both, else in turns, else a restart."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moewe.topologies import parse_topology
from moewe.topologies.advisor.change_cost import budget_of, change_cost
from moewe.topologies.advisor.records import Facts
from moewe.topologies.exchange_choice import ExchangeFacts
from tests.topologies.advisor.test_advisor import INSIDE, SHM, facts, window
from tests.topologies.test_budget import GIB


def with_memory(known: Facts, place: int, **machine: object) -> Facts:
    return replace(known, machine=replace(known.machine, memory_bytes=place, **machine))  # type: ignore[arg-type]


KNOWN = facts(INSIDE, [SHM], most_kv_bytes=GIB)
NARROW = parse_topology("EP1DP4")
RANK = budget_of(KNOWN, parse_topology(INSIDE)).total


@pytest.mark.parametrize(
    ("known", "to", "way", "change_s", "lost_s"),
    [
        (KNOWN, "EP1DP4", "beside", 10.0, 0.0),
        (with_memory(KNOWN, RANK + RANK // 8), "EP1DP4", "in turns", 20.0, 10.0),  # each turn takes half of them
        (with_memory(KNOWN, RANK + RANK // 8), "EP4DP1", "restart", 10.0, 10.0),
        (with_memory(KNOWN, 80 * GIB, exchange=ExchangeFacts(device="cuda")), "EP1DP4", "in turns", 20.0, 10.0),
    ],
    ids=["room", "no room", "all at once", "GPUs"],
)
def test_a_change_costs_what_its_way_takes(known: Facts, to: str, way: str, change_s: float, lost_s: float) -> None:
    seen = window(KNOWN)
    cost = change_cost(known, seen, parse_topology(to), 10.0)
    assert (cost.way, cost.change_s, cost.lost_s) == (way, change_s, pytest.approx(lost_s))


def test_room_beside_is_room_for_what_runs() -> None:
    tight = with_memory(KNOWN, RANK + budget_of(KNOWN, NARROW).fixed_bytes + (4 << 20))  # KV of 9 sequences a rank
    assert change_cost(tight, window(KNOWN, running=37), NARROW, 10.0).way == "in turns"
    assert change_cost(tight, window(KNOWN, running=36), NARROW, 10.0).way == "beside"


def test_a_rank_keeps_kv_for_a_sequence_however_little_all_may_take() -> None:
    little = budget_of(replace(KNOWN, most_kv_bytes=1), NARROW)
    assert little.longest_sequence == KNOWN.limits.max_model_len and little.kv_bytes < budget_of(KNOWN, NARROW).kv_bytes
    asked = budget_of(replace(KNOWN, most_kv_bytes=1, kv_bytes=GIB), NARROW)
    assert asked.kv_bytes == pytest.approx(GIB, rel=0.01)
