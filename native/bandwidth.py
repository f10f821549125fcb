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

_MAX_BUFFER_BYTES = 8 << 30
_MIN_BUFFER_BYTES = 16 << 20
_FALLBACK_LLC_BYTES = 32 << 20
# Caches that do not evict what was used least recently keep a part of a buffer that is read in circles: of one that is
# four times their size a quarter at most. Below twice their size the figure is not called one of memory.
_WANTED_CACHES, _LEAST_CACHES = 4, 2
_ALONE_CACHES = 1.5
_FREE_SHARE = 8  # of the free memory one of so many parts
# Where the machine hands out memory slowly, four times the caches are not worth a slow start, but twice are.
_FILL_SECONDS, _MOST_FILL_SECONDS = 1.0, 15.0
_PASS_SECONDS = 0.8
_LEAST_PASSES = 4
_PIECE_ELEMENTS = (16 << 20) // 8
# Passes that end later only keep the memory busy for ranks that began a little later.
_COUNTED_SHARE = 0.75
_CPUS = Path("/sys/devices/system/cpu")


@dataclass(frozen=True)
class Bandwidth:
    """What was measured.

    Attributes:
        bytes_per_second: best of several passes over the buffer.
        buffer_bytes: size of the buffer; smaller than wanted where there is little memory, or it is handed out slowly.
        cache_resident: all buffers that were read at the time are under twice the last-level caches, so that the figure
            is partly or wholly that of caches and not the memory's.
    """

    bytes_per_second: float
    buffer_bytes: int
    cache_resident: bool


@cache
def llc_bytes(cpus: Path = _CPUS) -> int:
    """Return the size of all last-level caches of the machine together (32 MiB where the kernel does not say).

    Args:
        cpus: the kernel's folder of CPUs (tests).
    """
    caches: dict[str, int] = {}  # the CPUs that share one -> its bytes
    for cpu in sorted(cpus.glob("cpu[0-9]*")):
        levels: dict[int, tuple[str, int]] = {}
        for index in cpu.glob("cache/index*"):
            try:
                shared = (index / "shared_cpu_list").read_text().strip() or cpu.name
                levels[int((index / "level").read_text())] = shared, _parse_size((index / "size").read_text().strip())
            except (OSError, ValueError, LookupError):
                continue  # an entry that the kernel does not fill in says nothing
        if levels:
            shared, size = levels[max(levels)]
            caches[shared] = size
    return sum(caches.values()) or _FALLBACK_LLC_BYTES


def buffer_size(llc: int, free_bytes: int, sharers: int = 1) -> int:
    """Return how many bytes each of `sharers` ranks streams: four times the caches together, and 1.5 times each.

    Within an eighth of the free memory and 8 GiB; at least 16 MiB.

    Example:
        >>> buffer_size(64 << 20, 16 << 30) >> 20
        256
    """
    most = max(_MIN_BUFFER_BYTES, min(_MAX_BUFFER_BYTES, free_bytes // _FREE_SHARE))
    wanted = max(_WANTED_CACHES * llc // sharers, int(_ALONE_CACHES * llc))
    return max(_MIN_BUFFER_BYTES, min(wanted, most))


def least_free_bytes(llc: int) -> int:
    """Return how much memory must be free so that a buffer is not called one of caches."""
    return _FREE_SHARE * _LEAST_CACHES * llc


def measure_read_bandwidth(
    threads: int,
    free_bytes: int,
    fill_seconds: float = _FILL_SECONDS,
    *,
    most_fill_seconds: float = _MOST_FILL_SECONDS,
    sharers: int = 1,
    pass_seconds: float = _PASS_SECONDS,
) -> Bandwidth:
    """Return how fast `threads` threads together read memory; takes a second or two, half of it to get the memory.

    Args:
        threads: at least 1; each reads its own part of the buffer, which it also touched first.
        free_bytes: memory that this call may look at; those that measure at the same time each name their share.
        fill_seconds: how long to wait for memory; where it comes slowly, the buffer is smaller than wanted.
        most_fill_seconds: how long until there is twice the caches.
        sharers: how many calls measure at the same time, this one included.
        pass_seconds: for how long to read, at least; longer where that is not enough for some passes.
    """
    if threads < 1:
        raise ValueError(f"threads={threads} is not allowed; use at least 1")
    wanted = buffer_size(llc_bytes(), free_bytes, sharers)
    least = min(wanted, _LEAST_CACHES * llc_bytes() // sharers + 1)
    buffer = _Buffer(wanted, least, fill_seconds, max(fill_seconds, most_fill_seconds))
    library = load()
    rate, num_bytes = (0.0, 0) if library is None else _read_natively(library, threads, buffer, pass_seconds)
    if not rate:
        rate, num_bytes = _read_with_numpy(threads, buffer, pass_seconds)
    in_cache = num_bytes * sharers < _LEAST_CACHES * llc_bytes()
    return Bandwidth(bytes_per_second=rate, buffer_bytes=num_bytes, cache_resident=in_cache)


@dataclass(frozen=True)
class _Buffer:
    """What to get: `wanted` bytes within `seconds`, and within `most_seconds` until `least` are there."""

    wanted: int
    least: int
    seconds: float
    most_seconds: float


def _read_natively(library: ctypes.CDLL, threads: int, buffer: _Buffer, pass_seconds: float) -> tuple[float, int]:
    """Return bytes/s and the bytes that were read in a pass; 0 when there is no memory."""
    function = library.moewe_read_rate
    function.argtypes = [ctypes.c_int, *(ctypes.c_int64,) * 2, *(ctypes.c_double,) * 3, ctypes.c_void_p]
    function.restype = ctypes.c_double
    read = ctypes.c_int64()
    times = buffer.seconds, buffer.most_seconds, pass_seconds
    rate = float(function(threads, buffer.wanted, buffer.least, *times, ctypes.byref(read)))
    return rate, read.value


def _read_with_numpy(threads: int, buffer: _Buffer, pass_seconds: float) -> tuple[float, int]:
    """The same without native code."""
    parts = np.array_split(np.empty(buffer.wanted // 8), threads)
    best = float("inf")
    with ThreadPoolExecutor(threads) as pool:
        parts = list(pool.map(lambda part: _touched(part, buffer, threads), parts))
        num_bytes = sum(part.nbytes for part in parts)
        now = begin = time.perf_counter()
        end, passes = begin + pass_seconds, 0
        while now < end:
            start = now
            list(pool.map(np.sum, parts))
            now = time.perf_counter()
            passes += 1
            if passes <= _LEAST_PASSES or now <= begin + _COUNTED_SHARE * pass_seconds:
                best = min(best, now - start)
                end = max(end, begin + (now - begin) / _COUNTED_SHARE)
    return num_bytes / best, num_bytes


def _touched(part: np.ndarray, buffer: _Buffer, threads: int) -> np.ndarray:
    """Write as much of `part` as the time allows and return that much.

    Untouched pages all map to one page of zeros, which would be read from cache.
    """
    start, done = time.perf_counter(), 0
    while done < len(part):
        patience = buffer.most_seconds if done * part.itemsize * threads < buffer.least else buffer.seconds
        if done and time.perf_counter() - start >= patience:
            break
        part[done : done + _PIECE_ELEMENTS] = 1.0
        done += _PIECE_ELEMENTS
    return part[:done]


def _parse_size(text: str) -> int:
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    return int(text[:-1]) * units[text[-1]] if text[-1] in units else int(text)
