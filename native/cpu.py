"""What this machine's CPU is and which instructions it has, as Linux tells it in /proc/cpuinfo.

Not a measurement (bandwidth.py, matrix_rate.py) and not what was compiled (library.py). Reading it starts nothing.
"""

from __future__ import annotations

import ctypes
import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
ISAS = ("amx", "avx512", "avx2")  # best first; each also has what the ones after it have
_NEEDS = {
    "amx": frozenset({"amx_tile", "amx_bf16", "amx_int8", "avx512_bf16", "avx512_vnni"}),
    "avx512": frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl"}),
    "avx2": frozenset({"avx2", "fma", "f16c", "bmi2"}),
}
_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18


@dataclass(frozen=True)
class Cpu:
    """A processor.

    Attributes:
        machine: the architecture, as `uname -m` calls it.
        name: as the maker calls it, with family, model and stepping.
        flags: the kernel's names of its features.
    """

    machine: str
    name: str
    flags: frozenset[str]

    def isas(self) -> tuple[str, ...]:
        """Return those of ISAS that it has, best first.

        Example:
            >>> Cpu("x86_64", "old", frozenset({"avx2", "fma", "f16c", "bmi2"})).isas()
            ('avx2',)
        """
        if self.machine != "x86_64":
            return ()
        found: list[str] = []
        needed: frozenset[str] = frozenset()
        for isa in reversed(ISAS):
            needed |= _NEEDS[isa]
            if needed <= self.flags:
                found.insert(0, isa)
        return tuple(found)

    def missing(self, isa: str) -> list[str]:
        """Return the features that it lacks for `isa`, sorted."""
        needed = frozenset[str]().union(*(_NEEDS[lower] for lower in ISAS[ISAS.index(isa) :]))
        return sorted(needed - self.flags)


@cache
def this_cpu() -> Cpu:
    """Return the CPU of this machine; without flags where Linux does not tell them."""
    try:
        return parse_cpuinfo(CPUINFO.read_text(errors="replace"), platform.machine())
    except OSError:
        return Cpu(platform.machine(), "unknown CPU", frozenset())


def parse_cpuinfo(text: str, machine: str) -> Cpu:
    """Return the first CPU of the kernel's listing; all of a host are of one kind."""
    fields: dict[str, str] = {}
    for line in text.split("\n\n", 1)[0].splitlines():
        name, colon, value = line.partition(":")
        if colon:
            fields[name.strip()] = value.strip()
    numbers = "-".join(fields.get(part, "?") for part in ("cpu family", "model", "stepping"))
    name = fields.get("model name") or "unknown CPU"
    return Cpu(machine, f"{name} ({numbers})", frozenset(fields.get("flags", "").split()))


@cache
def amx_is_permitted() -> bool:
    """Ask the kernel for the AMX tiles, which a process must do once before it uses them; False where it refuses.

    All threads of the process have it afterwards, and processes that it forks, but not programs that it starts.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA)
    return int(libc.syscall(*map(ctypes.c_long, arguments))) == 0
