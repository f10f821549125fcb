"""Memory that ranks of one host share: one of them makes it and says in a file where it is, the others open it.

Not what lies in it and not who may write when (moe.wide_ep and attention have one layout each). Units: bytes, seconds.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

_LOOK_EVERY_S = 0.01


def create_memory(purpose: str, num_bytes: int) -> int:
    """Return a file descriptor of zeroed memory. Pages take room only once they are written to.

    Args:
        purpose: part of the name under which the system lists it.
        num_bytes: of all of it.
    """
    fd = os.memfd_create(f"moewe-{purpose}", os.MFD_CLOEXEC)
    os.ftruncate(fd, num_bytes)
    return fd


def share_memory(place: Path, purpose: str, num_bytes: int, *, is_first: bool, timeout_s: float) -> int:
    """Return a file descriptor of memory for all ranks that meet at `place`: the first makes it, the others wait.

    Args:
        place: a file in a folder private to this launch; another one for each group of ranks.
        purpose: see `create_memory`.
        num_bytes: of all of it; the same on all ranks.
        is_first: this rank makes the memory.
        timeout_s: how long to wait for the first.

    Raises:
        RuntimeError: it did not come in time.
    """
    if is_first:
        fd = create_memory(purpose, num_bytes)
        written = place.with_suffix(".new")
        written.write_text(f"/proc/{os.getpid()}/fd/{fd}")
        written.rename(place)
        return fd
    deadline = time.monotonic() + timeout_s
    while not place.exists():
        if time.monotonic() > deadline:
            raise RuntimeError(f"the first rank did not offer memory for {purpose} within {timeout_s:g} s")
        time.sleep(_LOOK_EVERY_S)
    return os.open(place.read_text(), os.O_RDWR | os.O_CLOEXEC)
