"""What an engine says of itself from the first moment on: a ceiling that was measured in a cache is marked so."""

from __future__ import annotations

import pytest

from moewe.runtime import engine_main
from moewe.runtime.messages import KVAllocated
from tests.runtime.test_replicas import start
from tests.support.fake_worker import FakeWorker


@pytest.mark.parametrize(
    ("measured_in_cache", "cache_bytes", "expected"),
    [(False, 0, False), (True, 0, True), (False, 1 << 30, True)],
    ids=["neither", "measured in a cache", "weights fit the cache"],
)
def test_ratios_that_say_nothing_about_memory_are_marked(measured_in_cache, cache_bytes, expected, monkeypatch):
    monkeypatch.setattr(engine_main, "llc_bytes", lambda: cache_bytes)

    def measured(self):
        rank = self._start.rank
        return KVAllocated(
            rank=rank,
            memory_bandwidth=1e9 + rank,
            cache_resident=measured_in_cache and rank == 1,
            matrix_rates={"int8": 1e12 + rank},
        )

    monkeypatch.setattr(FakeWorker, "warm_up", measured)
    replicas = start("EP2DP1")
    try:
        replicas.wait_ready(30)
        assert replicas.ready[0].memory_bandwidth == (1e9, 1e9 + 1)
        assert replicas.ready[0].matrix_rates == ({"int8": 1e12}, {"int8": 1e12 + 1})
        assert [rank.cache_resident for rank in replicas.stats()[0].ranks] == [expected] * 2
    finally:
        replicas.close()
