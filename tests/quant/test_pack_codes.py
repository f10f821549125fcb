"""MXFP4 and fp8 in tiles: what is packed comes back, products are those of the numbers in bf16, to the last bit."""

from __future__ import annotations

import pytest
import torch

from moewe.quant import FP8_BLOCK, MXFP4, MXFP4_SCHEME, QuantScheme, QuantTensor, logits, pack
from moewe.quant.linear import linear
from moewe.quant.native_linear import native_linear
from moewe.quant.pack_codes import pack_codes
from moewe.quant.reference import dequantize_reference
from tests.support.native import needs_native, team_of
from tests.support.numerics import assert_near, assert_same
from tests.support.pairwise import each_pair
from tests.support.stored import NAMED, clone, schemes, stored

pytestmark = needs_native

# (N, K): whole tiles, one column tile, widths that no tile divides. MXFP4 is stored in whole blocks of 32.
SHAPES = [(64, 64), (16, 32), (640, 192), (96, 33), (33, 96), (48, 640), (5, 7), (1, 1), (272, 1040)]
DEEPSEEK = QuantScheme(kind=FP8_BLOCK, block=(128, 128))


def matrix(scheme: QuantScheme, shape: tuple[int, int], *stack: int, sections: int = 1) -> QuantTensor:
    rows, columns = shape
    return stored(scheme, *stack, rows, -(-columns // 32) * 32 if scheme.kind == MXFP4 else columns, sections=sections)


def rows_of(number: int, width: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(number, width, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


@each_pair(scheme=NAMED, shape=SHAPES, threads=[1, 2])
def test_what_is_packed_comes_back(scheme: QuantScheme, shape: tuple[int, int], threads: int) -> None:
    original = matrix(scheme, shape)
    with team_of(threads):
        packed = pack_codes(original)
    assert packed.shape == original.shape and packed.format == scheme.kind
    for dtype in (torch.float32, torch.bfloat16):
        assert_same(packed.dequantize(dtype), original.dequantize(dtype))


@pytest.mark.parametrize("shape", [(33, 96), (40, 40)], ids=str)
@schemes
def test_numbers_are_those_of_the_definitions(scheme: QuantScheme, shape: tuple[int, int]) -> None:
    original = matrix(scheme, shape)
    assert_same(pack_codes(original).dequantize(torch.float32), dequantize_reference(original))


@each_pair(scheme=NAMED, shape=SHAPES, in_place=[False, True])
def test_stacks_and_gates_come_back(scheme: QuantScheme, shape: tuple[int, int], in_place: bool) -> None:
    original = matrix(scheme, (2 * shape[0], shape[1]), 3, sections=2)
    expected = original.dequantize(torch.float32)
    for gate_up in (False, True):
        packed = pack_codes(clone(original), gate_up=gate_up, in_place=in_place)
        assert_same(packed.dequantize(torch.float32), expected)
        assert_same(packed.select(2).dequantize(torch.float32), expected[2])


def test_the_layout_of_mxfp4_is_the_one_that_is_written_down() -> None:
    original = stored(MXFP4_SCHEME, 40, 96)
    packed = pack_codes(original)
    assert packed.data.shape == (3, 3, 4, 16, 2, 2) and packed.scales is not None
    byte = original.data[17, (32 + 14) // 2]  # inputs 46 and 47: pair 7 of the second tile
    assert packed.data[1, 1, 1, 1, 0, 1] >> 4 == byte & 15 and packed.data[1, 1, 1, 1, 1, 1] >> 4 == byte >> 4
    assert packed.scales[1, 1, 1] == original.scales[17, 1]
    assert not packed.data[2, :, :, 8:].any() and (packed.scales[2, :, 8:] == 127).all(), "padding is zeros times one"


def test_the_layout_of_fp8_is_the_one_that_is_written_down() -> None:
    original = stored(DEEPSEEK, 264, 300)
    packed = pack_codes(original)
    assert packed.data.shape == (17, 10, 8, 4, 2, 4, 2) and packed.scales is not None
    codes = original.data.view(torch.uint8)
    assert packed.data[1, 1, 3, 2, 1, 1, 1] == codes[16 + 9, 32 + 15]
    assert packed.scales.shape == (17, 3, 1) and packed.scales[16, 2, 0] == original.scales[2, 2]
    assert not packed.data[16, :, :, 2:].any() and not packed.data[:, 9, 3:].any(), "padding is zero"


@pytest.mark.parametrize("gate_up", [False, True])
@schemes
def test_in_place_takes_no_memory(scheme: QuantScheme, gate_up: bool) -> None:
    original = stored(scheme, 2, 64, 64, sections=2)
    packed = pack_codes(original, gate_up=gate_up, in_place=True)
    assert packed.data.data_ptr() == original.data.data_ptr()
    if scheme.kind == MXFP4:
        assert packed.scales is not None and packed.scales.data_ptr() == original.scales.data_ptr()


def test_bytes_are_exact() -> None:
    assert pack_codes(stored(MXFP4_SCHEME, 3, 40, 64)).num_bytes == 3 * 48 * (32 + 2)
    assert pack_codes(stored(MXFP4_SCHEME, 3, 40, 64, sections=2), gate_up=True).num_bytes == 3 * 64 * (32 + 2)
    assert pack_codes(stored(DEEPSEEK, 264, 300)).num_bytes == 272 * 320 + 17 * 3 * 4
    by_output = QuantScheme(kind=FP8_BLOCK, block=(24, 128))
    assert pack_codes(stored(by_output, 264, 300)).num_bytes == 272 * 320 + 17 * 3 * 16 * 4


@each_pair(scheme=NAMED, shape=SHAPES)
def test_products_equal_the_reference(scheme: QuantScheme, shape: tuple[int, int]) -> None:
    original = matrix(scheme, shape)
    rows, bias = rows_of(100, original.shape[1]), rows_of(1, original.shape[0], seed=5)[0]
    packed = pack_codes(original)
    # Numbers are rounded to bf16 once (those of MXFP4 are exact there), and nothing else is before the sum.
    numbers, rounded = original.dequantize(torch.float32).double(), original.dequantize(torch.bfloat16).double()
    if scheme.kind == MXFP4:
        assert_same(rounded, numbers)
    for num_rows in (1, 2, 16, 17, 33, 100):
        x, residual = rows[:num_rows], rows_of(num_rows, shape[0], seed=7)
        actual = linear(x, packed, bias)
        assert actual.dtype == torch.bfloat16
        assert_near(actual, x.double() @ numbers.T + bias.double(), format="bfloat16")
        unrounded = logits(x, packed, bias)
        assert_near(unrounded, x.double() @ rounded.T + bias.double(), format="float32")
        assert_same(unrounded.to(torch.bfloat16), actual)
        assert_same(native_linear(x, packed, bias, residual=residual), residual + actual)


@each_pair(scheme=NAMED, shape=SHAPES, threads=[1, 2])
def test_bits_are_those_of_bf16_in_any_company(scheme: QuantScheme, shape: tuple[int, int], threads: int) -> None:
    original = matrix(scheme, shape)
    packed, x = pack_codes(original), rows_of(75, original.shape[1])
    expected = linear(x, pack(original.dequantize(torch.bfloat16)))
    order = torch.randperm(75, generator=torch.Generator().manual_seed(2))
    with team_of(threads):
        assert_same(linear(x, packed), expected)
        assert_same(linear(x[order], packed), expected[order])
        for number in (1, 2, 15, 16, 17, 31, 32, 33, 64):
            assert_same(linear(x[-number:], packed), expected[-number:])


@schemes
def test_many_rows_are_cut_into_blocks_without_a_trace(scheme: QuantScheme) -> None:
    original, x = stored(scheme, 96, 2080), rows_of(1111, 2080)
    packed = pack_codes(original)
    expected = linear(x, pack(original.dequantize(torch.bfloat16)))
    for threads in (1, 2, 5):
        with team_of(threads):
            assert_same(linear(x, packed), expected)


@schemes
def test_a_stack_is_multiplied_by_number(scheme: QuantScheme) -> None:
    stack, x = stored(scheme, 4, 48, 96), rows_of(9, 96)
    packed = pack_codes(stack)
    for slot in range(4):
        assert_same(linear(x, packed.select(slot)), linear(x, pack_codes(stack.select(slot))))


@schemes
def test_no_rows(scheme: QuantScheme) -> None:
    packed = pack_codes(stored(scheme, 33, 96))
    for threads in (1, 2):
        with team_of(threads):
            assert linear(rows_of(0, 96), packed).shape == (0, 33)


def columns_of(packed_shape: tuple[int, int], matrix: QuantTensor) -> torch.Tensor:
    """Return each number of a matrix by itself, as a product with a one sees it: [K, N] f32."""
    one_hot = torch.eye(packed_shape[1], dtype=torch.bfloat16)
    return logits(one_hot, pack_codes(matrix))


def test_every_code_under_every_scale_of_mxfp4() -> None:
    codes = torch.arange(0, 256, 17).to(torch.uint8)  # both halves of a byte alike
    scales = torch.arange(256, dtype=torch.uint8)[:, None]
    original = QuantTensor(
        data=codes.repeat(256, 1), scales=scales, scheme=MXFP4_SCHEME, shape=(256, 32), sections=(256,)
    )
    numbers = columns_of((256, 32), original).T
    expected = original.dequantize(torch.float32)
    assert torch.equal(numbers[2:253], expected[2:253])
    # What is subnormal may count as zero; infinity times the zeros of the other rows is no number.
    assert (numbers[:2] - expected[:2]).abs().max() < 2.0**-126
    assert numbers[253:].isnan().all()


@pytest.mark.parametrize("scale", [1.0, 0.37, -3.0, 2.0**-105, 2.0**90, 0.0])
@pytest.mark.parametrize("block", [(128, 128), (1, 128)])
def test_every_code_of_e4m3(scale: float, block: tuple[int, int]) -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(16, 1)
    codes[:, [0x7F, 0xFF]] = 0
    original = QuantTensor(
        data=codes.view(torch.float8_e4m3fn), scales=torch.full((-(-16 // block[0]), 2), scale),
        scheme=QuantScheme(kind=FP8_BLOCK, block=block), shape=(16, 256), sections=(16,),
    )  # fmt: skip
    assert torch.equal(columns_of((16, 256), original).T, original.dequantize(torch.bfloat16).float())
    for row, code in ((3, 0x7F), (9, 0xFF)):  # no number: its output is none, and all others are what they were
        codes[row, 200] = code
    numbers = columns_of((16, 256), original).T
    others = [row for row in range(16) if row not in (3, 9)]
    assert numbers[[3, 9]].isnan().all()
    assert torch.equal(numbers[others], original.dequantize(torch.bfloat16).float()[others])


@schemes
def test_a_row_that_is_not_finite_stays_alone(scheme: QuantScheme) -> None:
    packed, x = pack_codes(stored(scheme, 33, 96)), rows_of(20, 96)
    expected = linear(x, packed)
    x[3] = torch.nan
    actual = linear(x, packed)
    assert actual[3].isnan().all()
    keep = [row for row in range(20) if row != 3]
    assert_same(actual[keep], expected[keep])
