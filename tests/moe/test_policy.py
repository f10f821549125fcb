"""Moves that pay: none on even or fleeting load, a gain on load that stays, never much slower than doing nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moewe.moe.wide_ep.balancing.expected import expected_imbalance
from moewe.moe.wide_ep.balancing.policy import Move, PolicyOptions, choose_moves, simulate
from moewe.moe.wide_ep.placement import expert_load, first_placement, linear_placement
from moewe.moe.wide_ep.synthetic import shifting, uniform, zipf

E, K, W, WINDOW, STEPS = 32, 4, 4, 4096, 64
OPTIONS = PolicyOptions(within_s=2e-5, between_s=2e-4, horizon_steps=1000)
PLACEMENT = first_placement(2, E, num_redundant=8, domains=(0, 0, 1, 1))


def layer_time(rows: np.ndarray) -> float:
    """A layer waits for its fullest rank: 20 us, and 1 us a row."""
    return 20e-6 + 1e-6 * float(rows.max())


def windows(maker, number: int = 12, **options) -> list[np.ndarray]:
    ids = np.stack([maker(number * WINDOW, E, K, seed=seed, **options) for seed in range(2)])
    return [expert_load(ids[:, i * WINDOW : (i + 1) * WINDOW], E) for i in range(number)]


def run(loads: list[np.ndarray], options: PolicyOptions = OPTIONS):
    return simulate(PLACEMENT, loads, steps=STEPS, layer_time=layer_time, options=options)


def test_uniform_traffic_moves_nothing() -> None:
    cheap = replace(OPTIONS, within_s=0.0, between_s=0.0, horizon_steps=10**9)
    result = run(windows(uniform, 20), cheap)
    assert result.num_moves == 0 and result.seconds == result.off_seconds


def test_load_that_stays_is_balanced_within_bounds() -> None:
    loads = windows(zipf)
    result = run(loads)
    assert result.num_moves > 0 and result.seconds < 0.9 * result.off_seconds
    decision = choose_moves(PLACEMENT, loads[:2], steps=STEPS, layer_time=layer_time, options=OPTIONS)
    assert 0 < len(decision.moves) <= OPTIONS.max_moves and decision.saved_s > 0
    slots = PLACEMENT.physical_to_logical.copy()
    for move in decision.moves:
        assert slots[move.layer, move.slot] != slots[move.layer, move.source]
    changed = (slots != decision.placement.physical_to_logical).sum()
    assert 0 < changed <= len(decision.moves)
    assert (decision.placement.num_replicas > 0).all(), "every expert stands somewhere"
    before, after = (expected_imbalance(one, loads[1]).mean() for one in (PLACEMENT, decision.placement))
    assert after < before


@pytest.mark.parametrize("period", [WINDOW // 2, WINDOW * 3 // 2, WINDOW * 2, WINDOW * 3, WINDOW * 6])
def test_a_hot_set_that_shifts_never_costs_more_than_two_percent(period: int) -> None:
    result = run(windows(shifting, period=period))
    assert result.seconds <= 1.02 * result.off_seconds


@pytest.mark.parametrize("maker", [uniform, zipf])
@pytest.mark.parametrize("transfer", [1e-6, 1e-4, 1.0])
def test_no_trace_is_more_than_two_percent_slower(maker, transfer: float) -> None:
    result = run(windows(maker, 6), replace(OPTIONS, within_s=transfer, between_s=10 * transfer))
    assert result.seconds <= 1.02 * result.off_seconds
    if transfer == 1.0:
        assert result.num_moves == 0, "a second is never won back"


def test_moves_need_both_windows_a_horizon_and_a_budget() -> None:
    hot, cold = np.ones((2, 2, E))
    for load, rank in ((hot, 0), (cold, 1)):  # hot are the experts that stand on one rank alone
        held = PLACEMENT.local_experts(rank)
        load[:, held[PLACEMENT.num_replicas[0, held] == 1]] = 4000

    def moves(*loads: np.ndarray, budget_s: float = np.inf, **options) -> tuple[Move, ...]:
        chosen = replace(OPTIONS, **options)
        return choose_moves(
            PLACEMENT, loads, steps=STEPS, layer_time=layer_time, options=chosen, budget_s=budget_s
        ).moves

    assert moves(hot, hot)
    assert moves(hot, hot) == moves(hot, hot), "the same decision each time"
    assert not moves(cold, hot)
    assert moves(hot, hot, within_s=1e-3, between_s=1e-3)
    assert not moves(hot, hot, within_s=1e-3, between_s=1e-3, horizon_steps=1)
    assert not moves(hot, hot, budget_s=0.0)
    assert len(moves(hot, hot, max_moves=1)) <= 1


def test_a_single_swap_is_found() -> None:
    """Two hot experts on one rank, two cold ones on the other: one of each changes places."""
    load = np.array([[100.0, 100.0, 1.0, 1.0]]) * 100
    decision = choose_moves(linear_placement(1, 4, 2), [load, load], steps=1, layer_time=layer_time, options=OPTIONS)
    ranks = [sorted(decision.placement.local_experts(rank).tolist()) for rank in (0, 1)]
    assert all(len(set(held) & {0, 1}) == 1 for held in ranks), ranks
    assert len(decision.moves) == 2 and decision.transfer_s == 2 * OPTIONS.within_s


def test_one_window_is_not_enough() -> None:
    with pytest.raises(ValueError, match="at least 2 windows"):
        choose_moves(PLACEMENT, [np.ones((2, E))], steps=1, layer_time=layer_time, options=OPTIONS)
