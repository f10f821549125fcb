"""The matrix rate is a plausible figure where there are native kernels, and unknown where there are none."""

from __future__ import annotations

import pytest

from moewe.native import matrix_rate
from moewe.native.matrix_rate import measure_matrix_rate
from tests.support.native import needs_native


@needs_native
def test_a_plausible_figure() -> None:
    rate = measure_matrix_rate(2, 0.001)
    assert rate is not None and rate.threads == 2
    assert 1e8 < rate.bf16 < 1e16 and 1e8 < rate.int8 < 1e16
    assert rate.by_format() == {"bfloat16": rate.bf16, "int8": rate.int8}


def test_unknown_without_native_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix_rate, "load", lambda: None)
    assert measure_matrix_rate(1) is None


def test_no_threads_is_refused() -> None:
    with pytest.raises(ValueError, match="threads=0"):
        measure_matrix_rate(0)
