"""Experts with packed weights: against the reference, and bit by bit against themselves in other company (P-EP-04)."""

from __future__ import annotations

import pytest
import torch

from moewe.moe.activation import SILU, Activation
from moewe.moe.experts import gated_ffn, grouped_ffn
from moewe.moe.gated import ExpertWeights
from moewe.moe.native_experts import native_ffn, native_ffn_combine
from moewe.moe.reference import grouped_ffn_reference
from moewe.moe.wide_ep.exchanges.native_combine import native_combine
from moewe.moe.wide_ep.exchanges.pairs import add_pairs, sort_pairs
from moewe.moe.wide_ep.exchanges.reference import combine_reference, dispatch_reference
from moewe.quant import PackedTensor, pack
from tests.support.cases import RoutingCase, random_ids, routing_cases
from tests.support.native import needs_native, team_of
from tests.support.numerics import assert_near, assert_same
from tests.support.pairwise import each_pair
from tests.support.routed import routed

pytestmark = needs_native

CLAMPED = Activation(kind="clamped", alpha=1.5, limit=0.75)
COUNTS = {
    "all_used": [3, 1, 4, 1],
    "some_empty": [0, 5, 0, 2],
    "first_and_last_empty": [0, 1, 1, 0],
    "one_gets_all": [0, 0, 101, 0],
    "whole_and_begun_tiles": [16, 17, 32, 33],
    "one_row": [0, 0, 0, 1],
    "nothing": [0, 0, 0, 0],
}
SHAPES = [(64, 64), (640, 192), (192, 96), (96, 33), (33, 16), (32, 80), (40, 17), (16, 1)]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


def experts(num_slots: int, shape: tuple[int, int], *, biases: bool = False) -> ExpertWeights:
    """Experts of (D, F), not packed."""
    generator = torch.Generator().manual_seed(0)
    width, ffn_width = shape

    def noise(*size: int) -> torch.Tensor:
        return (torch.randn(*size, generator=generator) * size[-1] ** -0.5).to(torch.bfloat16)

    return ExpertWeights(
        w13=noise(num_slots, 2 * ffn_width, width),
        w2=noise(num_slots, width, ffn_width),
        b13=noise(num_slots, 2 * ffn_width) if biases else None,
        b2=noise(num_slots, width) if biases else None,
    )


def packed(weights: ExpertWeights) -> ExpertWeights:
    assert isinstance(weights.w13, torch.Tensor) and isinstance(weights.w2, torch.Tensor)
    return ExpertWeights(w13=pack(weights.w13, gate_up=True), w2=pack(weights.w2), b13=weights.b13, b2=weights.b2)


def rows_of(number: int, width: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(number, width, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


@each_pair(counts=COUNTS, shape=SHAPES, activation={"silu": SILU, "clamped": CLAMPED})
def test_experts_equal_the_reference(counts: list[int], shape: tuple[int, int], activation: Activation) -> None:
    weights = experts(len(counts), shape, biases=activation is CLAMPED)
    rows, tokens_per_slot = rows_of(sum(counts), shape[0]), torch.tensor(counts)
    expected = grouped_ffn_reference(rows, tokens_per_slot, weights, activation)
    for threads in (1, 2):
        with team_of(threads):
            actual = grouped_ffn(rows, tokens_per_slot, packed(weights), activation)
        assert actual.dtype == torch.bfloat16
        assert_near(actual, expected, format="bfloat16")


@shapes
@pytest.mark.parametrize("activation", [SILU, CLAMPED], ids=lambda a: a.kind)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_has_the_same_bits_whatever_goes_with_it(
    shape: tuple[int, int], activation: Activation, threads: int
) -> None:
    weights = packed(experts(3, shape, biases=True))
    rows, counts = rows_of(90, shape[0]), [20, 3, 67]
    slots = torch.repeat_interleave(torch.tensor(counts))
    alone = torch.cat(
        [
            grouped_ffn(row[None], (torch.arange(3) == slot).long(), weights, activation)
            for row, slot in zip(rows, slots)
        ]
    )
    with team_of(threads):
        assert_same(grouped_ffn(rows, torch.tensor(counts), weights, activation), alone)
        for keep in (slice(None, None, 2), slice(5, 30), slice(23, None)):
            some = torch.bincount(slots[keep], minlength=3)
            assert_same(grouped_ffn(rows[keep], some, weights, activation), alone[keep])
        turned = torch.cat([part.flip(0) for part in rows.split(counts)])
        back = torch.cat([part.flip(0) for part in alone.split(counts)])
        assert_same(grouped_ffn(turned, torch.tensor(counts), weights, activation), back)


@pytest.mark.parametrize("counts", [[700, 0], [3, 1025]], ids=str)
def test_many_rows_of_one_expert_are_cut_into_blocks_without_a_trace(counts: list[int]) -> None:
    weights, rows = packed(experts(2, (1056, 48))), rows_of(sum(counts), 1056)
    expected = []
    for slot, part in enumerate(rows.split(counts)):
        expected += [grouped_ffn(few, (torch.arange(2) == slot) * len(few), weights) for few in part.split(100)]
    for threads in (1, 2, 5):
        with team_of(threads):
            assert_same(grouped_ffn(rows, torch.tensor(counts), weights), torch.cat(expected))


@shapes
@pytest.mark.parametrize("activation", [SILU, CLAMPED], ids=lambda a: a.kind)
def test_one_ffn_for_all_rows_is_an_expert_that_all_rows_go_to(shape: tuple[int, int], activation: Activation) -> None:
    weights, rows = packed(experts(1, shape, biases=True)), rows_of(37, shape[0])
    assert isinstance(weights.w13, PackedTensor) and isinstance(weights.w2, PackedTensor)
    assert weights.b13 is not None and weights.b2 is not None
    one = ExpertWeights(
        w13=weights.w13.select(0), w2=weights.w2.select(0), b13=weights.b13[0].clone(), b2=weights.b2[0].clone()
    )
    for number in (37, 1, 0):
        expected = grouped_ffn(rows[:number], torch.tensor([number]), weights, activation)
        assert_same(gated_ffn(rows[:number], one, activation), expected)


def test_experts_without_rows_are_not_read() -> None:
    plain = experts(4, (64, 32))
    rows, counts = rows_of(3, 64), torch.tensor([0, 2, 0, 1])
    expected = grouped_ffn(rows, counts, packed(plain))
    assert isinstance(plain.w13, torch.Tensor) and isinstance(plain.w2, torch.Tensor)
    plain.w13[[0, 2]], plain.w2[[0, 2]] = torch.nan, torch.nan
    assert_same(grouped_ffn(rows, counts, packed(plain)), expected)


@pytest.mark.parametrize("activation", [SILU, CLAMPED], ids=lambda a: a.kind)
def test_a_row_that_is_not_finite_stays_alone(activation: Activation) -> None:
    weights, counts = packed(experts(2, (96, 17))), torch.tensor([3, 18])
    rows = rows_of(21, 96)
    expected = grouped_ffn(rows, counts, weights, activation)
    rows[7] = torch.nan
    actual = grouped_ffn(rows, counts, weights, activation)
    assert actual[7].isnan().all()
    keep = [row for row in range(21) if row != 7]
    assert_same(actual[keep], expected[keep])
    rows[7] = 1.0  # nothing of it is left behind
    assert_same(grouped_ffn(rows, counts, weights, activation)[keep], expected[keep])


@routing_cases
@pytest.mark.parametrize("threads", [1, 2])
def test_one_call_gives_the_bits_of_all_its_parts(case: RoutingCase, threads: int) -> None:
    weights = packed(experts(case.num_experts, (48, 32)))
    for ids, x in zip(case.ids, case.inputs(48, torch.bfloat16)):
        choice = routed(ids, case.num_experts)
        pairs = sort_pairs(ids, torch.arange(case.num_experts + 1, dtype=torch.int32))
        sorted_rows = x.index_select(0, pairs.tokens)
        rows = grouped_ffn(sorted_rows, pairs.counts, weights)
        expected = add_pairs(rows, choice.weights, pairs)
        shared, residual = rows_of(len(x), 48, seed=8), rows_of(len(x), 48, seed=9)
        with team_of(threads):
            gathered = native_ffn(x, weights, tokens_per_slot=choice.tokens_per_slot, row_tokens=choice.row_tokens)
            assert_same(gathered, rows)
            assert_same(native_combine(rows, choice.weights, choice.rows), expected)
            assert_same(native_ffn_combine(x, weights, SILU, choice), expected)
            both = native_ffn_combine(x, weights, SILU, choice, shared=shared, residual=residual)
        assert_same(both, residual + (expected + shared))


@routing_cases
def test_combine_equals_its_reference(case: RoutingCase) -> None:
    for ids, x in zip(case.ids, case.inputs(33, torch.bfloat16)):
        choice = routed(ids, case.num_experts)
        arrived = dispatch_reference([x], [ids], [(0, case.num_experts)])
        rows = rows_of(len(arrived[0].rows_MD), 33)
        (expected,) = combine_reference([rows], [choice.weights], arrived)
        assert_same(native_combine(rows, choice.weights, choice.rows), expected)


def test_many_tokens_are_combined_by_any_number_of_threads() -> None:
    ids = random_ids(301, 3, 8)
    choice, rows = routed(ids, 8), rows_of(903, 1040)
    expected = add_pairs(rows, choice.weights, sort_pairs(ids, torch.arange(9, dtype=torch.int32)))
    for threads in (1, 2, 5):
        with team_of(threads):
            assert_same(native_combine(rows, choice.weights, choice.rows), expected)


def test_bytes_per_slot_are_exact() -> None:
    assert packed(experts(3, (64, 32))).bytes_per_slot == 3 * 64 * 32 * 2
    assert packed(experts(3, (33, 17), biases=True)).bytes_per_slot == 2 * (4 * 16 * 64 + 48 * 32 + 34 + 33)


def test_tiles_that_torch_left_behind_do_not_matter() -> None:
    """torch multiplies bf16 with tiles of other shapes on the same thread, and releases them."""
    torch.manual_seed(0)
    mine = torch.randn(3, 64).bfloat16()
    weights = packed(experts(1, (64, 32)))
    expected = native_ffn(mine, weights, tokens_per_slot=torch.tensor([3]))
    for rows in (1, 5, 40):
        torch.randn(rows, 96).bfloat16() @ torch.randn(96, 48).bfloat16()
        assert torch.equal(native_ffn(mine, weights, tokens_per_slot=torch.tensor([3])), expected)
