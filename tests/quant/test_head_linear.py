"""One product a head in one native call: it equals the reference, and a row of a head depends on itself alone."""

from __future__ import annotations

import pytest
import torch

from moewe.quant import PackedTensor, head_linear, pack
from moewe.quant.linear import linear
from moewe.quant.native_linear import native_head_linear
from tests.support.native import needs_native, team_of
from tests.support.numerics import assert_near, assert_same

pytestmark = needs_native

# (H, N, K): those of DeepSeek-V2-Lite both ways, and widths and heads that no tile divides.
SHAPES = [(16, 512, 128), (16, 128, 512), (4, 32, 16), (3, 12, 32), (1, 33, 96), (7, 96, 33), (5, 5, 7), (2, 1, 1)]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


def stack(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(*shape, generator=generator) * shape[-1] ** -0.5).to(torch.bfloat16)


def rows_of(number: int, heads: int, width: int) -> torch.Tensor:
    return torch.randn(number, heads, width, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)


@shapes
def test_products_equal_the_reference(shape: tuple[int, int, int]) -> None:
    weight, rows = stack(*shape), rows_of(100, shape[0], shape[2])
    exact = torch.stack([rows[:, head].double() @ weight[head].double().T for head in range(shape[0])], dim=1)
    packed = pack(weight)
    for num_rows in (1, 2, 16, 17, 33, 100):
        x, expected = rows[:num_rows], exact[:num_rows]
        actual = head_linear(x, packed)
        assert actual.dtype == torch.bfloat16
        assert_near(actual, expected, format="bfloat16")
        assert_near(head_linear(x.float(), weight.float()), expected, format="float32")  # with torch


@shapes
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(shape: tuple[int, int, int], threads: int) -> None:
    packed, x = pack(stack(*shape)), rows_of(75, shape[0], shape[2])
    alone = torch.cat([head_linear(row, packed) for row in x.split(1)])
    order = torch.randperm(75, generator=torch.Generator().manual_seed(2))
    with team_of(threads):
        assert_same(head_linear(x, packed), alone)
        assert_same(head_linear(x[order], packed), alone[order])
        for number in (2, 15, 16, 17, 31, 32, 33, 64):
            assert_same(head_linear(x[-number:], packed), alone[-number:])


@shapes
def test_a_head_is_a_product_of_its_own(shape: tuple[int, int, int]) -> None:
    packed, x = pack(stack(*shape)), rows_of(20, shape[0], shape[2])
    for head in range(shape[0]):
        assert_same(head_linear(x, packed)[:, head], linear(x[:, head], packed.select(head)))


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_many_rows_are_cut_into_tasks_without_a_trace(threads: int) -> None:
    packed, x = pack(stack(3, 96, 544)), rows_of(1111, 3, 544)
    alone = torch.cat([head_linear(part, packed) for part in x.split(7)])
    with team_of(threads):
        assert_same(head_linear(x, packed), alone)


def test_a_row_that_is_not_finite_stays_alone() -> None:
    packed, x = pack(stack(3, 33, 96)), rows_of(20, 3, 96)
    expected = head_linear(x, packed)
    x[3, 1] = torch.nan
    actual = head_linear(x, packed)
    assert actual[3, 1].isnan().all()
    actual[3, 1] = expected[3, 1]
    assert_same(actual, expected)


def test_rows_and_heads_may_lie_apart() -> None:
    packed, wide = pack(stack(3, 33, 96)), rows_of(20, 3, 200)
    part = wide[:, :, 40:136]
    assert_same(native_head_linear(part, packed), native_head_linear(part.contiguous(), packed))
    turned = rows_of(3, 20, 96).transpose(0, 1)
    assert_same(native_head_linear(turned, packed), native_head_linear(turned.contiguous(), packed))
    across = rows_of(20, 96, 3).transpose(1, 2)
    assert_same(native_head_linear(across, packed), native_head_linear(across.contiguous(), packed))


def test_no_rows() -> None:
    packed = pack(stack(3, 33, 96))
    assert isinstance(packed, PackedTensor)
    for threads in (1, 2):
        with team_of(threads):
            assert head_linear(rows_of(0, 3, 96), packed).shape == (0, 3, 33)
