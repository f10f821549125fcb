"""Weights quantised at load: what the numbers become, against the definitions, and what the packed form weighs."""

from __future__ import annotations

import pytest
import torch

from moewe.quant import WeightScheme, weight_scheme
from moewe.quant.quantize import quantize
from moewe.quant.reference import int4_grids_reference, quantize_int8_reference
from tests.support.native import needs_native, team_of
from tests.support.numerics import assert_near, assert_same
from tests.support.pairwise import each_pair

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


@shapes
def test_int8_is_the_nearest_number_of_255(shape: tuple[int, int]) -> None:
    matrix = noise(*shape)
    assert_same(quantize(matrix, INT8).dequantize(torch.float32), quantize_int8_reference(matrix))


@shapes
@groups_of_four_bits
def test_int4_is_near_one_of_sixteen_numbers_of_int8(shape: tuple[int, int], scheme: WeightScheme) -> None:
    matrix = noise(*shape)
    packed = quantize(matrix, scheme)
    grids, units = int4_grids_reference(packed)  # [N, G, 16], [N]
    numbers = in_groups(packed.dequantize(torch.float32), scheme.group)
    groups = in_groups(matrix, scheme.group)
    distances = (grids[:, : groups.shape[1], None, :] - groups[..., None]).abs()
    errors = (numbers - groups).abs()
    inside = in_groups(torch.ones(shape), scheme.group).bool()
    assert ((grids[:, : groups.shape[1], None, :] == numbers[..., None]).any(-1) | ~inside).all()
    # A unit more at most, as what steps in sixteenths give is rounded down.
    assert (errors <= distances.amin(-1) + units[:, None, None])[inside].all()
    low = torch.where(inside, groups, torch.inf).amin(2, keepdim=True)
    high = torch.where(inside, groups, -torch.inf).amax(2, keepdim=True)
    steps = torch.where(high > low, (high - low) / 15, 1)
    even = low + ((groups - low) / steps).round() * steps
    assert (errors**2)[inside].sum() <= 1.02 * ((even - groups) ** 2)[inside].sum() + (units**2).sum()
    assert_near(units * 119.5, matrix.abs().amax(1), format="float32")


def test_int4_finds_numbers_that_were_evenly_spaced_once() -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (32, 20, 32), generator=generator)
    codes[..., 0], codes[..., 1] = 0, 15
    steps, starts = (torch.rand(32, 20, 1, generator=generator) + 1 for _ in range(2))
    matrix = (codes * steps - 6 * starts).flatten(1)
    error = (quantize(matrix, INT4[0]).dequantize(torch.float32) - matrix).abs() / matrix.abs().amax(1, keepdim=True)
    assert error.max() <= 2 / 119.5 and error.mean() <= 0.5 / 119.5, "no more than int8 itself is wrong"


@schemes
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_any_number_format_is_a_source(scheme: WeightScheme, dtype: torch.dtype) -> None:
    matrix = noise(33, 96).to(dtype)
    assert_same(
        quantize(matrix, scheme).dequantize(torch.float32), quantize(matrix.float(), scheme).dequantize(torch.float32)
    )


@each_pair(shape=SHAPES, scheme={f"{s.kind}-{s.group}": s for s in (INT8, *INT4)}, threads=[1, 2])
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
    assert numbers[2:].isnan().all()


@schemes
def test_a_group_of_equal_numbers(scheme: WeightScheme) -> None:
    matrix = noise(6, 320)
    matrix[:, 128:256] = torch.tensor([0.0, 1e-20, 0.25, -0.25, 9.0, -9.0])[:, None]
    error = quantize(matrix, scheme).dequantize(torch.float32)[:, 128:256] - matrix[:, 128:256]
    assert (error.abs() <= matrix.abs().amax(1, keepdim=True) / 119).all()


def test_schemes_have_names() -> None:
    assert weight_scheme("int4").group == 32
    with pytest.raises(ValueError, match="quantization='int5' is not a format that moewe quantises to; use one of"):
        weight_scheme("int5")
    with pytest.raises(ValueError, match="groups of 32, 64, 128, not of 48"):
        weight_scheme("int4", group=48)
