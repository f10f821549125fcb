"""Memory in huge pages for what is read from end to end: weights.

Not an allocator of tensors (quant/memory.py): it maps bytes and gives advice, which the kernel is free to ignore. With
pages of 4 KiB a stream of weights waits for the page tables, in a virtual machine twice. Units: bytes.
"""

from __future__ import annotations

import ctypes
import mmap
import sys

HUGE = 2 << 20  # of x86-64


def advise_huge_pages(address: int, num_bytes: int) -> None:
    """Let [address, address + num_bytes) lie in huge pages, as far as it holds whole ones; on Linux only.

    Not yet touched memory, that is: pages that are there stay what they are.
    """
    first, last = -(-address // HUGE) * HUGE, (address + num_bytes) // HUGE * HUGE
    if last > first and sys.platform == "linux":
        arguments = ctypes.c_void_p(first), ctypes.c_size_t(last - first), ctypes.c_int(mmap.MADV_HUGEPAGE)
        ctypes.CDLL(None).madvise(*arguments)


def map_huge(num_bytes: int) -> memoryview:
    """Return memory of its own that begins at a huge page; it goes back when nobody holds it or a part of it.

    The last page is a huge one only where it would be full by three quarters, so that little is held for nothing.
    """
    whole = -(-num_bytes // HUGE) * HUGE
    memory = mmap.mmap(-1, whole + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    start = -base % HUGE
    full = whole - num_bytes <= HUGE // 4
    advise_huge_pages(base + start, whole if full else num_bytes)
    return memoryview(memory)[start : start + num_bytes]
