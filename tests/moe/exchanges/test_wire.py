"""Rows on a link: what fp8 loses and what it must not touch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moewe.moe.wide_ep.exchanges.wire import Fp8Payload, PlainPayload, pack, unpack


def through(x: torch.Tensor) -> torch.Tensor:
    payload = Fp8Payload()
    return payload.decode(payload.encode(x), x.dtype, x.shape[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_header_and_a_row_come_back(dtype: torch.dtype) -> None:
    x, numbers = torch.randn(5, 7).to(dtype), torch.arange(15, dtype=torch.int32).view(5, 3) - 7
    payload = PlainPayload()
    header, body = unpack(pack(numbers, payload.encode(x)), 3)
    assert torch.equal(header, numbers) and torch.equal(payload.decode(body, dtype, 7), x)


@settings(max_examples=80, deadline=None)
@given(
    width=st.integers(1, 300),
    num_rows=st.integers(0, 4),
    scale=st.sampled_from([1e-20, 1e-3, 1.0, 300.0, 1e20]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_fp8_is_off_by_a_sixteenth_at_most(
    width: int, num_rows: int, scale: float, dtype: torch.dtype, seed: int
) -> None:
    x = (torch.randn(num_rows, width, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)
    came = through(x)
    assert came.dtype == dtype and came.shape == x.shape
    padded = torch.nn.functional.pad(x.double(), (0, -width % 128)).unflatten(1, (-1, 128))
    step = (padded.abs().amax(2, keepdim=True) / 448).expand_as(padded).flatten(1)[:, :width]
    allowed = torch.maximum(x.double().abs() / 16, step / 1024) * (1 + 2**-7)  # and the rounding to bf16
    assert bool(((came.double() - x.double()).abs() <= allowed).all())


def test_of_normal_rows_fp8_loses_what_the_page_says() -> None:
    """docs/decisions/021: 2.6 % root mean square, cosine 0.9997."""
    x = torch.randn(512, 2048, generator=torch.Generator().manual_seed(0))
    came = through(x)
    error = float((came - x).pow(2).mean().sqrt() / x.pow(2).mean().sqrt())
    cosine = float(torch.nn.functional.cosine_similarity(came, x).min())
    assert error == pytest.approx(0.026, abs=0.0015) and cosine > 0.9996


def test_a_column_block_has_its_own_scale() -> None:
    x = torch.cat((torch.full((1, 128), 1e-6), torch.full((1, 128), 1e6)), 1)
    assert torch.allclose(through(x), x, rtol=1e-3)


def test_zeros_stay_and_what_is_not_finite_stays_so_in_its_row() -> None:
    x = torch.ones(4, 256, dtype=torch.bfloat16)
    x[0] = 0
    x[1, 3], x[2, 200] = torch.nan, torch.inf
    x[0, 5] = 1e-38
    came = through(x)
    assert not came[0].any()
    assert not came[1, 3].isfinite() and not came[2, 200].isfinite()
    assert (
        torch.equal(came[3], x[3]) and torch.equal(came[1, 128:], x[1, 128:]) and torch.equal(came[2, :128], x[2, :128])
    )


def test_a_row_in_fp8_takes_a_byte_a_number_and_a_scale_for_128() -> None:
    assert Fp8Payload().encode(torch.ones(2, 4096)).shape == (2, 4096 + 4 * 32)
    assert Fp8Payload().encode(torch.ones(2, 130)).shape == (2, 130 + 4 * 2)
