"""How much memory processes hold and have held at most, as Linux tells it in /proc; nothing where /proc is not.

Not GPU memory and not a budget (topologies/budget.py). Units: bytes. Pages that processes share count once for each.
"""

from __future__ import annotations

import resource
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
# What a rank holds: weights; KV with tokens in it, KV granted to requests and not filled yet, KV that nobody has; rows
# under way between ranks; decode steps captured as CUDA graphs; whatever else its process holds.
MEMORY_PARTS = ("weights", "kv_used", "kv_reserved", "kv_free", "exchange", "graphs", "other")


@dataclass(frozen=True)
class ProcessMemory:
    """A process: its parent and the most memory that it has held."""

    parent: int
    peak_bytes: int


def process_memory(pid: int | str, proc: Path = PROC) -> ProcessMemory | None:
    """Return what is known of a process; None when it is gone, or a thread of the kernel."""
    try:
        lines = (proc / str(pid) / "status").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines if ":" in line)
        return ProcessMemory(int(fields["PPid"]), int(fields["VmHWM"].split()[0]) * 1024)
    except (OSError, KeyError, ValueError):
        return None


def resident_of(pid: int | str = "self", proc: Path = PROC) -> int | None:
    """Return what a process has in memory now, shared pages included; None when it is not known."""
    try:
        return int((proc / str(pid) / "statm").read_text().split()[1]) * resource.getpagesize()
    except (OSError, IndexError, ValueError):
        return None


def peak_of(pids: Iterable[int], proc: Path = PROC) -> int | None:
    """Return the sum over processes and their parents, each counted once; None when nothing is known."""
    found: dict[int, ProcessMemory] = {}
    for pid in pids:
        if pid not in found and (own := process_memory(pid, proc)) is not None:
            found[pid] = own
    parents = {own.parent for own in found.values()} - found.keys() - {0, 1}
    more = [own for parent in parents if (own := process_memory(parent, proc)) is not None]
    return sum(own.peak_bytes for own in (*found.values(), *more)) if found else None


def peak_of_family(pid: int, proc: Path = PROC) -> int | None:
    """Return the sum over a process and all that descend from it; reads every process of the host."""
    known: dict[int, ProcessMemory] = {}
    for folder in proc.glob("[0-9]*"):
        if (own := process_memory(folder.name, proc)) is not None:
            known[int(folder.name)] = own
    family = {pid} & known.keys()
    while more := {child for child, own in known.items() if own.parent in family} - family:
        family |= more
    return sum(known[member].peak_bytes for member in family) if family else None
