"""Idle ranks give free memory back to the system."""

from __future__ import annotations

import ctypes
import sys

import numpy as np
import psutil
import pytest

from moewe.runtime.processes.heap import give_back_free_memory

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="malloc_trim is glibc's"
)


def test_holes_between_living_objects_go_back() -> None:
    process = psutil.Process()
    pieces = [np.ones(8 << 10) for _ in range(1024)]  # 64 KiB each: from the heap, not mapped one by one
    kept = pieces[::2]
    del pieces
    before = process.memory_info().rss
    assert give_back_free_memory()
    assert process.memory_info().rss < before - (16 << 20)
    assert all(piece.sum() == 8 << 10 for piece in kept)
