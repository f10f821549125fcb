"""`triton_norm` and `triton_add_normed` against torch in fp64, and bit by bit where sums are exact."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from moewe.models.kernels.norm import triton_add_normed, triton_norm
from moewe.models.layers import rms_norm
from moewe.moe.kernels.combine import ExpertRows
from tests.support.numerics import assert_near, assert_same
from tests.support.poisoned import assert_untouched

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)


def exact(rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows whose squares add up without rounding, in any order."""
    return torch.randint(-8, 9, (rows, width)).to(dtype) / 4


@DTYPES
@pytest.mark.parametrize("width", [1, 33, 256, 1000])
def test_norms_are_near_those_in_double_precision(width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(width)
    x, weight, bias = ((torch.randn(*shape) * 3).to(dtype) for shape in [(3, width), (width,), (width,)])
    name = str(dtype).removeprefix("torch.")
    got = assert_untouched(lambda *given: triton_norm(*given, eps=1e-5), x, weight)
    assert_near(got, F.rms_norm(x.double(), (width,), weight.double(), 1e-5), format=name)
    got = assert_untouched(lambda *given: triton_norm(*given, eps=1e-5), x, weight, bias)
    assert_near(got, F.layer_norm(x.double(), (width,), weight.double(), bias.double(), 1e-5), format=name)


@DTYPES
def test_rms_norm_rounds_where_torch_does(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = exact(5, 96, dtype), torch.randn(96).to(dtype)
    assert_near(triton_norm(x, weight, eps=1e-6), rms_norm(x, weight, 1e-6), format="float32")


@pytest.mark.parametrize("multiplier", [1.0, 0.22])
def test_what_a_block_adds_is_written_to_the_stream_and_normed(multiplier: float) -> None:
    torch.manual_seed(0)
    x, added, weight = (torch.randn(*shape).bfloat16() for shape in [(4, 33), (4, 33), (33,)])
    summed = x + (added if multiplier == 1.0 else added * multiplier)
    stream = x.clone()
    got = triton_norm(stream, weight, eps=1e-6, added=added, multiplier=multiplier)
    assert_same(stream, summed)
    assert_same(got, triton_norm(summed, weight, eps=1e-6))
    normed = triton_norm(added, weight, eps=1e-6)
    triton_add_normed(stream, added, weight, eps=1e-6, multiplier=multiplier)
    assert_same(stream, summed + (normed if multiplier == 1.0 else normed * multiplier))


@pytest.mark.parametrize("has_shared", [False, True])
@pytest.mark.parametrize("multiplier", [1.0, 0.22])
def test_rows_of_experts_are_added_up_on_the_way_to_the_same_bits(multiplier: float, has_shared: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    stream, rows, shared = (torch.randn(n, 70, generator=generator).bfloat16() for n in (3, 7, 3))
    row_of = torch.tensor([[4, 0, -1], [6, 2, 1], [-1, -1, -1]], dtype=torch.int32)
    experts = ExpertRows(rows, torch.rand(3, 3, generator=generator), row_of, shared if has_shared else None)
    weight = torch.randn(70, generator=generator).bfloat16()
    apart, summed = stream.clone(), experts.sum()
    want = triton_norm(apart, weight, eps=1e-6, added=summed, multiplier=multiplier)
    assert_same(triton_norm(stream, weight, eps=1e-6, added=experts, multiplier=multiplier), want)
    assert_same(stream, apart)
    triton_add_normed(apart, summed, weight, eps=1e-6, multiplier=multiplier)
    triton_add_normed(stream, experts, weight, eps=1e-6, multiplier=multiplier)
    assert_same(stream, apart)


def test_a_row_has_the_same_bits_alone_and_no_rows_are_nothing() -> None:
    torch.manual_seed(1)
    x, weight = torch.randn(9, 640).bfloat16(), torch.randn(640).bfloat16()
    together = triton_norm(x, weight, eps=1e-6)
    assert_same(triton_norm(x[7:8], weight, eps=1e-6)[0], together[7])
    assert triton_norm(x[:0], weight, eps=1e-6).shape == (0, 640)


def test_a_number_that_is_not_finite_stays_in_its_row() -> None:
    x = torch.ones(3, 40)
    x[1, 7] = torch.nan
    got = triton_norm(x, torch.ones(40), eps=1e-6)
    assert got[1].isnan().all() and got[[0, 2]].isfinite().all()
