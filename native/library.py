"""Loads the compiled kernels once for the process, or says in one log line why torch does their work.

Not the compilation (build.py) and no kernel: who calls one declares its arguments on the library that `load` returns.
Environment: MOEWE_NATIVE=0 turns it off, MOEWE_NATIVE_ISA=amx|avx512|avx2 names the instructions, CXX the compiler.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

from .build import BuildError, build, recipe
from .cpu import ISAS, Cpu, amx_is_permitted, this_cpu

_LOG = logging.getLogger(__name__)
# How a process tells those that it starts that compiling failed: they need not try, nor say it again.
_FAILED_VARIABLE = "MOEWE_NATIVE_FAILED"
_lock = threading.Lock()
_outcome: Outcome | None = None


@dataclass(frozen=True)
class Outcome:
    """What became of loading.

    Attributes:
        library: None where torch does the work.
        isa: one of ISAS, or None.
        why: what the log line says: what is used, or why nothing is.
    """

    library: ctypes.CDLL | None
    isa: str | None
    why: str


def load() -> ctypes.CDLL | None:
    """Return the native kernels, compiled at the first use; None where torch does their work. Threads may call it."""
    return outcome().library


def function(name: str, args: type[ctypes.Structure]) -> Callable[[ctypes.Structure], None]:
    """Return the native function `name`, which takes a pointer to `args` and returns nothing; there must be kernels."""
    library = load()
    assert library is not None, f"{name} is called, but there are no native kernels"
    found = getattr(library, name)
    found.argtypes, found.restype = (ctypes.POINTER(args),), None
    return found  # type: ignore[no-any-return]


def native_isa() -> str | None:
    """Return "amx", "avx512" or "avx2", whichever the kernels were compiled for; None where there are none."""
    return outcome().isa


def outcome() -> Outcome:
    """Return what became of loading, which is tried once for the process, and logged."""
    global _outcome
    if (found := _outcome) is not None:
        return found
    with _lock:
        if _outcome is None:
            _outcome = _load()
        return _outcome


def prepare() -> Outcome:
    """Load before processes that use the kernels are started: this one compiles, if need be, and says what came of it.

    They inherit a failure: none of them compiles again, nor says it again.
    """
    result = outcome()
    if result.library is None:
        os.environ[_FAILED_VARIABLE] = result.why
    return result


def set_threads(threads: int) -> None:
    """Let so many threads, the calling one included, work on its native calls from now on; nothing without kernels."""
    library = load()
    if library is not None:
        library.moewe_set_threads(threads)


def _load() -> Outcome:
    if told := os.environ.get(_FAILED_VARIABLE):
        return _without(told, logging.DEBUG)
    if os.environ.get("MOEWE_NATIVE", "1") == "0":
        return _without("MOEWE_NATIVE=0", logging.INFO)
    try:
        cpu = this_cpu()
        isa = choose_isa(cpu, os.environ.get("MOEWE_NATIVE_ISA", ""))
        made = recipe(isa, cpu)
        path = build(made, on_compile=_say_compiling, on_wait=_say_waiting)
        library = ctypes.CDLL(str(path))
        library.moewe_isa.restype = ctypes.c_char_p
        compiled_for = library.moewe_isa().decode()
        if compiled_for != isa:
            raise BuildError(f"{made.version} compiles for {compiled_for} where {isa} is asked; use a newer compiler")
    except (BuildError, OSError) as error:
        return _without(str(error), logging.WARNING)
    _LOG.debug("native kernels: %s, %s", isa, path)
    return Outcome(library, isa, f"{isa}, compiled by {made.version}")


def choose_isa(cpu: Cpu, wanted: str) -> str:
    """Return the best instructions that the CPU has and the kernel permits, or those `wanted`, "" for no wish.

    Raises:
        BuildError: it lacks them.
    """
    if wanted and wanted not in ISAS:
        raise BuildError(f"MOEWE_NATIVE_ISA={wanted} is not known; use one of {', '.join(ISAS)}")
    lowest = wanted or ISAS[-1]
    if lowest not in cpu.isas():
        if cpu.machine != "x86_64":
            raise BuildError(f"there are no kernels for {cpu.machine}")
        raise BuildError(f"the CPU ({cpu.name}) lacks {', '.join(cpu.missing(lowest))} for {lowest}")
    isa = wanted or cpu.isas()[0]
    if isa == "amx" and not amx_is_permitted():
        if wanted:
            raise BuildError("the kernel does not permit AMX; unset MOEWE_NATIVE_ISA")
        return "avx512"
    return isa


def _without(why: str, level: int) -> Outcome:
    _LOG.log(level, "native kernels are not used: %s; torch does their work", why)
    return Outcome(None, None, why)


def _say_compiling() -> None:
    _LOG.info("compiling native kernels (once, ~10 s)")


def _say_waiting() -> None:
    _LOG.info("waiting for another process that compiles the native kernels")
