"""Memory that was mapped and never written is not there."""

from __future__ import annotations

import ctypes
import mmap

import pytest

from moewe.native import resident
from moewe.native.resident import resident_bytes

PAGE = mmap.PAGESIZE


@pytest.mark.parametrize("piece", [1 << 30, 8 * PAGE], ids=["at once", "in pieces"])
def test_only_written_pages_count(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(resident, "_PIECE_BYTES", piece)
    memory = mmap.mmap(-1, 20 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    view = ctypes.c_char.from_buffer(memory)
    address = ctypes.addressof(view)
    assert resident_bytes(address, 20 * PAGE) == 0
    for page in (2, 3, 17):
        memory[page * PAGE + 5] = 1
    assert resident_bytes(address, 20 * PAGE) == 3 * PAGE
    assert resident_bytes(address + 3 * PAGE + 7, 10) == PAGE
    assert resident_bytes(address, 0) == 0
    del view
    memory.close()


def test_what_is_not_mapped_counts_as_told() -> None:
    """The kernel refuses to say; a figure that is too large hides nothing."""
    memory = mmap.mmap(-1, PAGE)
    view = ctypes.c_char.from_buffer(memory)
    address = ctypes.addressof(view)
    del view
    memory.close()
    assert resident_bytes(address, 100) in (100, PAGE)  # another mapping may have come here since
