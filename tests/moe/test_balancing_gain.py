"""Live balancing played through on routing of 256 experts, cost of moves included: even where it pays, never slow."""

from __future__ import annotations

import numpy as np
import pytest

from moewe.moe.wide_ep.balancing import LoadSteps, PhaseLoad, PolicyOptions, expected_imbalance, simulate
from moewe.moe.wide_ep.balancing.load_steps import total_load
from moewe.moe.wide_ep.placement import expert_load, first_placement
from moewe.moe.wide_ep.synthetic import zipf
from moewe.topologies.layer_cost import ExpertSize, LayerCost, TokenRows
from moewe.topologies.machine import HOST_CEILINGS

E, K, W, WINDOW = 256, 8, 8, 4096
PLACEMENT = first_placement(1, E, num_redundant=E // 4, domains=(0,) * W)
# An expert of 4096 x 1536 in bf16 on an eighth of a host, where 4096 tokens a step are bound by arithmetic.
SIZE = ExpertSize(expert_bytes=6 * 4096 * 1536, row_bytes=8192, flops=6 * 4096 * 1536)
MODEL = LayerCost(SIZE, HOST_CEILINGS, PLACEMENT.slot_ranges, (0,) * W, token=TokenRows(top_k=K))


def trace(maker, number: int, *, steps: int = 1, seed: int = 0, **options) -> list[LoadSteps]:
    ids = maker(number * WINDOW, E, K, seed=seed, **options)[None]
    loads = [expert_load(ids[:, i * WINDOW : (i + 1) * WINDOW], E) for i in range(number)]
    return [(PhaseLoad(load=load, steps=steps),) for load in loads]


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_zipf_traffic_at_ep8_becomes_even(seed: int) -> None:
    windows = trace(zipf, 9, seed=seed)
    result = simulate(
        PLACEMENT, windows[:-1] * 5, model=MODEL, options=PolicyOptions(transfer_s=0.004, horizon_steps=100)
    )
    unseen = total_load(windows[-1])
    before, after = (float(expected_imbalance(one, unseen).mean()) for one in (PLACEMENT, result.placement))
    assert before > 1.5 and after <= 1.15, (before, after)
    assert result.seconds < result.off_seconds, "what moves cost is won back within the trace"


def test_an_even_load_is_worth_nothing_where_weights_bind() -> None:
    """Few rows a step: the fullest rank reads no more experts than others, so nothing is gained, and little moves."""
    few = trace(zipf, 6, steps=512)
    result = simulate(PLACEMENT, few, model=MODEL, options=PolicyOptions(transfer_s=0.04, horizon_steps=10))
    assert np.isclose(result.seconds, result.off_seconds, rtol=0.01)
