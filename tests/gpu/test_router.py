"""`triton_router` against torch in fp64."""

from __future__ import annotations

import pytest
import torch

from moewe.moe.kernels.router import triton_router
from tests.support.numerics import assert_near, assert_same
from tests.support.poisoned import assert_untouched


@pytest.mark.parametrize(("rows", "experts", "width"), [(1, 8, 512), (5, 7, 96), (9, 1, 1030)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_logits_are_near_those_in_double_precision(rows: int, experts: int, width: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(rows)
    x, weight = (torch.randn(n, width, generator=generator) for n in (rows, experts))
    x, bias = x.to(dtype), torch.randn(experts, generator=generator)
    for given in (None, bias):
        got = assert_untouched(lambda *held, bias=given: triton_router(*held, bias), x, weight)
        want = x.double() @ weight.double().T + (0 if given is None else given.double())
        assert_near(got, want, format="float32")


def test_a_row_has_the_same_bits_alone_and_no_rows_are_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 700, generator=generator) for n in (6, 5))
    assert_same(triton_router(x[4:5], weight)[0], triton_router(x, weight)[4])
    assert triton_router(x[:0], weight).shape == (0, 5)
