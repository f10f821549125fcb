"""Measures how fast this machine's memory can be read: the ceiling that saturation is a share of.

Not a hardware table and not a counter of a running engine. Native code streams a buffer; where there is none, numpy
sums it without the interpreter lock, which reaches less.
Ranks that share a memory share its ceiling: they measure at the same time (runtime/worker.py has them begin together).
Units: bytes, bytes/s.
"""

from __future__ import annotations

import ctypes
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from .library import load

_MAX_BUFFER_BYTES = 1 << 30
_MIN_BUFFER_BYTES = 16 << 20
_FALLBACK_LLC_BYTES = 32 << 20
_FILL_SECONDS = 0.6
_PASS_SECONDS = 0.4
_PIECE_ELEMENTS = (16 << 20) // 8
# Passes that end later only keep the memory busy for ranks that began a little later.
_COUNTED_SHARE = 0.75


@dataclass(frozen=True)
class Bandwidth:
    """What was measured.

    Attributes:
        bytes_per_second: best of several passes over the buffer.
        buffer_bytes: size of the buffer; smaller than wanted where the machine hands out pages slowly.
        cache_resident: the buffer fits the last-level cache, so that the figure is the cache's and not the memory's.
    """

    bytes_per_second: float
    buffer_bytes: int
    cache_resident: bool


@cache
def llc_bytes() -> int:
    """Return the size of the last-level cache that the first CPU sees (32 MiB where the kernel does not say)."""
    sizes: dict[int, int] = {}
    for index in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        try:
            level = int((index / "level").read_text())
            sizes[level] = _parse_size((index / "size").read_text().strip())
        except (OSError, ValueError):
            continue  # an entry that the kernel does not fill in says nothing
    return sizes[max(sizes)] if sizes else _FALLBACK_LLC_BYTES


def buffer_size(llc: int, free_bytes: int) -> int:
    """Return how many bytes to stream: twice the cache, within 1 GiB and an eighth of the free memory.

    Example:
        >>> buffer_size(64 << 20, 16 << 30) >> 20
        128
    """
    most = max(_MIN_BUFFER_BYTES, min(_MAX_BUFFER_BYTES, free_bytes // 8))
    return max(_MIN_BUFFER_BYTES, min(2 * llc, most))


def measure_read_bandwidth(threads: int, free_bytes: int, fill_seconds: float = _FILL_SECONDS) -> Bandwidth:
    """Return how fast `threads` threads together read memory; takes about a second, most of it to get the memory.

    Args:
        threads: at least 1; each reads its own part of the buffer, which it also touched first.
        free_bytes: memory that this call may look at; those that measure at the same time each name their share.
        fill_seconds: how long to wait for memory at most; where it comes slowly, the buffer is smaller than wanted.
    """
    if threads < 1:
        raise ValueError(f"threads={threads} is not allowed; use at least 1")
    wanted = buffer_size(llc_bytes(), free_bytes)
    library = load()
    rate, num_bytes = (0.0, 0) if library is None else _read_natively(library, threads, wanted, fill_seconds)
    if not rate:
        rate, num_bytes = _read_with_numpy(threads, wanted, fill_seconds)
    return Bandwidth(bytes_per_second=rate, buffer_bytes=num_bytes, cache_resident=num_bytes <= llc_bytes())


def _read_natively(library: ctypes.CDLL, threads: int, num_bytes: int, fill_seconds: float) -> tuple[float, int]:
    """Return bytes/s and the bytes that were read in a pass; 0 when there is no memory."""
    function = library.moewe_read_rate
    function.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_double, ctypes.c_double, ctypes.c_void_p]
    function.restype = ctypes.c_double
    read = ctypes.c_int64()
    rate = float(function(threads, num_bytes, fill_seconds, _PASS_SECONDS, ctypes.byref(read)))
    return rate, read.value


def _read_with_numpy(threads: int, num_bytes: int, fill_seconds: float) -> tuple[float, int]:
    """The same without native code."""
    parts = np.array_split(np.empty(num_bytes // 8), threads)
    best = float("inf")
    with ThreadPoolExecutor(threads) as pool:
        parts = list(pool.map(lambda part: _touched(part, fill_seconds), parts))
        num_bytes = sum(part.nbytes for part in parts)
        now = begin = time.perf_counter()
        while now < begin + _PASS_SECONDS:
            start = now
            list(pool.map(np.sum, parts))
            now = time.perf_counter()
            if best == float("inf") or now <= begin + _COUNTED_SHARE * _PASS_SECONDS:
                best = min(best, now - start)
    return num_bytes / best, num_bytes


def _touched(part: np.ndarray, seconds: float) -> np.ndarray:
    """Write as much of `part` as the time allows and return that much.

    Untouched pages all map to one page of zeros, which would be read from cache.
    """
    deadline = time.perf_counter() + seconds
    done = 0
    while done < len(part) and (done == 0 or time.perf_counter() < deadline):
        part[done : done + _PIECE_ELEMENTS] = 1.0
        done += _PIECE_ELEMENTS
    return part[:done]


def _parse_size(text: str) -> int:
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    return int(text[:-1]) * units[text[-1]] if text[-1] in units else int(text)
