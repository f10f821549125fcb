"""The MoE layer against a global view of all ranks, its counters, and its refusal of experts that nobody holds."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from moewe.moe.experts import ExpertWeights
from moewe.moe.layer import MoELayer
from moewe.moe.reference import combine_reference, dispatch_reference, grouped_ffn_reference
from moewe.moe.routing import RoutingConfig
from moewe.moe.routing.reference import route_reference
from moewe.moe.wide_ep import Exchange, ExpertPlacement, LocalExchange, linear_placement
from moewe.telemetry import COMPONENTS, ProgressBoard, RankCounters
from tests.support.numerics import assert_near
from tests.support.ranks import run_ranks

NUM_EXPERTS, WIDTH, FFN_WIDTH, TOP_K = 6, 32, 16, 3
ROUTING = RoutingConfig(num_experts=NUM_EXPERTS, top_k=TOP_K, scoring="sigmoid", renormalize=True, scaling_factor=1.5)


@dataclass
class FFN:
    w13: torch.Tensor
    w2: torch.Tensor


@dataclass
class Weights:
    router: torch.Tensor
    experts: ExpertWeights
    selection_bias: torch.Tensor | None = None
    shared: FFN | None = None
    shared_gate: torch.Tensor | None = None


def all_weights(*, shared: bool = False) -> Weights:
    torch.manual_seed(0)
    ffn = FFN(torch.randn(4 * FFN_WIDTH, WIDTH) / 6, torch.randn(WIDTH, 2 * FFN_WIDTH) / 6)
    return Weights(
        router=torch.randn(NUM_EXPERTS, WIDTH),
        experts=ExpertWeights(
            w13=torch.randn(NUM_EXPERTS, 2 * FFN_WIDTH, WIDTH) / 6, w2=torch.randn(NUM_EXPERTS, WIDTH, FFN_WIDTH) / 4
        ),
        selection_bias=torch.randn(NUM_EXPERTS),
        shared=ffn if shared else None,
        shared_gate=torch.randn(1, WIDTH) if shared else None,
    )


def on_rank(weights: Weights, placement: ExpertPlacement, rank: int) -> Weights:
    local = torch.from_numpy(placement.local_experts(rank)).long()
    experts = ExpertWeights(w13=weights.experts.w13[local], w2=weights.experts.w2[local])
    return Weights(weights.router, experts, weights.selection_bias, weights.shared, weights.shared_gate)


def layer(
    weights: Weights, placement: ExpertPlacement, rank: int, exchange: Exchange, board: ProgressBoard | None = None
) -> tuple[MoELayer, RankCounters]:
    counters = RankCounters(2, placement.num_local_slots(rank))
    made = MoELayer(
        ROUTING,
        on_rank(weights, placement, rank),
        placement=placement,
        moe_layer=1,
        rank=rank,
        exchange=exchange,
        counters=counters,
        progress=board.rank(rank) if board else None,
    )
    return made, counters


def expected(weights: Weights, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The whole layer from above, as if one rank owned all slots."""
    x = torch.cat(inputs)
    routing = route_reference(x @ weights.router.T, ROUTING, weights.selection_bias)
    arrived = dispatch_reference([x], [routing.topk_ids], ((0, NUM_EXPERTS),))
    rows = grouped_ffn_reference(arrived[0].rows_MD, arrived[0].tokens_per_slot, weights.experts)
    total = combine_reference([rows], [routing.topk_weights], arrived)[0]
    if weights.shared is not None and weights.shared_gate is not None:
        gate, up = (x @ weights.shared.w13.T).chunk(2, -1)
        shared = (torch.nn.functional.silu(gate) * up) @ weights.shared.w2.T
        total = total + shared * torch.sigmoid(x @ weights.shared_gate.T)
    return list(total.split([len(rows) for rows in inputs]))


@pytest.mark.parametrize("lengths", [(9,), (9, 4), (0, 7), (5, 0, 1, 2), (0, 0)], ids=str)
@pytest.mark.parametrize("shared", [False, True])
def test_layer_equals_the_global_view(lengths: tuple[int, ...], shared: bool) -> None:
    weights = all_weights(shared=shared)
    inputs = [torch.randn(length, WIDTH) for length in lengths]
    placement = linear_placement(2, NUM_EXPERTS, len(lengths))
    board = ProgressBoard(len(lengths))

    def work(rank: int, exchange: Exchange) -> tuple[torch.Tensor, RankCounters]:
        made, counters = layer(weights, placement, rank, exchange, board)
        return made(inputs[rank]), counters

    results = run_ranks(placement.slot_ranges, work)
    for (actual, _), wanted in zip(results, expected(weights, inputs)):
        assert_near(actual, wanted, format="float32")
    routed = route_reference(torch.cat(inputs) @ weights.router.T, ROUTING, weights.selection_bias).topk_ids
    per_expert = np.concatenate([counters.expert_tokens[1] for _, counters in results])
    assert per_expert.tolist() == torch.bincount(routed.flatten(), minlength=NUM_EXPERTS).tolist()
    assert all(not counters.expert_tokens[0].any() for _, counters in results)
    for _, counters in results:
        hits = int((counters.expert_tokens[1] > 0).sum())
        moved = dict(zip(COMPONENTS, counters.bytes_moved.sum(0).tolist()))
        assert moved["routed"] == hits * 3 * WIDTH * FFN_WIDTH * 4
    assert (board.snapshot()[:, 1] == 4).all()  # before and after each of the two collectives


def broken_placement() -> ExpertPlacement:
    """Expert 2 has no owner: slot 2 holds expert 0 a second time."""
    logical_to_physical = np.array([[[0, 2], [1, -1], [-1, -1], [3, -1], [4, -1], [5, -1]]] * 2, np.int32)
    return ExpertPlacement(
        physical_to_logical=np.array([[0, 1, 0, 3, 4, 5]] * 2, np.int32),
        logical_to_physical=logical_to_physical,
        num_replicas=(logical_to_physical >= 0).sum(-1).astype(np.int32),
        slot_ranges=((0, 6),),
    )


def test_a_chosen_expert_without_owner_is_a_hard_error() -> None:  # P-EP-03
    weights = all_weights()
    weights.selection_bias = torch.tensor([0.0, 0, 9, 0, 0, 0])
    made, _ = layer(weights, broken_placement(), 0, LocalExchange(6))
    with pytest.raises(RuntimeError, match=r"MoE layer 1: experts \[2\] were chosen, but no rank holds them"):
        made(torch.randn(4, WIDTH))


def test_without_debug_a_chosen_expert_without_owner_is_counted() -> None:  # P-EP-03
    code = (
        "import torch; from tests.moe.test_layer import *;"
        "weights = all_weights(); weights.selection_bias = torch.tensor([0.0, 0, 9, 0, 0, 0]);"
        "made, counters = layer(weights, broken_placement(), 0, LocalExchange(6));"
        "out = made(torch.randn(4, WIDTH));"
        "ok = counters.unowned_ids == 4 and counters.expert_tokens.sum() == 8 and bool(out.isfinite().all());"
        "sys.exit(not ok)"
    )
    subprocess.run([sys.executable, "-O", "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_an_expert_without_owner_that_nobody_chose_does_no_harm() -> None:
    weights = all_weights()
    weights.selection_bias = torch.tensor([0.0, 0, -9, 0, 0, 0])
    made, counters = layer(weights, broken_placement(), 0, LocalExchange(6))
    x = torch.randn(4, WIDTH)
    assert_near(made(x), expected(weights, [x])[0], format="float32")
    assert counters.unowned_ids == 0


def test_replicas_give_the_same_answer() -> None:
    """Two ranks with four slots each; experts 0 and 5 stand on both."""
    weights = all_weights()
    logical_to_physical = np.array([[[0, 4], [1, -1], [2, -1], [5, -1], [6, -1], [3, 7]]] * 2, np.int32)
    placement = ExpertPlacement(
        physical_to_logical=np.array([[0, 1, 2, 5, 0, 3, 4, 5]] * 2, np.int32),
        logical_to_physical=logical_to_physical,
        num_replicas=(logical_to_physical >= 0).sum(-1).astype(np.int32),
        slot_ranges=((0, 4), (4, 8)),
    )
    inputs = [torch.randn(5, WIDTH), torch.randn(8, WIDTH)]

    def work(rank: int, exchange: Exchange) -> torch.Tensor:
        return layer(weights, placement, rank, exchange)[0](inputs[rank])

    for actual, wanted in zip(run_ranks(placement.slot_ranges, work), expected(weights, inputs)):
        assert_near(actual, wanted, format="float32")
