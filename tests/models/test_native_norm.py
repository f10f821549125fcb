"""The native norms against torch: at bf16 tolerance, bitwise where sums are exact, and the same bits for any rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from moewe.models.layers import rms_norm
from moewe.models.native_norm import NativeNorm
from moewe.native.library import load
from tests.support.numerics import assert_near, assert_same

pytestmark = pytest.mark.skipif(load() is None, reason="no native kernels here")
WIDTHS = [1, 15, 16, 33, 96, 640, 1000]


def bf16(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape) * scale).bfloat16()


def exact(rows: int, width: int) -> torch.Tensor:
    """Rows whose squares add up without rounding, in any order."""
    return torch.randint(-8, 9, (rows, width)).bfloat16() / 4


@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm_has_the_bits_of_torch_where_the_sum_is_exact(width: int) -> None:
    torch.manual_seed(width)
    x, weight = exact(7, width), bf16(width)
    assert_same(NativeNorm("rms", weight, eps=1e-6)(x), rms_norm(x, weight, 1e-6))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_norms_are_near_those_in_double_precision(kind: str, width: int) -> None:
    torch.manual_seed(width)
    x, weight = bf16(5, width, scale=3.0), bf16(width)
    bias = bf16(width) if kind == "layer" else None
    wide = x.double()
    if bias is None:
        expected = F.rms_norm(wide, (width,), weight.double(), 1e-5)
    else:
        expected = F.layer_norm(wide, (width,), weight.double(), bias.double(), 1e-5)
    assert_near(NativeNorm(kind, weight, bias, eps=1e-5)(x), expected, format="bfloat16")


@pytest.mark.parametrize("multiplier", [1.0, 0.22])
@pytest.mark.parametrize("width", [33, 640])
def test_what_a_block_adds_is_written_to_the_stream_and_normed(width: int, multiplier: float) -> None:
    torch.manual_seed(0)
    x, added, weight = bf16(9, width), bf16(9, width), bf16(width)
    call = NativeNorm("rms", weight, eps=1e-6, multiplier=multiplier)
    summed = x + (added if multiplier == 1.0 else added * multiplier)
    alone = call(summed.clone())
    got = call(x, added)
    assert_same(x, summed)
    assert_same(got, alone)
    normed = call(added.clone())
    expected = summed + (normed if multiplier == 1.0 else normed * multiplier)
    call.add_normed(x, added)
    assert_same(x, expected)


@pytest.mark.parametrize("width", [15, 96, 1000])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_a_row_has_the_same_bits_alone_among_others_and_on_two_threads(kind: str, width: int) -> None:
    torch.manual_seed(1)
    x, weight = bf16(19, width), bf16(width)
    call = NativeNorm(kind, weight, bf16(width) if kind == "layer" else None, eps=1e-6)
    together = call(x)
    library = load()
    assert library is not None
    library.moewe_set_threads(2)
    try:
        assert_same(call(x), together)
    finally:
        library.moewe_set_threads(1)
    for row in (0, 7, 18):
        assert_same(call(x[row : row + 1].clone())[0], together[row])


def test_rows_in_tiles_have_zeros_around_them() -> None:
    torch.manual_seed(2)
    rows, width = 19, 40
    x = bf16(rows, width)
    call = NativeNorm("rms", bf16(width), eps=1e-6)
    expected = torch.zeros(32, 64, dtype=torch.bfloat16)
    expected[:rows, :width] = call(x)
    tiles = torch.full((2, 2, 16, 32), torch.nan, dtype=torch.bfloat16)
    call.args.tiles = 1
    call._run(x, None, tiles)
    assert_same(tiles.transpose(1, 2).reshape(32, 64), expected)


def test_a_row_that_is_not_finite_spoils_no_other() -> None:
    torch.manual_seed(3)
    x = bf16(3, 64)
    call = NativeNorm("rms", bf16(64), eps=1e-6)
    expected = call(x)
    x[1, 5] = torch.nan
    got = call(x)
    assert got[1].isnan().all()
    assert_same(got[::2], expected[::2])
