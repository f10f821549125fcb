"""Asks the kernel for huge pages under memory that is read from end to end: weights.

Not an allocator: it advises about memory that somebody holds and has not touched yet, and is free to be ignored. With
pages of 4 KiB a stream of weights waits for the page tables, in a virtual machine twice. Units: bytes.
"""

from __future__ import annotations

import ctypes
import mmap
import sys

_HUGE = 2 << 20  # of x86-64


def advise_huge_pages(address: int, num_bytes: int) -> None:
    """Let [address, address + num_bytes) lie in huge pages, as far as it holds whole ones; on Linux only."""
    first, last = -(-address // _HUGE) * _HUGE, (address + num_bytes) // _HUGE * _HUGE
    if last > first and sys.platform == "linux":
        arguments = ctypes.c_void_p(first), ctypes.c_size_t(last - first), ctypes.c_int(mmap.MADV_HUGEPAGE)
        ctypes.CDLL(None).madvise(*arguments)
