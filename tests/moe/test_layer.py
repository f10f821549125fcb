"""The MoE layer against a global view of all ranks, its counters, and its refusal of experts that nobody holds."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from moewe.moe.activation import SILU, Activation
from moewe.moe.experts import grouped_ffn
from moewe.moe.gated import ExpertWeights
from moewe.moe.layer import MoELayer
from moewe.moe.layer_counts import PassCounts
from moewe.moe.reference import grouped_ffn_reference
from moewe.moe.routing import RoutingConfig
from moewe.moe.routing.reference import route_reference
from moewe.moe.wide_ep import Exchange, ExpertPlacement, LocalExchange, linear_placement
from moewe.moe.wide_ep.exchanges.reference import combine_reference, dispatch_reference
from moewe.telemetry import COMPONENTS, ProgressBoard, RankCounters
from tests.support.numerics import assert_near, assert_same
from tests.support.ranks import run_ranks

NUM_EXPERTS, WIDTH, FFN_WIDTH, TOP_K = 6, 32, 16, 3
ROUTING = RoutingConfig(num_experts=NUM_EXPERTS, top_k=TOP_K, scoring="sigmoid", renormalize=True, scaling_factor=1.5)


@dataclass
class FFN:
    w13: torch.Tensor
    w2: torch.Tensor
    b13: torch.Tensor | None = None
    b2: torch.Tensor | None = None


@dataclass
class Weights:
    router: torch.Tensor
    experts: ExpertWeights
    router_bias: torch.Tensor | None = None
    selection_bias: torch.Tensor | None = None
    shared: FFN | None = None
    shared_gate: torch.Tensor | None = None


@dataclass(frozen=True)
class Switches:
    routing: RoutingConfig = ROUTING
    activation: Activation = SILU
    weigh_input: bool = False


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
    held = {name: None if t is None else t[local] for name, t in vars(weights.experts).items()}
    return replace(weights, experts=ExpertWeights(**held))


def layer(
    weights: Weights,
    placement: ExpertPlacement,
    rank: int,
    exchange: Exchange,
    board: ProgressBoard | None = None,
    switches: Switches = Switches(),
) -> tuple[MoELayer, RankCounters]:
    counters = RankCounters(1, placement.num_local_slots(rank))
    made = MoELayer(
        switches,
        on_rank(weights, placement, rank),
        placement=placement,
        moe_layer=1,
        rank=rank,
        exchange=exchange,
        counters=counters,
    )
    made.progress = board.rank(rank) if board else None
    return made, counters


def expected(weights: Weights, inputs: list[torch.Tensor], switches: Switches = Switches()) -> list[torch.Tensor]:
    """The whole layer from above, as if one rank owned all slots."""
    x = torch.cat(inputs)
    logits = x @ weights.router.T + (0 if weights.router_bias is None else weights.router_bias)
    routing = route_reference(logits, switches.routing, weights.selection_bias)
    sent, topk_weights = x, routing.topk_weights
    if switches.weigh_input:
        sent, topk_weights = x * topk_weights, torch.ones_like(topk_weights)
    arrived = dispatch_reference([sent], [routing.topk_ids], ((0, NUM_EXPERTS),))
    tokens_per_slot = arrived[0].tokens_per_slot
    rows = grouped_ffn_reference(arrived[0].rows_MD, tokens_per_slot, weights.experts, switches.activation)
    total = combine_reference([rows], [topk_weights], arrived)[0]
    if weights.shared is not None:
        stack = {name: None if t is None else t[None] for name, t in vars(weights.shared).items()}
        shared = grouped_ffn_reference(x, torch.tensor([len(x)]), ExpertWeights(**stack))
        gate = weights.shared_gate
        total = total + (shared if gate is None else shared * torch.sigmoid(x @ gate.T))
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
        output = made(inputs[rank])
        counts = PassCounts([made])
        counts.add(counters, counts.left(), num_rows=len(inputs[rank]))
        return output, counters

    results = run_ranks(placement.slot_ranges, work)
    for (actual, _), wanted in zip(results, expected(weights, inputs)):
        assert_near(actual, wanted, format="float32")
    routed = route_reference(torch.cat(inputs) @ weights.router.T, ROUTING, weights.selection_bias).topk_ids
    per_expert = np.concatenate([counters.expert_tokens[0] for _, counters in results])
    assert per_expert.tolist() == torch.bincount(routed.flatten(), minlength=NUM_EXPERTS).tolist()
    for (_, counters), length in zip(results, lengths):
        hits = int((counters.expert_tokens[0] > 0).sum())
        moved = dict(zip(COMPONENTS, counters.bytes_moved.sum(0).tolist()))
        assert moved["routed"] == hits * 3 * WIDTH * FFN_WIDTH * 4
        assert moved["dense"] == (length > 0) * 4 * NUM_EXPERTS * (WIDTH + 1)
        assert moved["shared"] == (length > 0 and shared) * 4 * (6 * WIDTH * FFN_WIDTH + WIDTH)
        flops = dict(zip(COMPONENTS, counters.flops.sum(0).tolist()))
        assert flops["routed"] == counters.expert_tokens.sum() * 2 * 3 * WIDTH * FFN_WIDTH
        assert flops["dense"] == length * 2 * NUM_EXPERTS * WIDTH
        assert flops["shared"] == shared * length * 2 * (6 * WIDTH * FFN_WIDTH + WIDTH)
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


@pytest.mark.slow
def test_without_debug_a_chosen_expert_without_owner_is_counted() -> None:  # P-EP-03
    code = (
        "import torch; from tests.moe.test_layer import *;"
        "weights = all_weights(); weights.selection_bias = torch.tensor([0.0, 0, 9, 0, 0, 0]);"
        "made, counters = layer(weights, broken_placement(), 0, LocalExchange(6));"
        "out = made(torch.randn(4, WIDTH)); counts = PassCounts([made]);"
        "counts.add(counters, counts.left(), num_rows=4);"
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


ONE_EXPERT = RoutingConfig(num_experts=NUM_EXPERTS, top_k=1, scoring="sigmoid", renormalize=False)


@pytest.mark.parametrize("shared", ["none", "plain", "gated", "biased"])
@pytest.mark.parametrize("switches", [
    Switches(), Switches(activation=Activation(kind="clamped", limit=0.5)), Switches(ONE_EXPERT, weigh_input=True),
], ids=["silu", "clamped", "weigh_input"])  # fmt: skip
def test_every_switch_equals_the_global_view(shared: str, switches: Switches) -> None:
    """Biases of router and experts, with every kind of shared experts, on two ranks."""
    weights = all_weights(shared=shared != "none")
    weights.router_bias = torch.randn(NUM_EXPERTS)
    weights.experts.b13, weights.experts.b2 = torch.randn(NUM_EXPERTS, 2 * FFN_WIDTH), torch.randn(NUM_EXPERTS, WIDTH)
    if shared in ("plain", "biased"):
        weights.shared_gate = None
    if shared == "biased" and weights.shared is not None:
        weights.shared.b13, weights.shared.b2 = torch.randn(4 * FFN_WIDTH), torch.randn(WIDTH)
    inputs = [torch.randn(7, WIDTH), torch.randn(3, WIDTH)]
    placement = linear_placement(2, NUM_EXPERTS, 2)

    def work(rank: int, exchange: Exchange) -> torch.Tensor:
        return layer(weights, placement, rank, exchange, switches=switches)[0](inputs[rank])

    for actual, wanted in zip(run_ranks(placement.slot_ranges, work), expected(weights, inputs, switches)):
        assert_near(actual, wanted, format="float32")


def test_a_row_that_is_weighed_first_is_rounded_to_the_activations_format() -> None:
    """bf16: what goes into the only expert is x times the rounded score."""
    weights = all_weights()
    weights.experts = ExpertWeights(w13=weights.experts.w13.bfloat16(), w2=weights.experts.w2.bfloat16())
    weights.selection_bias = None
    made, _ = layer(weights, linear_placement(2, NUM_EXPERTS, 1), 0, LocalExchange(NUM_EXPERTS),
                    switches=Switches(ONE_EXPERT, weigh_input=True))  # fmt: skip
    x = torch.randn(5, WIDTH).bfloat16()
    scores, chosen = (x.float() @ weights.router.T).sigmoid().max(-1)
    order = chosen.argsort(stable=True)
    counts = torch.bincount(chosen, minlength=NUM_EXPERTS)
    rows = grouped_ffn((x * scores.bfloat16()[:, None])[order], counts, weights.experts)
    assert_same(made(x)[order], rows)


def test_a_row_that_is_weighed_first_goes_to_one_expert() -> None:
    with pytest.raises(AssertionError, match="one expert"):
        layer(all_weights(), linear_placement(2, NUM_EXPERTS, 1), 0, LocalExchange(NUM_EXPERTS),
              switches=Switches(weigh_input=True))  # fmt: skip
