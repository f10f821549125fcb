"""How much memory this process and all below it have held at most.

Not GPU memory and not the server's (server/bench/scrape.py asks that over HTTP). Linux; nothing where /proc is not.
Units: bytes. Pages that processes share count once for each of them.
"""

from __future__ import annotations

import os
from pathlib import Path

PROC = Path("/proc")


def peak_memory_bytes(pid: int | None = None, proc: Path = PROC) -> int | None:
    """Return the sum of the peak resident sets of a process and its descendants that still run; None if unknown."""
    parents: dict[int, int] = {}
    peaks: dict[int, int] = {}
    for status in proc.glob("[0-9]*/status"):
        try:
            fields = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
            own = int(fields["Pid"])
            parents[own] = int(fields["PPid"])
            peaks[own] = int(fields["VmHWM"].split()[0]) * 1024
        except (OSError, KeyError, ValueError):
            continue  # it ended meanwhile, or is a thread of the kernel
    family = {os.getpid() if pid is None else pid}
    while more := {child for child, parent in parents.items() if parent in family} - family:
        family |= more
    found = [peaks[member] for member in family if member in peaks]
    return sum(found) if found else None
