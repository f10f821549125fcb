"""Weights quantised at load: what the numbers become, against the definitions, and what the packed form weighs."""

from __future__ import annotations

import pytest
import torch

from moewe.quant import PackedTensor, WeightScheme, quantize, weight_scheme
from moewe.quant.reference import quantize_int8_reference
from tests.support.native import needs_native, team_of
from tests.support.numerics import assert_same

pytestmark = needs_native

INT8 = weight_scheme("int8")
INT4 = [weight_scheme("int4", group=group) for group in (32, 64, 128)]
SHAPES = [(64, 64), (16, 32), (96, 33), (33, 96), (48, 640), (5, 7), (1, 1), (17, 200)]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
schemes = pytest.mark.parametrize("scheme", [INT8, *INT4], ids=lambda s: f"{s.kind}-{s.group}")
groups_of_four_bits = pytest.mark.parametrize("scheme", INT4, ids=lambda s: f"group{s.group}")


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def in_groups(matrix: torch.Tensor, group: int) -> torch.Tensor:
    """[N, K] as [N, G, group], zeros behind K."""
    padded = torch.nn.functional.pad(matrix, (0, -matrix.shape[1] % group))
    return padded.unflatten(1, (-1, group))


def scales_of(packed: PackedTensor) -> torch.Tensor:
    """[N, G, 1] of a packed int4 matrix."""
    assert packed.scales is not None
    return packed.scales.float().movedim(-1, -2).flatten(0, 1)[: packed.shape[0], :, None]


@shapes
def test_int8_is_the_nearest_number_of_255(shape: tuple[int, int]) -> None:
    matrix = noise(*shape)
    assert_same(quantize(matrix, INT8).dequantize(torch.float32), quantize_int8_reference(matrix))


@shapes
@groups_of_four_bits
def test_int4_is_the_nearest_of_sixteen_numbers(shape: tuple[int, int], scheme: WeightScheme) -> None:
    matrix = noise(*shape)
    packed = quantize(matrix, scheme)
    groups, scales = in_groups(matrix, scheme.group), scales_of(packed)
    safe = torch.where(scales == 0, 1, scales)
    expected = torch.round(groups * (1 / safe)).clamp(-8, 7) * scales
    assert_same(in_groups(packed.dequantize(torch.float32), scheme.group) + 0.0, expected + 0.0)  # -0 is 0
    ends = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    plain = (ends / -8).to(torch.bfloat16).float()
    plain_numbers = torch.round(groups * (1 / torch.where(plain == 0, 1, plain))).clamp(-8, 7) * plain
    least = ((plain_numbers - groups) ** 2).sum(2)
    assert (((expected - groups) ** 2).sum(2) <= least * 1.0001).all(), "no worse than the end of the range at -8"


@schemes
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_any_number_format_is_a_source(scheme: WeightScheme, dtype: torch.dtype) -> None:
    matrix = noise(33, 96).to(dtype)
    assert_same(
        quantize(matrix, scheme).dequantize(torch.float32), quantize(matrix.float(), scheme).dequantize(torch.float32)
    )


@shapes
@schemes
@pytest.mark.parametrize("threads", [1, 2])
def test_stacks_gates_and_threads_change_no_number(shape: tuple[int, int], scheme: WeightScheme, threads: int) -> None:
    stack = noise(3, 2 * shape[0], shape[1])
    one_by_one = torch.stack([quantize(matrix, scheme).dequantize(torch.float32) for matrix in stack])
    with team_of(threads):
        for gate_up in (False, True):
            packed = quantize(stack, scheme, gate_up=gate_up)
            assert_same(packed.dequantize(torch.float32), one_by_one)
            assert_same(packed.select(2).dequantize(torch.float32), one_by_one[2])
            assert packed.num_bytes == 3 * scheme.num_bytes(2 * shape[0], shape[1], gate_up=gate_up)


@schemes
def test_numbers_that_say_nothing(scheme: WeightScheme) -> None:
    matrix = noise(4, 256)
    matrix[0] = 0
    matrix[1] = 1e-36
    matrix[2, 7] = torch.nan
    matrix[3, 200] = -torch.inf
    numbers = quantize(matrix, scheme).dequantize(torch.float32)
    assert not numbers[:2].any()
    width = scheme.group or 256
    assert numbers[2, :width].isnan().all() and numbers[3, 200 // width * width :].isnan()[:width].all()
    assert numbers.isfinite().sum() == 2 * 256 + 2 * (256 - width), "other groups stay"


def test_schemes_have_names() -> None:
    assert weight_scheme("int4").group == 32
    with pytest.raises(ValueError, match="quantization='int5' is not a format that moewe quantises to; use one of"):
        weight_scheme("int5")
    with pytest.raises(ValueError, match="groups of 32, 64, 128, not of 48"):
        weight_scheme("int4", group=48)
