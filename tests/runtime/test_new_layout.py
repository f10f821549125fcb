"""How a layout takes the place of another: beside it where memory holds both, else in turns, else not at all."""

from __future__ import annotations

from typing import Any

import pytest

from moewe.runtime import resolve as resolve_module
from moewe.runtime.config import CacheOptions, EngineConfig, ModelOptions, ParallelOptions
from moewe.runtime.new_layout import new_layout
from moewe.runtime.resolve import Resolved, resolve
from moewe.topologies import TopologyError, parse_topology
from moewe.topologies.advisor.turns import BESIDE, IN_TURNS
from tests.support.fixtures import checkpoint


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch):
    """A host of 64 GiB, and how much of it is free."""

    def size(num_bytes: int) -> None:
        monkeypatch.setattr(resolve_module, "available_memory_bytes", lambda: num_bytes)

    monkeypatch.setattr(resolve_module, "host_memory_bytes", lambda: 64 << 30)
    monkeypatch.setattr(resolve_module, "host_cores", lambda: 8)
    size(64 << 30)
    return size


def running(topology: str, **options: Any) -> Resolved:
    model = ModelOptions(model="T-QW3", path=str(checkpoint("T-QW3")), max_model_len=64)
    cache = CacheOptions(**{"kv_cache_memory_bytes": 1 << 20, **options})
    return resolve(EngineConfig(model=model, parallel=ParallelOptions(topology=topology), cache=cache))


def test_with_room_any_layout_begins_beside(free) -> None:
    before = running("EP4DP1[domains=2+2,rate=9,delay=7]")
    found = new_layout(before, parse_topology("EP2DP2"), least_model_len=64)
    assert (found.way, found.turns[0].old, found.turns[0].new) == (BESIDE, (0,), (0, 1))
    after = found.resolved.config
    assert after.parallel.topology == "EP2DP2[adp=2,atp=1,red=0]"
    assert after.parallel.domains == "2+2,rate=9,delay=7", "the host still emulates what it did"
    assert found.resolved.asked.parallel.domains == after.parallel.domains, "and after the next change, too"


def test_without_room_places_change_hands_in_turns(free) -> None:
    before = running("EP1DP4")
    free(256 << 20)
    found = new_layout(before, parse_topology("EP2DP2"), least_model_len=64)
    assert found.way == IN_TURNS and [turn.old for turn in found.turns] == [(0, 1), (2, 3)]
    fewer = new_layout(before, parse_topology("EP1DP2"), least_model_len=64)
    assert fewer.way == IN_TURNS and [turn.old for turn in fewer.turns] == [(0, 1), (2, 3)]
    with pytest.raises(TopologyError, match=r"end all replicas.*restart the server.*no room beside what runs: T-QW3"):
        new_layout(before, parse_topology("EP4DP1"), least_model_len=64)
    with pytest.raises(TopologyError, match="clients may send 4096"):
        new_layout(before, parse_topology("EP2DP2"), least_model_len=4096)


def test_both_layouts_together_stay_within_the_share_of_the_host(free) -> None:
    rank = running("EP1DP2").budget.total / (64 << 30)  # as a part of the host; ranks of these layouts are much alike
    narrow = running("EP1DP2", gpu_memory_utilization=5 * rank)
    found = new_layout(narrow, parse_topology("EP2DP2"), least_model_len=64)
    assert found.way == IN_TURNS, "all of the host is free, but only a part of it may be used"
    broad = running("EP1DP2", gpu_memory_utilization=8 * rank)
    found = new_layout(broad, parse_topology("EP2DP2"), least_model_len=64)
    assert found.way == BESIDE
    memory = 4 * found.resolved.budget.rank_memory_bytes
    assert memory == pytest.approx(8 * rank * (64 << 30), rel=0.01), "the place of the old one is free by then"


def test_a_layout_holds_what_runs_and_waits(free, caplog) -> None:
    before = running("EP1DP2", kv_cache_memory_bytes=None)
    held = before.budget.sequences_held([64] * 10**5)
    assert 100 < held < 10**5
    ranks = 2 * running("EP2DP1").budget.fixed_bytes
    free(ranks + (4 << 20))  # so there is less KV than before
    found = new_layout(before, parse_topology("EP2DP1"), least_model_len=64, lengths=[64] * 10)
    assert found.way == BESIDE
    assert "KV of EP2DP1 holds" in caplog.text
    few = found.resolved.budget.sequences_held([64] * 10**5)
    with pytest.raises(TopologyError, match=rf"holds {few} of the {few + 1} sequences that run and wait"):
        new_layout(before, parse_topology("EP2DP1"), least_model_len=64, lengths=[64] * (few + 1))
    found = new_layout(before, parse_topology("EP2DP2"), least_model_len=64, lengths=[64] * (few + 1))
    assert found.way == IN_TURNS, "once the old ones have ended there is room for all of them"
    # What does not fit today need not fit tomorrow.
    assert new_layout(before, parse_topology("EP2DP2"), least_model_len=64, lengths=[64] * 10**5).way == IN_TURNS
