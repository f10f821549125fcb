"""How much of a stretch of this process's memory is there, and not only mapped: what was never written takes no room.

Not an allocator and not the process as a whole (telemetry/memory.py). Units: bytes.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from functools import cache

import numpy as np

_PIECE_BYTES = 1 << 30  # looked at in one call, which answers with a byte a page


@cache
def _libc() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    library.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    return library


def resident_bytes(address: int, num_bytes: int) -> int:
    """Return how many bytes of the pages of [address, address + num_bytes) are in memory; all where nobody says.

    A page that the stretch only touches counts as a whole. Takes some milliseconds for 10 GiB.
    """
    if sys.platform != "linux" or num_bytes <= 0:
        return max(0, num_bytes)
    page = mmap.PAGESIZE
    at, end = address // page * page, -(-(address + num_bytes) // page) * page
    found = 0
    pages = np.empty(min(end - at, _PIECE_BYTES) // page, np.uint8)  # bit 0: it is there
    while at < end:
        length = min(end - at, _PIECE_BYTES)
        if _libc().mincore(at, length, pages.ctypes.data) != 0:
            return num_bytes
        found += int(np.count_nonzero(pages[: length // page] & 1)) * page
        at += length
    return found
