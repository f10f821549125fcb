"""Products with int8 and int4 weights: equal to exact arithmetic, and a row depends on itself alone (P-EP-04)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moewe.quant import PackedTensor, WeightScheme, logits, weight_scheme
from moewe.quant.linear import linear
from moewe.quant.native_linear import native_linear
from moewe.quant.quantize import quantize
from moewe.quant.reference import quantized_rows_reference
from tests.support.native import needs_native, team_of
from tests.support.numerics import assert_near, assert_same

pytestmark = needs_native

SCHEMES = [weight_scheme("int8"), *(weight_scheme("int4", group=group) for group in (32, 64, 128))]
SHAPES = [(64, 64), (16, 32), (640, 192), (96, 33), (33, 96), (5, 7), (1, 1), (272, 1040)]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
schemes = pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: f"{s.kind}-{s.group}")
with_other_grids = pytest.mark.parametrize(
    ("scheme", "any_grid"),
    [(scheme, any_grid) for scheme in SCHEMES for any_grid in (False, True)[: 1 + (scheme.kind == "int4")]],
    ids=lambda s: f"{s.kind}-{s.group}" if isinstance(s, WeightScheme) else f"any_grid={s}",
)


def quantized(shape: tuple[int, int], scheme: WeightScheme, *, any_grid: bool = False) -> PackedTensor:
    """A matrix of noise; with `any_grid` starts, steps and codes are anything that fits, not what quantising gives."""
    generator = torch.Generator().manual_seed(0)
    packed = quantize(torch.randn(*shape, generator=generator) * shape[-1] ** -0.5, scheme)
    if not any_grid:
        return packed
    assert packed.grid is not None
    steps = torch.randint(0, 256, packed.grid[..., 0, :].shape, generator=generator)
    highest = 255 - (steps * 15 >> 4)
    starts = (torch.rand(highest.shape, generator=generator) * (highest + 1)).floor()
    starts[::2], starts[1::3] = 0, highest[1::3].float()
    grid = torch.stack([starts.to(torch.uint8), steps.to(torch.uint8)], dim=-2)
    data = torch.randint(0, 256, packed.data.shape, generator=generator, dtype=torch.uint8)
    return replace(packed, grid=grid.contiguous(), data=data)


def rows_of(number: int, width: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(number, width, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


@shapes
@with_other_grids
def test_products_equal_exact_ones(shape: tuple[int, int], scheme: WeightScheme, any_grid: bool) -> None:
    weight, rows = quantized(shape, scheme, any_grid=any_grid), rows_of(100, shape[1])
    bias = rows_of(1, shape[0], seed=5)[0]
    numbers = weight.dequantize(torch.float64)
    exact = quantized_rows_reference(rows, 64) @ numbers.T + bias.double()
    # Up to four rows go by vectors, up to sixteen by tiles in steps of four, more by tiles of decoded weights.
    for num_rows in (*range(1, 10), 12, 13, 16, 17, 33, 100):
        x, residual = rows[:num_rows], rows_of(num_rows, shape[0], seed=7)
        unrounded = logits(x, weight, bias)
        assert_near(unrounded, exact[:num_rows], format="float32")
        rounded = linear(x, weight, bias)
        assert_same(rounded, unrounded.to(torch.bfloat16))
        assert_same(native_linear(x, weight, bias, residual=residual), residual + rounded)


@shapes
@with_other_grids
def test_a_row_has_the_same_bits_alone_and_in_any_batch(
    shape: tuple[int, int], scheme: WeightScheme, any_grid: bool
) -> None:
    weight, x = quantized(shape, scheme, any_grid=any_grid), rows_of(75, shape[1])
    alone = torch.cat([linear(row, weight) for row in x.split(1)])
    order = torch.randperm(75, generator=torch.Generator().manual_seed(2))
    for threads in (1, 2):
        with team_of(threads):
            assert_same(linear(x, weight), alone)
            assert_same(linear(x[order], weight), alone[order])
            for number in (2, 3, 7, 15, 16, 17, 31, 32, 33, 64):
                assert_same(linear(x[-number:], weight), alone[-number:])


@schemes
def test_many_rows_are_cut_into_blocks_without_a_trace(scheme: WeightScheme) -> None:
    weight, x = quantized((96, 2080), scheme), rows_of(1111, 2080)
    alone = torch.cat([linear(part, weight) for part in x.split(7)])
    for threads in (1, 2, 5):
        with team_of(threads):
            assert_same(linear(x, weight), alone)


@schemes
def test_rows_that_are_zero_or_not_finite_stay_alone(scheme: WeightScheme) -> None:
    weight, x = quantized((33, 96), scheme), rows_of(20, 96)
    expected = linear(x, weight)
    x[3], x[5], x[7] = torch.nan, 0, 1e-38
    x[9, 4] = torch.inf
    actual = linear(x, weight)
    assert actual[3].isnan().all() and actual[9].isnan().all()
    assert not actual[5].any() and not actual[7].any()
    keep = [row for row in range(20) if row not in (3, 5, 7, 9)]
    assert_same(actual[keep], expected[keep])


@schemes
def test_a_stack_is_multiplied_by_number(scheme: WeightScheme) -> None:
    stack, x = torch.randn(4, 48, 96, generator=torch.Generator().manual_seed(0)), rows_of(9, 96)
    packed = quantize(stack, scheme)
    for slot in range(4):
        assert_same(linear(x, packed.select(slot)), linear(x, quantize(stack[slot], scheme)))


@schemes
def test_no_rows(scheme: WeightScheme) -> None:
    weight = quantized((33, 96), scheme)
    for threads in (1, 2):
        with team_of(threads):
            assert linear(rows_of(0, 96), weight).shape == (0, 33)
