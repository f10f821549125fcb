"""Measures how many operations/s matrix products reach in cache: the ceiling of what the memory does not bind.

Not memory (bandwidth.py) and not a kernel of any model. Nothing is known without native code.
Units: operations/s; a multiplication and an addition are two.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from .library import load

_PASS_SECONDS = 0.1
_FORMATS = {"bf16": 0, "int8": 1}  # as csrc/matrix_rate.cpp counts them


@dataclass(frozen=True)
class MatrixRate:
    """What was measured.

    Attributes:
        threads: how many worked together.
        bf16: products of bf16 numbers, added up in f32.
        int8: products of int8 numbers, added up in int32.
    """

    threads: int
    bf16: float
    int8: float

    def by_format(self) -> dict[str, float]:
        """Return the rates by the name that the number format has in metrics."""
        return {"bfloat16": self.bf16, "int8": self.int8}


def measure_matrix_rate(threads: int, pass_seconds: float = _PASS_SECONDS) -> MatrixRate | None:
    """Return what `threads` threads reach together, in about a quarter of a second; None without native code.

    Args:
        threads: at least 1.
        pass_seconds: for how long each format is multiplied.
    """
    if threads < 1:
        raise ValueError(f"threads={threads} is not allowed; use at least 1")
    library = load()
    if library is None:
        return None
    function = library.moewe_matrix_rate
    function.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_double]
    function.restype = ctypes.c_double
    rates = {name: float(function(threads, number, pass_seconds)) for name, number in _FORMATS.items()}
    return MatrixRate(threads, **rates)
