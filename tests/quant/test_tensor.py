"""Quantised matrices: the fast dequantisation against the slow one bit by bit, and what belongs to which scale."""

import pytest
import torch

from moewe.quant import FP8_BLOCK, INT4_GROUP, INT8_BLOCK, MXFP4_SCHEME, QuantScheme, QuantTensor
from moewe.quant.linear import linear
from moewe.quant.reference import dequantize_reference, e2m1, e4m3, e8m0
from tests.support.numerics import assert_same
from tests.support.stored import stored

DEEPSEEK = QuantScheme(kind=FP8_BLOCK, block=(128, 128))


def fp8(rows: int, columns: int, scheme: QuantScheme = DEEPSEEK, sections: tuple[int, ...] = ()) -> QuantTensor:
    """Return random e4m3 numbers, with a scale of its own in every block."""
    generator = torch.Generator().manual_seed(rows)
    sections = sections or (rows,)
    blocks = [scheme.scales_shape(section, columns) for section in sections]
    shape = (sum(count for count, _ in blocks), blocks[0][1])
    data = torch.randn(rows, columns, generator=generator).to(torch.float8_e4m3fn)
    scales = 0.1 + 0.37 * torch.arange(shape[0] * shape[1], dtype=torch.float32).view(shape)
    return QuantTensor(data=data, scales=scales, scheme=scheme, shape=(rows, columns), sections=sections)


def mxfp4(*shape: int) -> QuantTensor:
    """Return random bytes with scales around one."""
    *stack, rows, columns = shape
    generator = torch.Generator().manual_seed(rows)
    data = torch.randint(0, 256, (*stack, rows, columns // 2), generator=generator, dtype=torch.uint8)
    scales = torch.randint(120, 134, (*stack, rows, columns // 32), generator=generator, dtype=torch.uint8)
    return QuantTensor(data=data, scales=scales, scheme=MXFP4_SCHEME, shape=shape, sections=(rows,))


@pytest.mark.parametrize(("rows", "columns", "grid"), [(192, 320, (2, 3)), (1000, 136, (8, 2))])
def test_partial_last_blocks_use_their_own_scales(rows, columns, grid):  # P-LOAD-19
    tensor = fp8(rows, columns)
    assert tuple(tensor.scales.shape) == grid == DEEPSEEK.scales_shape(rows, columns)
    numbers = tensor.dequantize(torch.float32)
    assert_same(numbers, dequantize_reference(tensor))
    assert float(numbers[-1, -1]) == float(tensor.data[-1, -1].float() * tensor.scales[-1, -1])
    if rows == 1000:
        assert float(numbers[999, 135]) == float(tensor.data[999, 135].float() * tensor.scales[7, 1])
        assert float(numbers[127, 127]) == float(tensor.data[127, 127].float() * tensor.scales[0, 0])
        assert float(numbers[128, 127]) == float(tensor.data[128, 127].float() * tensor.scales[1, 0])


@pytest.mark.parametrize("block", [(1, 7), (24, 40), (5, 1), (300, 300)])
def test_any_block_and_sections_of_their_own(block):
    scheme = QuantScheme(kind=FP8_BLOCK, block=block)
    assert_same(fp8(41, 83, scheme).dequantize(torch.float32), dequantize_reference(fp8(41, 83, scheme)))
    fused = fp8(41, 83, scheme, sections=(17, 17, 7))
    assert_same(fused.dequantize(torch.float32), dequantize_reference(fused))


def test_a_section_counts_its_blocks_from_its_first_row():
    tensor = fp8(2000, 136, sections=(1000, 1000))
    assert tuple(tensor.scales.shape) == (16, 2)
    numbers = tensor.dequantize(torch.float32)
    assert float(numbers[999, 0]) == float(tensor.data[999, 0].float() * tensor.scales[7, 0])
    assert float(numbers[1000, 0]) == float(tensor.data[1000, 0].float() * tensor.scales[8, 0])


def test_mxfp4_is_the_slow_one_bit_by_bit():
    tensor = mxfp4(9, 96)
    assert_same(tensor.dequantize(torch.float32), dequantize_reference(tensor))


def test_every_code_and_every_scale_of_mxfp4():
    data = torch.arange(256, dtype=torch.uint8).repeat(256, 1)  # each byte, under each scale
    scales = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 16)
    tensor = QuantTensor(data=data, scales=scales, scheme=MXFP4_SCHEME, shape=(256, 512), sections=(256,))
    numbers = tensor.dequantize(torch.float32)
    low = [[e2m1(byte & 15) * e8m0(scale) for byte in (0, 1, 2, 7, 9, 15)] for scale in (0, 1, 127, 254)]
    high = [[e2m1(byte >> 4) * e8m0(scale) for byte in (0, 16, 0x70, 0xF0)] for scale in (0, 1, 127, 254)]
    assert_same(numbers[[0, 1, 127, 254]][:, [0, 2, 4, 14, 18, 30]], torch.tensor(low))
    assert_same(numbers[[0, 1, 127, 254]][:, [1, 33, 225, 481]], torch.tensor(high))
    assert numbers[255].isnan().all() and not numbers[:254].isnan().any()


def test_the_low_nibble_comes_first():
    data = torch.full((1, 16), 0x52, dtype=torch.uint8)  # 2: 1.0, 5: 3.0
    scales = torch.full((1, 1), 128, dtype=torch.uint8)  # times two
    tensor = QuantTensor(data=data, scales=scales, scheme=MXFP4_SCHEME, shape=(1, 32), sections=(1,))
    assert tensor.dequantize(torch.float32)[0, :4].tolist() == [2.0, 6.0, 2.0, 6.0]


def test_every_code_of_e4m3():
    codes = torch.arange(256, dtype=torch.uint8)
    expected = torch.tensor([e4m3(code) for code in range(256)])
    assert torch.equal(codes.view(torch.float8_e4m3fn).float().nan_to_num(7.25), expected.nan_to_num(7.25))


def test_a_stack_is_selected_by_slot_and_dequantised_whole():
    stack = mxfp4(3, 8, 64)
    whole = stack.dequantize(torch.bfloat16)
    for slot in range(3):
        one = stack.select(slot)
        assert one.shape == (8, 64) and one.data.data_ptr() == stack.data[slot].data_ptr()
        assert_same(one.dequantize(torch.bfloat16), whole[slot])
        assert_same(one.dequantize(torch.float32), dequantize_reference(one))


@pytest.mark.parametrize("block", [(1, 96), (48, 96), (24, 40)])
def test_int8_is_the_slow_one_bit_by_bit(block):
    tensor = stored(QuantScheme(kind=INT8_BLOCK, block=block), 3, 48, 96, sections=2)
    whole = tensor.dequantize(torch.float32)
    for slot in range(3):
        assert_same(whole[slot], dequantize_reference(tensor.select(slot)))


@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_int4_is_the_slow_one_bit_by_bit(group, has_zeros):
    tensor = stored(QuantScheme(kind=INT4_GROUP, block=(1, group)), 2, 6, 160, has_zeros=has_zeros)
    whole = tensor.dequantize(torch.float32)
    for slot in range(2):
        assert_same(whole[slot], dequantize_reference(tensor.select(slot)))
    groups = -(-160 // group)
    assert tensor.num_bytes == 2 * 6 * (80 + groups * (2 + has_zeros))


def test_bytes_are_exact():
    assert mxfp4(3, 8, 64).num_bytes == 3 * 8 * (32 + 2)
    assert fp8(1000, 136).num_bytes == 1000 * 136 + 8 * 2 * 4
    assert fp8(192, 320).num_bytes == 192 * 320 + 2 * 3 * 4


def test_shapes_that_do_not_fit_together_are_ours_to_notice():
    good = fp8(192, 320)
    for wrong in ({"shape": (192, 319)}, {"sections": (100,)}, {"scales": good.scales[:1]}, {"data": good.data[:64]}):
        fields = {"data": good.data, "scales": good.scales, "shape": good.shape, "sections": good.sections} | wrong
        with pytest.raises(AssertionError):
            QuantTensor(scheme=DEEPSEEK, **fields)


def test_linear_is_the_product_with_the_dequantised_matrix():
    x, bias = torch.randn(5, 136), torch.randn(1000)
    weight = fp8(1000, 136)
    expected = torch.nn.functional.linear(x, dequantize_reference(weight), bias)
    assert_same(linear(x, weight, bias), expected)
    assert linear(x.bfloat16(), weight).dtype == torch.bfloat16
    plain = torch.randn(7, 136)
    assert_same(linear(x, plain), x @ plain.T)
