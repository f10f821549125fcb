"""Gives memory that the C library keeps for later back to the system: what a rank does when nobody asks it anything.

Not a cache of anybody's objects and not the KV pool. glibc keeps up to 64 MiB of what was freed at the end of its heap,
and more in between, so that a rank's resident memory tells of the largest step that ever was.
"""

from __future__ import annotations

import ctypes
import sys


def give_back_free_memory() -> bool:
    """Return whether the C library knows how (glibc does). It takes some milliseconds, so do it when idle."""
    if sys.platform != "linux":
        return False
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:  # another C library, such as musl
        return False
    trim(ctypes.c_size_t(0))
    return True
