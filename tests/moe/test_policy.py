"""Moves that pay: none on even or fleeting load, a gain on load that stays, never much slower than doing nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moewe.moe.wide_ep.balancing import Move, PhaseLoad, PolicyOptions, choose_moves, expected_imbalance, simulate
from moewe.moe.wide_ep.balancing.load_steps import LoadSteps, total_load
from moewe.moe.wide_ep.placement import expert_load, first_placement, linear_placement
from moewe.moe.wide_ep.synthetic import shifting, uniform, zipf
from moewe.topologies.layer_cost import ExpertSize, LayerCost, TokenRows
from moewe.topologies.machine import HOST_CEILINGS
from tests.support.layer_models import fullest_rank

E, K, W, WINDOW, STEPS = 32, 4, 4, 4096, 64
OPTIONS = PolicyOptions(transfer_s=2e-4, horizon_steps=1000)
PLACEMENT = first_placement(2, E, num_redundant=8, domains=(0, 0, 1, 1))


def window(load: np.ndarray, steps: int = STEPS) -> LoadSteps:
    return (PhaseLoad(load=load, steps=steps),)


def windows(maker, number: int = 12, *, num_experts: int = E, top_k: int = K, **options) -> list[LoadSteps]:
    ids = np.stack([maker(number * WINDOW, num_experts, top_k, seed=seed, **options) for seed in range(2)])
    return [window(expert_load(ids[:, i * WINDOW : (i + 1) * WINDOW], num_experts)) for i in range(number)]


def run(loads: list[LoadSteps], options: PolicyOptions = OPTIONS):
    return simulate(PLACEMENT, loads, model=fullest_rank(PLACEMENT, K), options=options)


def test_uniform_traffic_moves_nothing() -> None:
    cheap = replace(OPTIONS, transfer_s=0.0, horizon_steps=10**9)
    result = run(windows(uniform, 20), cheap)
    assert result.num_moves == 0 and result.seconds == result.off_seconds


def test_load_that_stays_is_balanced_within_bounds() -> None:
    loads = windows(zipf)
    result = run(loads * 4)
    assert result.num_moves > 0 and result.seconds < 0.9 * result.off_seconds
    decision = choose_moves(PLACEMENT, loads[:2], model=fullest_rank(PLACEMENT, K), options=OPTIONS)
    assert 0 < len(decision.moves) <= OPTIONS.max_moves and decision.saved_s > 0
    slots = PLACEMENT.physical_to_logical.copy()
    for move in decision.moves:
        assert slots[move.layer, move.slot] != move.expert
        slots[move.layer, move.slot] = move.expert
    assert (slots == decision.placement.physical_to_logical).all(), "the moves make the placement"
    assert (decision.placement.num_replicas > 0).all(), "every expert stands somewhere"
    before, after = (expected_imbalance(one, total_load(loads[1])).mean() for one in (PLACEMENT, decision.placement))
    assert after < before


def test_tables_of_layers_that_keep_their_experts_stay() -> None:
    loads = [window(phase.load * np.array([[1], [0]])) for (phase,) in windows(zipf, 2)]
    after = choose_moves(PLACEMENT, loads, model=fullest_rank(PLACEMENT, K), options=OPTIONS).placement
    assert (after.slot_of[1] == PLACEMENT.slot_of[1]).all() and (after.slot_of[0] != PLACEMENT.slot_of[0]).any()
    assert (after.physical_to_logical[1] == PLACEMENT.physical_to_logical[1]).all()
    held = np.take_along_axis(after.physical_to_logical[:, None], after.slot_of, 2)
    assert (held == np.arange(E)).all(), "every table leads to a slot with the expert"


@pytest.mark.parametrize("period", [pytest.param(WINDOW // 2, marks=pytest.mark.slow), WINDOW * 5])
def test_a_hot_set_that_shifts_never_costs_more_than_two_percent(period: int) -> None:
    result = run(windows(shifting, period=period) * 3)
    assert result.seconds <= 1.02 * result.off_seconds


def test_a_second_that_is_never_won_back_moves_nothing() -> None:
    assert run(windows(zipf, 6), replace(OPTIONS, transfer_s=1.0)).num_moves == 0


def test_moves_need_both_windows_a_horizon_and_a_budget() -> None:
    hot, cold = np.ones((2, 2, E))
    for load, rank in ((hot, 0), (cold, 1)):  # hot are the experts that stand on one rank alone
        held = PLACEMENT.local_experts(rank)
        load[:, held[PLACEMENT.num_replicas[0, held] == 1]] = 4000

    def moves(*loads: np.ndarray, budget_s: float = np.inf, **options) -> tuple[Move, ...]:
        chosen, given = replace(OPTIONS, **options), [window(load) for load in loads]
        return choose_moves(PLACEMENT, given, model=fullest_rank(PLACEMENT, K), options=chosen, budget_s=budget_s).moves

    assert moves(hot, hot)
    assert moves(hot, hot) == moves(hot, hot), "the same decision each time"
    assert not moves(cold, hot)
    assert moves(hot, hot, transfer_s=1e-3)
    assert not moves(hot, hot, transfer_s=1e-3, horizon_steps=1)
    assert not moves(hot, hot, budget_s=0.0)
    assert len(moves(hot, hot, max_moves=1)) <= 1


def test_each_turn_looks_at_other_layers() -> None:
    layers = 5
    placement = first_placement(layers, E, num_redundant=8, domains=(0, 0, 1, 1))
    load = np.repeat(windows(zipf, 1)[0][0].load[:1], layers, axis=0)
    one = replace(OPTIONS, max_layers=1)
    looked_at = {
        move.layer
        for turn in range(layers)
        for move in choose_moves(
            placement, [window(load)] * 2, model=fullest_rank(placement, K), options=one, turn=turn
        ).moves
    }
    assert looked_at == set(range(layers))


def test_a_single_swap_is_found() -> None:
    """Two hot experts on one rank, two cold ones on the other: one of each changes places."""
    load = window(np.array([[100.0, 100.0, 1.0, 1.0]]) * 100, 1)
    placement = linear_placement(1, 4, 2)
    decision = choose_moves(placement, [load, load], model=fullest_rank(placement, K), options=OPTIONS)
    ranks = [sorted(decision.placement.local_experts(rank).tolist()) for rank in (0, 1)]
    assert all(len(set(held) & {0, 1}) == 1 for held in ranks), ranks
    assert len(decision.moves) == 2 and decision.transfer_s == 2 * OPTIONS.transfer_s


def test_decode_steps_bound_by_weights_are_not_balanced_by_rows() -> None:
    """Two rows a step: whatever stands where, each of them reads its expert; many rows: the fullest rank computes."""
    placement = linear_placement(1, 8, 2)
    size = ExpertSize(expert_bytes=1 << 20, row_bytes=64, flops=1e6)
    model = LayerCost(size, HOST_CEILINGS, placement.slot_ranges, (0, 0), token=TokenRows(top_k=1))
    load = np.array([[4000, 4000, 4000, 4000, 1, 1, 1, 1]])
    options = PolicyOptions(transfer_s=0.0, horizon_steps=1, hysteresis=0.0)

    def saved(steps: int) -> float:
        return choose_moves(placement, [window(load, steps)] * 2, model=model, options=options).saved_s

    assert saved(steps=10) > 100 * saved(steps=100_000)


def test_one_window_is_not_enough() -> None:
    with pytest.raises(ValueError, match="at least 2 windows"):
        choose_moves(PLACEMENT, [window(np.ones((2, E)))], model=fullest_rank(PLACEMENT, K), options=OPTIONS)
