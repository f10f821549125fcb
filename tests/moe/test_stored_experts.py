"""Experts in MXFP4 and fp8 as checkpoints store them: near the reference, and the bits of their numbers in bf16."""

from __future__ import annotations

import pytest
import torch

from moewe.moe.activation import SILU, Activation
from moewe.moe.experts import gated_ffn, grouped_ffn
from moewe.moe.gated import ExpertWeights
from moewe.moe.native_experts import native_ffn_combine
from moewe.moe.reference import grouped_ffn_reference
from moewe.quant import MXFP4, PackedTensor, QuantScheme, QuantTensor, pack
from moewe.quant.pack_codes import pack_codes
from tests.support.cases import RoutingCase, routing_cases
from tests.support.native import needs_native, team_of
from tests.support.numerics import assert_near, assert_same
from tests.support.pairwise import each_pair
from tests.support.routed import routed
from tests.support.stored import NAMED, SCHEMES, schemes, stored

pytestmark = needs_native

CLAMPED = Activation(kind="clamped", alpha=1.5, limit=0.75)
COUNTS = {
    "all_used": [3, 1, 4, 1],
    "some_empty": [0, 5, 0, 2],
    "one_gets_all": [0, 0, 101, 0],
    "whole_and_begun_tiles": [16, 17, 32, 33],
    "one_row": [0, 0, 0, 1],
    "nothing": [0, 0, 0, 0],
}
# (D, F); MXFP4 is stored in whole blocks of 32 inputs.
SHAPES = [(64, 64), (640, 192), (192, 96), (96, 33), (40, 17), (16, 1)]


def experts(num_slots: int, shape: tuple[int, int], scheme: QuantScheme) -> ExpertWeights:
    """Experts as loading leaves them, before they are packed."""
    width, ffn_width = (-(-size // 32) * 32 if scheme.kind == MXFP4 else size for size in shape)
    generator = torch.Generator().manual_seed(0)

    def bias(size: int) -> torch.Tensor:
        return torch.randn(num_slots, size, generator=generator).to(torch.bfloat16)

    return ExpertWeights(
        w13=stored(scheme, num_slots, 2 * ffn_width, width, sections=2),
        w2=stored(scheme, num_slots, width, ffn_width, seed=1),
        b13=bias(2 * ffn_width),
        b2=bias(width),
    )


def packed(weights: ExpertWeights) -> ExpertWeights:
    assert isinstance(weights.w13, QuantTensor) and isinstance(weights.w2, QuantTensor)
    w13, w2 = pack_codes(weights.w13, gate_up=True), pack_codes(weights.w2)
    return ExpertWeights(w13=w13, w2=w2, b13=weights.b13, b2=weights.b2)


def in_bf16(weights: ExpertWeights) -> ExpertWeights:
    """The same numbers in packed bf16."""
    assert isinstance(weights.w13, QuantTensor) and isinstance(weights.w2, QuantTensor)
    w13, w2 = (w.dequantize(torch.bfloat16) for w in (weights.w13, weights.w2))
    return ExpertWeights(w13=pack(w13, gate_up=True), w2=pack(w2), b13=weights.b13, b2=weights.b2)


def rows_of(number: int, width: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(number, width, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


@each_pair(counts=COUNTS, shape=SHAPES, scheme=NAMED)
def test_experts_equal_the_reference(counts: list[int], shape: tuple[int, int], scheme: QuantScheme) -> None:
    weights = experts(len(counts), shape, scheme)
    tokens_per_slot, rows = torch.tensor(counts), rows_of(sum(counts), weights.w2.shape[1])
    tiles = packed(weights)
    for activation in (SILU, CLAMPED):
        expected = grouped_ffn_reference(rows, tokens_per_slot, weights, activation)
        same = grouped_ffn(rows, tokens_per_slot, in_bf16(weights), activation)
        for threads in (1, 2):
            with team_of(threads):
                actual = grouped_ffn(rows, tokens_per_slot, tiles, activation)
            assert_near(actual, expected, format="bfloat16")
            assert_same(actual, same)


@schemes
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_has_the_same_bits_whatever_goes_with_it(scheme: QuantScheme, threads: int) -> None:
    weights = packed(experts(3, (192, 96), scheme))
    rows, counts = rows_of(90, 192), [20, 3, 67]
    slots = torch.repeat_interleave(torch.tensor(counts))
    alone = torch.cat(
        [grouped_ffn(row[None], (torch.arange(3) == slot).long(), weights) for row, slot in zip(rows, slots)]
    )
    with team_of(threads):
        assert_same(grouped_ffn(rows, torch.tensor(counts), weights), alone)
        for keep in (slice(None, None, 2), slice(5, 30), slice(23, None)):
            some = torch.bincount(slots[keep], minlength=3)
            assert_same(grouped_ffn(rows[keep], some, weights), alone[keep])


@schemes
@pytest.mark.parametrize("counts", [[700, 0], [3, 1025]], ids=str)
def test_many_rows_of_one_expert_are_cut_into_blocks_without_a_trace(scheme: QuantScheme, counts: list[int]) -> None:
    weights, rows = experts(2, (1056, 64), scheme), rows_of(sum(counts), 1056)
    expected = grouped_ffn(rows, torch.tensor(counts), in_bf16(weights))
    for threads in (1, 2, 5):
        with team_of(threads):
            assert_same(grouped_ffn(rows, torch.tensor(counts), packed(weights)), expected)


@schemes
def test_one_ffn_for_all_rows_is_an_expert_that_all_rows_go_to(scheme: QuantScheme) -> None:
    weights, rows = packed(experts(1, (192, 96), scheme)), rows_of(37, 192)
    assert isinstance(weights.w13, PackedTensor) and isinstance(weights.w2, PackedTensor)
    one = ExpertWeights(w13=weights.w13.select(0), w2=weights.w2.select(0))
    stack = ExpertWeights(w13=weights.w13, w2=weights.w2)
    for number in (37, 1, 0):
        expected = grouped_ffn(rows[:number], torch.tensor([number]), stack)
        assert_same(gated_ffn(rows[:number], one), expected)


@pytest.mark.parametrize("scheme", SCHEMES[:2], ids=lambda s: s.kind)
@routing_cases
def test_one_call_with_the_combine_gives_the_bits_of_bf16(case: RoutingCase, scheme: QuantScheme) -> None:
    """Dropped choices (-1) included."""
    weights = experts(case.num_experts, (64, 32), scheme)
    for ids, x in zip(case.ids, case.inputs(64, torch.bfloat16)):
        choice = routed(ids, case.num_experts)
        expected = native_ffn_combine(x, in_bf16(weights), SILU, choice)
        for threads in (1, 2):
            with team_of(threads):
                assert_same(native_ffn_combine(x, packed(weights), SILU, choice), expected)


def test_bytes_per_slot_are_exact() -> None:
    mxfp4, fp8 = SCHEMES[:2]
    biases = 2 * (2 * 96 + 64)
    assert packed(experts(3, (64, 96), mxfp4)).bytes_per_slot == (192 * 64 + 64 * 96) // 32 * 17 + biases
    assert packed(experts(3, (64, 96), fp8)).bytes_per_slot == 192 * 64 + 64 * 96 + (12 + 4) * 4 + biases
