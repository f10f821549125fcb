"""Packed matrices: what is packed comes back, products equal the reference, and a row depends on itself alone."""

from __future__ import annotations

import pytest
import torch

from moewe.quant import PackedTensor, embedding_rows, logits, pack
from moewe.quant.linear import linear
from moewe.quant.native_linear import native_linear
from tests.support.native import needs_native, team_of
from tests.support.numerics import assert_near, assert_same

pytestmark = needs_native

# (N, K): whole tiles, one column tile, widths that no tile divides, a single number.
SHAPES = [(64, 64), (16, 32), (640, 192), (96, 33), (33, 96), (48, 640), (5, 7), (1, 1), (272, 1040)]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


def matrix(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * shape[-1] ** -0.5).to(torch.bfloat16)


def rows_of(number: int, width: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(number, width, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


@shapes
@pytest.mark.parametrize("threads", [1, 2])
def test_what_is_packed_comes_back(shape: tuple[int, int], threads: int) -> None:
    original = matrix(*shape)
    with team_of(threads):
        packed = pack(original)
    assert_same(packed.dequantize(torch.bfloat16), original)
    assert packed.shape == shape
    padded = -(-shape[0] // 16) * 16 * -(-shape[1] // 32) * 32
    assert packed.num_bytes == 2 * padded


@shapes
@pytest.mark.parametrize("in_place", [False, True])
def test_stacks_and_gates_come_back(shape: tuple[int, int], in_place: bool) -> None:
    original = matrix(3, 2 * shape[0], shape[1])
    for gate_up in (False, True):
        packed = pack(original.clone(), gate_up=gate_up, in_place=in_place)
        assert_same(packed.dequantize(torch.bfloat16), original)
        assert_same(packed.select(2).dequantize(torch.bfloat16), original[2])


def test_the_layout_is_the_one_that_is_written_down() -> None:
    original = matrix(40, 96)
    packed = pack(original)
    assert packed.data.shape == (3, 3, 16, 16, 2)
    assert packed.data[1, 1, 0, 1, 1] == original[17, 33]
    assert not packed.data[2, :, :, 8:].any(), "padding is zero"
    halves = pack(matrix(64, 32), gate_up=True)
    assert halves.data[1, 0, 0, 3, 0] == matrix(64, 32)[32 + 3, 0], "the second column tile is the first of ups"


def test_in_place_takes_no_memory() -> None:
    for gate_up in (False, True):
        original = matrix(2, 64, 64)
        packed = pack(original, gate_up=gate_up, in_place=True)
        assert packed.data.data_ptr() == original.data_ptr()
        assert packed.num_bytes == original.nbytes


@shapes
def test_rows_of_an_embedding_are_exact(shape: tuple[int, int]) -> None:
    original = matrix(*shape)
    ids = torch.randint(0, shape[0], (37,), generator=torch.Generator().manual_seed(3))
    packed = pack(original)
    assert_same(embedding_rows(ids, packed), original[ids])
    assert_same(embedding_rows(ids[::2], packed), original[ids[::2]])
    assert_same(embedding_rows(ids[:0], packed), original[:0])
    for wrong in (-1, shape[0]):
        with pytest.raises(IndexError, match=f"row {wrong} of a matrix with {shape[0]} rows"):
            embedding_rows(torch.tensor([0, wrong]), packed)


@shapes
@pytest.mark.parametrize("with_bias", [False, True])
def test_products_equal_the_reference(shape: tuple[int, int], with_bias: bool) -> None:
    weight, rows = matrix(*shape), rows_of(100, shape[1])
    bias = rows_of(1, shape[0], seed=5)[0] if with_bias else None
    exact = rows.double() @ weight.double().T + (0 if bias is None else bias.double())
    packed = pack(weight)
    for num_rows in (1, 2, 16, 17, 33, 100):
        x, expected = rows[:num_rows], exact[:num_rows]
        actual = linear(x, packed, bias)
        assert actual.dtype == torch.bfloat16
        assert_near(actual, expected, format="bfloat16")
        unrounded = logits(x, packed, bias)
        assert_near(unrounded, expected, format="float32")
        assert_same(unrounded.to(torch.bfloat16), actual)


@shapes
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(shape: tuple[int, int], threads: int) -> None:
    packed, x = pack(matrix(*shape)), rows_of(75, shape[1])
    alone = torch.cat([linear(row, packed) for row in x.split(1)])
    order = torch.randperm(75, generator=torch.Generator().manual_seed(2))
    with team_of(threads):
        assert_same(linear(x, packed), alone)
        assert_same(linear(x[order], packed), alone[order])
        for number in (2, 15, 16, 17, 31, 32, 33, 64):
            assert_same(linear(x[-number:], packed), alone[-number:])


@pytest.mark.parametrize("num_rows", [600, 1111])
def test_many_rows_are_cut_into_blocks_without_a_trace(num_rows: int) -> None:
    packed, x = pack(matrix(96, 2080)), rows_of(num_rows, 2080)
    alone = torch.cat([linear(part, packed) for part in x.split(7)])
    for threads in (1, 2, 5):
        with team_of(threads):
            assert_same(linear(x, packed), alone)


def test_a_row_that_is_not_finite_stays_alone() -> None:
    packed, x = pack(matrix(33, 96)), rows_of(20, 96)
    expected = linear(x, packed)
    x[3] = torch.nan
    actual = linear(x, packed)
    assert actual[3].isnan().all()
    keep = [row for row in range(20) if row != 3]
    assert_same(actual[keep], expected[keep])
    assert_same(linear(rows_of(3, 96), packed), linear(rows_of(20, 96), packed)[:3])  # nothing of it is left behind


@shapes
def test_a_residual_is_added_to_the_rounded_product(shape: tuple[int, int]) -> None:
    packed, x, residual = pack(matrix(*shape)), rows_of(21, shape[1]), rows_of(21, shape[0], seed=7)
    bias = rows_of(1, shape[0], seed=5)[0]
    assert_same(native_linear(x, packed, bias, residual=residual), residual + linear(x, packed, bias))
    assert_same(native_linear(x, packed, residual=residual), residual + linear(x, packed))
    assert_same(native_linear(x, packed), linear(x, packed))  # the structure of the weight is clean again


def test_rows_may_lie_apart() -> None:
    packed, wide = pack(matrix(33, 96)), rows_of(20, 200)
    assert_same(linear(wide[:, 40:136], packed), linear(wide[:, 40:136].contiguous(), packed))
    across = rows_of(96, 20).T
    assert_same(linear(across, packed), linear(across.contiguous(), packed))


def test_no_rows() -> None:
    packed = pack(matrix(33, 96))
    for threads in (1, 2):
        with team_of(threads):
            assert linear(rows_of(0, 96), packed).shape == (0, 33)


def test_weights_of_a_stack_are_multiplied_by_number() -> None:
    stack, x = matrix(4, 48, 64), rows_of(9, 64)
    packed = pack(stack)
    assert isinstance(packed, PackedTensor)
    for slot in range(4):
        assert_same(linear(x, packed.select(slot)), linear(x, pack(stack[slot])))
