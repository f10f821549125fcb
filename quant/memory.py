"""Memory of matrices on the CPU: tensors that begin at a huge page, and small ones that share one.

Not packing and not a pool: memory goes back when the tensors in it are gone. Units: bytes.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from math import prod

import torch

from ..native.huge_pages import map_huge

_LEAST = 1 << 20  # smaller tensors of unknown life are the C library's
_CHUNK = 32 << 20  # where lasting ones lie side by side
_LINE = 64  # bytes of a cache line; vector loads of tiles are aligned to it
_own = threading.local()  # of each rank, where ranks are threads: what is left of its last chunk


def empty_matrix(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialised tensor whose memory goes back as soon as it is gone."""
    num_bytes = prod(shape) * dtype.itemsize
    if num_bytes < _LEAST or sys.platform != "linux":
        return torch.empty(*shape, dtype=dtype)
    return _tensor(map_huge(num_bytes), shape, dtype)


def empty_lasting(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialised tensor that is held for good: small ones lie side by side and keep each other alive."""
    num_bytes = prod(shape) * dtype.itemsize
    if not 0 < num_bytes <= _CHUNK // 4 or sys.platform != "linux":
        return empty_matrix(shape, dtype)
    left: memoryview = getattr(_own, "left", memoryview(b""))
    if len(left) < num_bytes:
        left = map_huge(_CHUNK)
    _own.left = left[-(-num_bytes // _LINE) * _LINE :]
    return _tensor(left[:num_bytes], shape, dtype)


def _tensor(memory: memoryview, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(*shape)
