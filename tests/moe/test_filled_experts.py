"""Experts over a room of which nobody knows on the host how much is filled, and the padded layer around them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moewe.moe.activation import SILU, Activation
from moewe.moe.experts import filled_ffn, grouped_ffn
from moewe.moe.gated import ExpertWeights
from moewe.moe.layer import MoELayer
from moewe.moe.reference import grouped_ffn_reference
from moewe.moe.wide_ep import linear_placement
from moewe.moe.wide_ep.exchanges import GroupShape, StepwiseExchange
from moewe.moe.wide_ep.exchanges.joining import join_over_links
from moewe.quant import FP8_BLOCK
from moewe.telemetry import RankCounters
from moewe.topologies.overlap_choice import HALVES, NOTHING, SHARED
from tests.moe.exchanges.test_padded import EmptyLink
from tests.moe.test_experts import CLAMPED, COUNTS, FORMATS, experts, quantised, with_biases
from tests.moe.test_layer import FFN, FFN_WIDTH, NUM_EXPERTS, WIDTH, Switches, Weights, all_weights
from tests.support.numerics import assert_near
from tests.support.pairwise import each_pair

VOID = 7


@each_pair(
    counts=COUNTS,
    number_format=FORMATS.keys(),
    shape=[(64, 48), (40, 17)],
    activation={"silu": SILU, "clamped": CLAMPED},
)
def test_what_is_filled_equals_reference(
    counts: list[int], number_format: str, shape: tuple[int, int], activation: Activation
) -> None:
    """With and without a grouped product; biases; what is void is NaN and stays by itself."""
    dtype = FORMATS[number_format]
    weights = with_biases(experts(len(counts), *shape, dtype))
    assert weights.has_grouped_product_on_device == (dtype == torch.bfloat16 and shape == (64, 48))
    tokens_per_slot, num_rows = torch.tensor(counts), sum(counts)
    rows = torch.full((num_rows + VOID, shape[0]), torch.nan, dtype=dtype)
    rows[:num_rows] = torch.randn(num_rows, shape[0], generator=torch.Generator().manual_seed(1)).to(dtype)
    actual = filled_ffn(rows, tokens_per_slot, weights, activation)
    assert actual.shape == rows.shape and actual.dtype == dtype
    expected = grouped_ffn_reference(rows[:num_rows], tokens_per_slot, weights, activation)
    assert_near(actual[:num_rows], expected, format=number_format)


@pytest.mark.parametrize("kind", [FP8_BLOCK, "mxfp4"])
def test_stored_matrices_give_what_grouped_ones_give(kind: str) -> None:
    weights = ExpertWeights(w13=quantised(3, 64, 64, kind, (32, 32)), w2=quantised(3, 64, 32, kind, (64,)))
    assert not weights.has_grouped_product_on_device
    counts, rows = torch.tensor([2, 0, 3]), torch.randn(9, 64)
    assert_near(filled_ffn(rows, counts, weights)[:5], grouped_ffn(rows[:5], counts, weights), format="float32")


def test_without_slots_nothing_is_computed() -> None:
    none = experts(0, 16, 8, torch.float32)
    assert filled_ffn(torch.ones(4, 16), torch.empty(0, dtype=torch.int64), none).shape == (4, 16)


def on_meta(dtype: torch.dtype) -> Weights:
    """What rank 1 of three holds, without values: nobody can look at one."""
    whole = all_weights(shared=True)
    start, stop = linear_placement(2, NUM_EXPERTS, 3).slot_ranges[1]

    def bare(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.to("meta", dtype)

    shared = whole.shared
    assert shared is not None
    return replace(
        whole,
        router=whole.router.to("meta"),
        selection_bias=whole.selection_bias.to("meta") if whole.selection_bias is not None else None,
        experts=ExpertWeights(
            w13=whole.experts.w13[start:stop].to("meta", dtype),
            w2=whole.experts.w2[start:stop].to("meta", dtype),
            b13=torch.zeros(stop - start, 2 * FFN_WIDTH, device="meta", dtype=dtype),
            b2=torch.zeros(stop - start, WIDTH, device="meta", dtype=dtype),
        ),
        shared=FFN(shared.w13.to("meta", dtype), shared.w2.to("meta", dtype)),
        shared_gate=bare(whole.shared_gate),
    )


def meta_layer(name: str, dtype: torch.dtype) -> tuple[MoELayer, StepwiseExchange]:
    placement = linear_placement(2, NUM_EXPERTS, 3)
    shape = GroupShape(slot_ranges=placement.slot_ranges)
    exchange = StepwiseExchange([join_over_links(name, shape, 1, lambda ranks: EmptyLink())])
    layer = MoELayer(
        Switches(), on_meta(dtype), placement=placement, moe_layer=1, rank=1, exchange=exchange,
        counters=RankCounters(1, placement.num_local_slots(1)),
    )  # fmt: skip
    return layer, exchange


@pytest.mark.parametrize("overlap", [NOTHING, SHARED, HALVES])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_no_value_of_a_padded_layer_comes_to_the_host(dtype: torch.dtype, overlap: str) -> None:
    """Router, replicas, exchange, experts, shared experts: meta tensors have no value that one could wait for."""
    layer, exchange = meta_layer("padded", dtype)
    for num_tokens in (0, 1, 5, 8):
        exchange.begin_step("padded", 8)
        out = layer(torch.zeros(num_tokens, WIDTH, device="meta", dtype=dtype), overlap)
        assert out.shape == (num_tokens, WIDTH) and out.dtype == dtype
        assert layer.tokens_per_slot.device.type == layer.read_again.device.type == "meta"


@pytest.mark.parametrize("overlap", [NOTHING, HALVES])
def test_a_layer_of_variable_sizes_does_look(overlap: str) -> None:
    """The test above can fail."""
    layer, _ = meta_layer("all_to_all", torch.float32)
    with pytest.raises((RuntimeError, NotImplementedError)):
        layer(torch.zeros(4, WIDTH, device="meta"), overlap)
