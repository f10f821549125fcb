"""Experts with int8 and int4 weights: against plain arithmetic, and bit by bit against themselves in other company.

Among them an expert whose outputs leave the range of fp16, or of bf16 (P-EP-07).
"""

from __future__ import annotations

import pytest
import torch

from moewe.moe.activation import SILU, Activation
from moewe.moe.experts import grouped_ffn
from moewe.moe.gated import ExpertWeights
from moewe.moe.native_experts import native_ffn
from moewe.quant import PackedTensor, WeightScheme, down_scheme, weight_scheme
from moewe.quant.quantize import quantize
from moewe.quant.reference import quantized_rows_reference
from tests.support.native import needs_native, team_of
from tests.support.numerics import assert_near, assert_same
from tests.support.pairwise import each_pair

pytestmark = needs_native

LOUD_SLOT, LARGEST_FP16 = 0, 65504.0
CLAMPED = Activation(kind="clamped", alpha=1.5, limit=0.75)
COUNTS = {
    "some_empty": [0, 5, 0, 2],
    "one_gets_all": [0, 0, 101, 0],
    "whole_and_begun_tiles": [16, 17, 32, 33],
    "one_row": [0, 0, 0, 1],
    "nothing": [0, 0, 0, 0],
}
SCHEMES = {
    "int8": weight_scheme("int8"),
    **{f"int4-{group}": weight_scheme("int4", group=group) for group in (32, 64, 128)},
}
SHAPES = [(64, 64), (640, 192), (192, 96), (33, 16), (40, 17), (16, 1)]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
schemes = pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES.keys())


def experts(
    num_slots: int,
    shape: tuple[int, int],
    scheme: WeightScheme,
    down: WeightScheme | None = None,
    *,
    loud: float = 1.0,
) -> ExpertWeights:
    """Return random experts, one of them with down projections `loud` times as large as those of the others."""
    generator = torch.Generator().manual_seed(0)
    width, ffn_width = shape

    def noise(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator) * size[-1] ** -0.5

    w13, w2 = noise(num_slots, 2 * ffn_width, width), noise(num_slots, width, ffn_width)
    w2[LOUD_SLOT] *= loud
    return ExpertWeights(
        w13=quantize(w13, scheme, gate_up=True),
        w2=quantize(w2, down or scheme),
        b13=noise(num_slots, 2 * ffn_width).to(torch.bfloat16),
        b2=noise(num_slots, width).to(torch.bfloat16),
    )


def rows_of(number: int, width: int) -> torch.Tensor:
    return torch.randn(number, width, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)


def reference(rows: torch.Tensor, counts: list[int], weights: ExpertWeights, clamped: bool) -> torch.Tensor:
    """Each product over rows as whole numbers, in fp64; rows between the two rounded to bf16 first."""
    assert isinstance(weights.w13, PackedTensor) and isinstance(weights.w2, PackedTensor)
    assert weights.b13 is not None and weights.b2 is not None
    done = []
    for slot, part in enumerate(rows.split(counts)):
        both = quantized_rows_reference(part, 64) @ weights.w13.select(slot).dequantize(torch.float64).T
        gate, up = (both + weights.b13[slot].double()).chunk(2, dim=1)
        if clamped:
            gate, up = gate.clamp(max=CLAMPED.limit), up.clamp(-CLAMPED.limit, CLAMPED.limit) + 1
        hidden = gate * torch.sigmoid(gate * (CLAMPED.alpha if clamped else 1.0)) * up
        again = quantized_rows_reference(hidden.to(torch.bfloat16), 64)
        done.append(again @ weights.w2.select(slot).dequantize(torch.float64).T + weights.b2[slot].double())
    return torch.cat(done)


@each_pair(counts=COUNTS, shape=SHAPES, scheme=SCHEMES, activation={"silu": SILU, "clamped": CLAMPED})
def test_experts_equal_the_reference(
    counts: list[int], shape: tuple[int, int], scheme: WeightScheme, activation: Activation
) -> None:
    weights, rows = experts(len(counts), shape, scheme), rows_of(sum(counts), shape[0])
    actual = grouped_ffn(rows, torch.tensor(counts), weights, activation)
    assert actual.dtype == torch.bfloat16
    if rows.shape[0]:
        expected = reference(rows, counts, weights, activation is CLAMPED)
        assert_near(actual, expected, format="bfloat16")
    with team_of(2):
        assert_same(grouped_ffn(rows, torch.tensor(counts), weights, activation), actual)


@shapes
@schemes
def test_a_row_has_the_same_bits_whatever_goes_with_it(shape: tuple[int, int], scheme: WeightScheme) -> None:
    weights, rows, counts = experts(3, shape, scheme), rows_of(90, shape[0]), [20, 3, 67]
    slots = torch.repeat_interleave(torch.tensor(counts))
    alone = torch.cat(
        [grouped_ffn(row[None], (torch.arange(3) == slot).long(), weights, SILU) for row, slot in zip(rows, slots)]
    )
    for threads in (1, 2):
        with team_of(threads):
            assert_same(grouped_ffn(rows, torch.tensor(counts), weights, SILU), alone)
            for keep in (slice(None, None, 2), slice(5, 30), slice(23, None)):
                some = torch.bincount(slots[keep], minlength=3)
                assert_same(grouped_ffn(rows[keep], some, weights, SILU), alone[keep])


@each_pair(num_tokens=[1, 5, 16, 40], shape=[(640, 192), (40, 17)], scheme=SCHEMES)
def test_rows_of_a_token_that_goes_to_several_experts(
    num_tokens: int, shape: tuple[int, int], scheme: WeightScheme
) -> None:
    weights, x = experts(5, shape, scheme), rows_of(num_tokens, shape[0])
    made = torch.Generator().manual_seed(num_tokens)
    chosen = torch.stack([torch.randperm(5, generator=made)[:3] for _ in range(num_tokens)])  # [T, K] slots
    order = chosen.flatten().argsort(stable=True)
    counts, row_tokens = torch.bincount(chosen.flatten(), minlength=5), (order // 3).int()
    expected = grouped_ffn(x[row_tokens.long()], counts, weights, SILU)
    others = rows_of(num_tokens * 4, shape[0])[-3 * num_tokens :]  # leave nothing in shared memory that could serve
    for threads in (1, 2):
        with team_of(threads):
            grouped_ffn(others, counts, weights, SILU)
            assert_same(native_ffn(x, weights, tokens_per_slot=counts, row_tokens=row_tokens), expected)
            grouped_ffn(others, counts, weights, SILU)
            # As others publish their rows: what this rank gets of them lies here and there.
            apart = torch.full((3 * num_tokens + 7, shape[0]), torch.nan, dtype=torch.bfloat16)
            places = torch.randperm(len(apart), generator=made)[:num_tokens]
            apart[places] = x
            there = places[row_tokens.long()].int()
            assert_same(native_ffn(apart, weights, tokens_per_slot=counts, row_tokens=there), expected)


@each_pair(counts=COUNTS, shape=SHAPES)
def test_down_projections_may_be_int8_where_the_others_are_int4(counts: list[int], shape: tuple[int, int]) -> None:
    scheme, rows = SCHEMES["int4-32"], rows_of(sum(counts), shape[0])
    weights = experts(len(counts), shape, scheme, down_scheme(scheme))
    assert isinstance(weights.w2, PackedTensor) and weights.w2.format == "int8"
    actual = grouped_ffn(rows, torch.tensor(counts), weights, SILU)
    if rows.shape[0]:
        assert_near(actual, reference(rows, counts, weights, clamped=False), format="bfloat16")
    with team_of(2):
        assert_same(grouped_ffn(rows, torch.tensor(counts), weights, SILU), actual)


@each_pair(counts=[[1, 3, 0, 0], [2, 0, 40, 5], [33, 1, 1, 1]], shape=[(64, 64), (192, 96), (40, 17)], scheme=SCHEMES)
def test_an_expert_beyond_the_range_of_fp16_stays_finite_and_by_itself(
    counts: list[int], shape: tuple[int, int], scheme: WeightScheme
) -> None:  # P-EP-07
    rows, own = rows_of(sum(counts), shape[0]), counts[LOUD_SLOT]
    quiet = grouped_ffn(rows, torch.tensor(counts), experts(4, shape, scheme), SILU)
    weights = experts(4, shape, scheme, loud=2.0**20)
    for threads in (1, 2):
        with team_of(threads):
            actual = grouped_ffn(rows, torch.tensor(counts), weights, SILU)
            assert_same(actual[own:], quiet[own:])
            assert actual.isfinite().all() and (actual[:own].abs().amax(1) > LARGEST_FP16).all()
    assert_near(actual[:own], reference(rows[:own], [own, 0, 0, 0], weights, clamped=False), format="bfloat16")


@schemes
def test_an_expert_beyond_the_range_of_bf16_spoils_no_row_of_others(scheme: WeightScheme) -> None:  # P-EP-07
    rows, counts = rows_of(20, 192), [3, 1, 0, 16]
    quiet = grouped_ffn(rows, torch.tensor(counts), experts(4, (192, 96), scheme), SILU)
    weights = experts(4, (192, 96), scheme)
    assert isinstance(weights.w2, PackedTensor) and weights.w2.scales is not None
    weights.w2.scales[LOUD_SLOT] = torch.inf
    actual = grouped_ffn(rows, torch.tensor(counts), weights, SILU)
    assert not actual[:3].isfinite().any()
    assert_same(actual[3:], quiet[3:])
