"""Replay of traces: what placements by load make of traffic that they have not seen, counted by hand."""

from __future__ import annotations

import numpy as np
import pytest

from moewe.moe.wide_ep.balancing.replay import load_of, replay
from moewe.moe.wide_ep.synthetic import zipf
from moewe.moe.wide_ep.traces import RoutingTrace


def by_name(trace: RoutingTrace, **options: object) -> dict[tuple[str, str], object]:
    results = replay(trace, **{"num_redundant": 0, "domains": (0, 0), "row_bytes": 1, **options})  # type: ignore[arg-type]
    return {(each.phase, each.placement): each for each in results}


def test_placement_by_load_is_judged_on_what_it_has_not_seen() -> None:
    ids = np.stack([zipf(8192, 64, 4, seed=seed) for seed in range(2)])
    trace = RoutingTrace(num_experts=64, ids={"decode": ids})
    found = by_name(trace, num_redundant=16, domains=(0, 0, 1, 1), row_bytes=100)
    static, order = found["decode", "static"], found["decode", "in order"]
    assert static.num_tokens == 4096 and static.imbalance.shape == (2,)
    assert static.imbalance.max() < 1.1 < order.imbalance.min()
    assert 0 < static.bytes_between < order.bytes_between
    assert static.bytes_between_hierarchical <= static.bytes_between
    assert set(found) == {("decode", name) for name in ("in order", "off", "static")}


def test_rows_and_bytes_are_those_counted_by_hand() -> None:
    """Four tokens of ranks 0, 1, 0, 1 choose expert 1, which stands on rank 1 of the other domain."""
    ids = np.full((1, 8, 1), 1, np.int32)
    found = by_name(RoutingTrace(num_experts=2, ids={"prefill": ids}), domains=(0, 1), row_bytes=10)
    each = found["prefill", "in order"]
    assert each.imbalance.tolist() == [2.0]  # all rows on one of two ranks
    assert each.bytes_between == each.bytes_between_hierarchical == 10.0  # half of the tokens, there and back
    assert each.num_tokens == 4


def test_loads_are_counts_by_phase() -> None:
    trace = RoutingTrace(num_experts=3, ids={"decode": np.array([[[0, 2], [2, -1]]], np.int32)})
    assert load_of(trace).phases["decode"].tolist() == [[1, 0, 2]]


def test_traces_without_halves_and_too_many_ranks_are_refused() -> None:
    trace = RoutingTrace(num_experts=3, ids={"decode": np.zeros((1, 1, 1), np.int32)})
    with pytest.raises(ValueError, match="less than two tokens"):
        by_name(trace)
    trace = RoutingTrace(num_experts=3, ids={"decode": np.zeros((1, 4, 1), np.int32)})
    with pytest.raises(ValueError, match="more ranks than the model has experts"):
        by_name(trace, domains=(0,) * 4)
