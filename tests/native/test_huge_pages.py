"""Advice about huge pages touches no memory but what it is given, and changes no bytes."""

from __future__ import annotations

import ctypes
import mmap
import sys

import pytest

from moewe.native.huge_pages import advise_huge_pages, map_huge

HUGE = 2 << 20


def advised_bytes(address: int, num_bytes: int) -> int:
    """Bytes of mappings within a range that the kernel has the advice for (`hg` among their flags)."""
    found, begin, end = 0, 0, 0
    with open("/proc/self/smaps") as file:
        for line in file:
            first = line.split(maxsplit=1)[0]
            if "-" in first and not first.endswith(":"):
                begin, end = (int(part, 16) for part in first.split("-"))
            elif first == "VmFlags:" and "hg" in line.split():
                found += max(0, min(end, address + num_bytes) - max(begin, address))
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="advice is for Linux")
def test_whole_huge_pages_inside_are_advised_and_no_byte_around() -> None:
    memory = mmap.mmap(-1, 5 * HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory[:8], memory[-8:] = b"before__", b"behind__"
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    start = -(-base // HUGE) * HUGE
    advise_huge_pages(start + 4096, 3 * HUGE)  # holds two whole ones
    if not advised_bytes(base, 5 * HUGE):
        pytest.skip("this kernel has no huge pages to advise")
    assert advised_bytes(start + HUGE, 2 * HUGE) == advised_bytes(base, 5 * HUGE) == 2 * HUGE
    assert memory[:8] == b"before__" and memory[-8:] == b"behind__"


def test_memory_smaller_than_a_huge_page_is_left_alone() -> None:
    advise_huge_pages(4096, HUGE)  # the kernel would refuse, or do harm: nobody has this memory
    advise_huge_pages(0, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="advice is for Linux")
@pytest.mark.parametrize(
    ("num_bytes", "huge"), [(HUGE, HUGE), (HUGE + 4096, HUGE), (2 * HUGE - 4096, 2 * HUGE), (64, 0)]
)
def test_mapped_memory_begins_at_a_huge_page_and_wastes_little(num_bytes: int, huge: int) -> None:
    memory = map_huge(num_bytes)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert address % HUGE == 0 and len(memory) == num_bytes
    advised = advised_bytes(address, 2 * HUGE)
    if huge and not advised:
        pytest.skip("this kernel has no huge pages to advise")
    assert advised == huge
    memory[:1], memory[-1:] = b"a", b"z"
