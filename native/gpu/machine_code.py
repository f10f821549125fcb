"""What NVIDIA's disassembler says of a kernel, as counts: registers, spills, and the instructions that matter.

Not a compiler; text in, records out. Units: registers of a thread, bytes of a thread (stack) or a program (shared).
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

# Products of tiles: mma (Ampere on), wgmma (Hopper), tcgen05 (Blackwell).
_TENSOR = re.compile(r"^(?:[HIQO]MMA|[HIQ]GMMA|UTC[HIQO]MMA)\b")
# 16 bytes at once from global memory, to registers or straight to shared memory, or by the copy engine (TMA).
_WIDE = re.compile(r"^(?:LDG\S*\.128|LDG\S*\.256|LDGSTS\S*\.128|UTMALDG)\b")
_ANY_LOAD = re.compile(r"^(?:LDG|LDGSTS|UTMALDG)\b")
_FUSED = re.compile(r"^(?:FFMA2?|DFMA)\b")
_LOCAL = re.compile(r"^(?:LDL|STL)\b")
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)")
_USAGE = re.compile(r"REG:(\d+)\s+STACK:(\d+)\s+SHARED:(\d+)\s+LOCAL:(\d+)")


@dataclass(frozen=True, kw_only=True)
class Instructions:
    """Counts in the code, not in a run of it.

    Attributes:
        total: all of them.
        tensor: products of tiles.
        loads, wide_loads: from global memory; of those, 16 bytes or more at once.
        fused: a product and a sum in fp32, rounded once.
        local: loads and stores of memory that takes what registers cannot hold.
        by_name: of the tensor instructions, and of loads with their width.
    """

    total: int
    tensor: int
    loads: int
    wide_loads: int
    fused: int
    local: int
    by_name: dict[str, int]


def parse_instructions(listing: str) -> Instructions:
    """Return the counts of what `cuobjdump -sass` printed.

    Raises:
        ValueError: there is no instruction in it.
    """
    names = [found[1] for line in listing.splitlines() if (found := _INSTRUCTION.match(line))]
    if not names:
        raise ValueError(f"no machine instruction in {listing[:200]!r}")
    shown = Counter(name for name in names if _TENSOR.match(name) or _ANY_LOAD.match(name))

    def count(pattern: re.Pattern[str]) -> int:
        return sum(1 for name in names if pattern.match(name))

    return Instructions(
        total=len(names), tensor=count(_TENSOR), loads=count(_ANY_LOAD), wide_loads=count(_WIDE),
        fused=count(_FUSED), local=count(_LOCAL), by_name=dict(sorted(shown.items())),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Registers of a thread; bytes of its stack, into which registers are spilled."""

    registers: int
    stack_bytes: int


def parse_usage(listing: str) -> Usage:
    """Return what `cuobjdump -res-usage` printed of its one kernel.

    Raises:
        ValueError: it says nothing of a kernel.
    """
    found = _USAGE.search(listing)
    if found is None:
        raise ValueError(f"no resource usage in {listing[:200]!r}")
    registers, stack, _, local = map(int, found.groups())
    return Usage(registers=registers, stack_bytes=max(stack, local))
