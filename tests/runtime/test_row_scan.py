"""The best of rows and their health, natively and with torch: the same answers on every width and kind of number."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moewe.runtime.ranks import row_scan
from moewe.runtime.ranks.row_scan import RowScanner, best_tokens, finite_rows

INF, NAN = float("inf"), float("nan")
PATHS = ["native", "torch"]


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setattr(row_scan, "load", lambda: None)
    elif row_scan.load() is None:
        pytest.skip("no native kernels here")
    return request.param


def test_finite_rows_finds_each_kind_wherever_it_stands(path: str) -> None:
    for width in (1, 2, 16, 31, 32, 33, 100):
        for dtype in (torch.float32, torch.bfloat16):
            for ill in (INF, -INF, NAN):
                for place in {0, width // 2, width - 1}:
                    values = torch.full((3, width), 3e38, dtype=dtype)
                    values[1, place] = ill
                    assert finite_rows(values).tolist() == [True, False, True], (width, dtype, ill, place)
    assert finite_rows(torch.empty(0, 5)).tolist() == []


def test_the_first_of_equal_ones_is_best(path: str) -> None:
    for width in (1, 15, 16, 17, 64, 1000):
        for first in {0, width // 3, width - 1}:
            values = torch.full((2, width), -INF)
            values[0, first:] = 2.0
            values[1, first] = -1e30
            assert best_tokens(values).tolist() == [first, first], (width, first)
    assert best_tokens(torch.full((1, 20), -INF)).tolist() == [0]


@given(
    rows=st.integers(0, 5),
    width=st.integers(1, 70),
    seed=st.integers(0, 1000),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_native_equals_torch(rows: int, width: int, seed: int, dtype: torch.dtype) -> None:
    made = torch.Generator().manual_seed(seed)
    values = torch.randint(-9, 9, (rows, width), generator=made).to(dtype)  # many ties
    numpy = values.float().numpy()
    assert best_tokens(values).tolist() == numpy.argmax(-1).tolist()
    assert finite_rows(values).all()


def test_both_at_once_are_what_each_is(path: str) -> None:
    scan = RowScanner()
    for rows in (5, 5, 7):  # the same arrays again, then larger ones
        logits = torch.randn(rows, 100)
        logits[1, 7], logits[3, 99] = NAN, INF
        best, finite = scan(logits)
        assert finite.tolist() == finite_rows(logits).tolist() == [row not in (1, 3) for row in range(rows)]
        assert best[finite].tolist() == best_tokens(logits).numpy()[finite].tolist()
    assert scan(torch.zeros(0, 100))[0].shape == (0,)
