"""`triton_ffn` against its reference: named counts, shapes, formats and activations, P-EP-04 and P-EP-05 among them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest
import torch
from _pytest.mark.structures import ParameterSet

from moewe.moe.activation import SILU, Activation
from moewe.moe.gated import ExpertWeights
from moewe.moe.kernels.experts import ffn_launches, triton_ffn
from moewe.moe.reference import grouped_ffn_reference
from moewe.native.gpu import TARGETS, GpuKernels, GpuTarget
from moewe.quant import FP8_BLOCK, INT4_GROUP, INT8_BLOCK, MXFP4_SCHEME, Matrix, QuantScheme, QuantTensor
from tests.support.numerics import assert_near, assert_same
from tests.support.poisoned import assert_untouched, fenced
from tests.support.stored import stored

CLAMPED = Activation(kind="clamped", alpha=1.5, limit=0.75)
COUNTS = {
    "all_used": [3, 1, 4, 1],
    "some_empty": [0, 5, 0, 2],
    "first_and_last_empty": [0, 1, 1, 0],
    "one_gets_all": [0, 0, 41, 0],
    "whole_and_begun_tiles": [16, 17, 0, 33],
    "one_row": [0, 0, 0, 1],
    "nothing": [0, 0, 0, 0],
}
ALL = 1 << 20  # rows or columns of a block that is the whole matrix
FORMATS = {
    "fp8_tensor": (QuantScheme(kind=FP8_BLOCK, block=(ALL, ALL)), False),
    "fp8_channel": (QuantScheme(kind=FP8_BLOCK, block=(1, ALL)), False),
    "fp8_blocks": (QuantScheme(kind=FP8_BLOCK, block=(128, 128)), False),
    "fp8_small_blocks": (QuantScheme(kind=FP8_BLOCK, block=(24, 32)), False),
    "int8_channel": (QuantScheme(kind=INT8_BLOCK, block=(1, ALL)), False),
    "int4_32": (QuantScheme(kind=INT4_GROUP, block=(1, 32)), True),
    "int4_64": (QuantScheme(kind=INT4_GROUP, block=(1, 64)), False),
    "int4_128": (QuantScheme(kind=INT4_GROUP, block=(1, 128)), True),
    "mxfp4": (MXFP4_SCHEME, False),
}
A100, H200 = TARGETS[80], TARGETS[90]
ON_H200 = GpuKernels(target=H200)


def some_slow(names: Iterable[str], quick: Sequence[str]) -> list[ParameterSet]:
    """Return `names` as parameters; those that are not `quick` are for slow tests."""
    return [pytest.param(name, marks=[] if name in quick else pytest.mark.slow) for name in names]


counts_of = pytest.mark.parametrize("counts", some_slow(COUNTS, ("some_empty", "whole_and_begun_tiles", "nothing")))


def experts(
    num_slots: int, shape: tuple[int, int], dtype: torch.dtype = torch.bfloat16, *, biases: bool = False
) -> ExpertWeights:
    """Experts of (D, F)."""
    generator = torch.Generator().manual_seed(0)
    width, ffn_width = shape

    def noise(*size: int) -> torch.Tensor:
        return (torch.randn(*size, generator=generator) * size[-1] ** -0.5).to(dtype)

    return ExpertWeights(
        w13=noise(num_slots, 2 * ffn_width, width),
        w2=noise(num_slots, width, ffn_width),
        b13=noise(num_slots, 2 * ffn_width) if biases else None,
        b2=noise(num_slots, width) if biases else None,
    )


def stored_experts(num_slots: int, shape: tuple[int, int], name: str) -> ExpertWeights:
    """Experts of (D, F) in a format of FORMATS."""
    (width, ffn_width), (scheme, has_zeros) = shape, FORMATS[name]

    def part(rows: int, columns: int, sections: int) -> QuantTensor:
        block = min(scheme.block[0], rows // sections), columns if scheme.block[1] == ALL else scheme.block[1]
        fitted = QuantScheme(kind=scheme.kind, block=block)
        return stored(fitted, num_slots, rows, columns, sections=sections, seed=sections, has_zeros=has_zeros)

    return ExpertWeights(w13=part(2 * ffn_width, width, 2), w2=part(width, ffn_width, 1))


def rows_of(number: int, width: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(number, width, generator=torch.Generator().manual_seed(1)).to(dtype)


def between(matrix: Matrix) -> Matrix:
    """Return a copy of a stack with poison around each of its tensors."""
    if isinstance(matrix, torch.Tensor):
        return fenced(matrix)
    assert isinstance(matrix, QuantTensor)
    zeros = None if matrix.zeros is None else fenced(matrix.zeros)
    return replace(matrix, data=fenced(matrix.data), scales=fenced(matrix.scales), zeros=zeros)


def check(rows: torch.Tensor, counts: list[int], weights: ExpertWeights, activation: Activation = SILU,
          target: GpuTarget = H200, format: str = "bfloat16") -> torch.Tensor:  # fmt: skip
    """Compare with the reference; return what the kernels gave of weights between poison."""
    there = torch.tensor(counts)
    weights = ExpertWeights(w13=between(weights.w13), w2=between(weights.w2), b13=weights.b13, b2=weights.b2)
    actual = assert_untouched(
        lambda x, c: triton_ffn(x, c, weights, activation, kernels=GpuKernels(target=target)), rows, there
    )
    assert actual.dtype == rows.dtype
    assert_near(actual, grouped_ffn_reference(rows, there, weights, activation), format=format)
    return actual


@counts_of
def test_experts_equal_the_reference(counts: str) -> None:  # P-EP-04, P-EP-05
    check(rows_of(sum(COUNTS[counts]), 64), COUNTS[counts], experts(4, (64, 32)))


def test_a_width_that_no_block_divides_with_biases_and_clamped() -> None:
    check(rows_of(8, 40), [3, 0, 5], experts(3, (40, 17), biases=True), CLAMPED)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(192, 48), (40, 17), (16, 1), (96, 160)], ids=str)
@pytest.mark.parametrize("activation", [SILU, CLAMPED], ids=lambda a: a.kind)
def test_any_width_with_biases(shape: tuple[int, int], activation: Activation) -> None:
    check(rows_of(8, shape[0]), [3, 0, 5], experts(3, shape, biases=True), activation)


@pytest.mark.parametrize(("dtype", "format"), [(torch.float16, "float16"), (torch.float32, "float32")], ids=str)
def test_other_dtypes(dtype: torch.dtype, format: str) -> None:
    check(rows_of(4, 64, dtype), [1, 0, 3], experts(3, (64, 32), dtype), format=format)


@pytest.mark.parametrize("name", some_slow(FORMATS, ("fp8_blocks",)))
def test_stored_formats_equal_the_reference(name: str) -> None:
    check(rows_of(5, 128), [0, 3, 2], stored_experts(3, (128, 64), name))


@pytest.mark.parametrize("name", some_slow(FORMATS, ("mxfp4", "int4_64")))
def test_formats_of_widths_that_no_block_divides(name: str) -> None:
    shape = (96, 32) if name == "mxfp4" else (80, 48)  # whole groups are part of that format
    check(rows_of(3, shape[0]), [0, 1, 2], stored_experts(3, shape, name))


@pytest.mark.parametrize("name", some_slow(["fp8_channel", "fp8_blocks"], ("fp8_channel",)))
def test_fp8_is_decoded_from_bytes_where_the_target_cannot(name: str) -> None:
    weights, rows = stored_experts(2, (128, 64), name), rows_of(3, 128)
    assert_same(check(rows, [1, 2], weights, target=A100), check(rows, [1, 2], weights, target=H200))


def test_many_rows_are_walked_by_few_programs() -> None:
    few = GpuTarget(capability=90, num_sms=3, shared_bytes=H200.shared_bytes)
    counts = [150, 0, 130, 1]
    check(rows_of(281, 32), counts, experts(4, (32, 80), biases=True), target=few)


def test_rows_are_gathered_from_where_they_lie() -> None:
    weights, x = experts(3, (64, 32)), rows_of(4, 64)
    row_tokens, counts = torch.tensor([3, 0, 0, 2, 1, 3], dtype=torch.int32), torch.tensor([2, 3, 1])
    gathered = triton_ffn(x, counts, weights, kernels=ON_H200, row_tokens=row_tokens)
    assert_same(gathered, triton_ffn(x[row_tokens.long()], counts, weights, kernels=ON_H200))


def test_tiles_are_chosen_for_the_rows_that_are_expected() -> None:
    """Of 512 rows that there can be 20 are expected, so tiles have 16 rows, not 128; more may come all the same."""
    weights, rows = experts(2, (64, 32)), rows_of(512, 64)
    counts = torch.tensor([30, 7])
    launches, out = ffn_launches(rows, counts, weights, kernels=ON_H200, expected_rows=20)
    assert {launch.constants.get("BLOCK_M", 16) for launch in launches} == {16}
    for launch in launches:
        launch.run()
    assert_near(out[:37], grouped_ffn_reference(rows[:37], counts, weights), format="bfloat16")


def test_rows_behind_the_last_slots_stand_for_nothing() -> None:
    weights, rows = experts(2, (64, 32)), rows_of(9, 64)
    rows[5:] = torch.nan
    counts = torch.tensor([2, 3])
    padded = triton_ffn(rows, counts, weights, kernels=ON_H200)
    assert_same(padded[:5], triton_ffn(rows[:5].clone(), counts, weights, kernels=ON_H200))
    assert padded[5:].isnan().all()  # as allocated: never written


@pytest.mark.parametrize("activation", [SILU, CLAMPED], ids=lambda a: a.kind)
def test_a_row_that_is_no_number_spoils_no_other(activation: Activation) -> None:
    weights, rows, counts = experts(2, (64, 32)), rows_of(6, 64), torch.tensor([4, 2])
    expected = triton_ffn(rows, counts, weights, activation, kernels=ON_H200)
    rows[1] = torch.nan
    actual = triton_ffn(rows, counts, weights, activation, kernels=ON_H200)
    keep = [0, 2, 3, 4, 5]
    assert actual[1].isnan().all()
    assert_same(actual[keep], expected[keep])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_an_expert_beyond_the_range_of_bf16_spoils_no_row_of_others() -> None:  # P-EP-07
    weights, rows, counts = stored_experts(2, (128, 64), "int4_32"), rows_of(5, 128), torch.tensor([2, 3])
    quiet = triton_ffn(rows, counts, weights, kernels=ON_H200)
    weights.w2.scales[0] = torch.inf  # type: ignore[union-attr]
    actual = triton_ffn(rows, counts, weights, kernels=ON_H200)
    assert not actual[:2].isfinite().any()
    assert_same(actual[2:], quiet[2:])


@pytest.mark.slow
def test_a_row_has_the_same_bits_in_any_batch() -> None:
    weights, rows = experts(3, (64, 48)), rows_of(80, 64)
    slots = torch.arange(80) % 3
    slots = slots.sort().values

    def run(keep: list[int]) -> torch.Tensor:
        counts = torch.bincount(slots[keep], minlength=3)
        return triton_ffn(rows[keep], counts, weights, kernels=GpuKernels(target=H200, batch_invariant=True))

    together = run(list(range(80)))
    for keep in ([0], [79], list(range(10, 50)), list(range(0, 80, 9))):
        assert_same(run(keep), together[keep])
