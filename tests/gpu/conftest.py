"""Kernels for GPUs on a machine without one: their values in Triton's interpreter, over poisoned memory.

The interpreter is chosen in tests/conftest.py, before anything can import Triton. Compiling (test_compiled.py) is done
in processes of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from moewe.native.gpu import interpreting
from tests.support.poisoned import poisoned_memory


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    assert interpreting(), "tests/conftest.py must set TRITON_INTERPRET before Triton is imported"
    with poisoned_memory():
        yield
