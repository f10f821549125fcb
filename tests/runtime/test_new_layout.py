"""How a layout takes the place of another: beside it where memory holds both, else in turns, else not at all."""

from __future__ import annotations

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


def running(topology: str) -> Resolved:
    model = ModelOptions(model="T-QW3", path=str(checkpoint("T-QW3")), max_model_len=64)
    cache = CacheOptions(kv_cache_memory_bytes=1 << 20)
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
    with pytest.raises(TopologyError, match="all replicas at once"):
        new_layout(before, parse_topology("EP4DP1"), least_model_len=64)
    with pytest.raises(TopologyError, match="clients may send 4096"):
        new_layout(before, parse_topology("EP2DP2"), least_model_len=4096)
