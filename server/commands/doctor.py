"""`moewe doctor`: what this machine has, which path each operation takes, how fast it can be, and what to mend.

Not a benchmark of moewe and not about a model. Nothing is changed, but native kernels are compiled if need be.
Units: bytes, bytes/s, operations/s (a multiplication and an addition are two).
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...native.bandwidth import Bandwidth, least_free_bytes, llc_bytes, measure_read_bandwidth
from ...native.build import BuildError, compiler_version, native_cache
from ...native.cpu import ISAS, Cpu, this_cpu
from ...native.library import Outcome, prepare
from ...native.matrix_rate import measure_matrix_rate
from ...native.operations import OPERATIONS
from ...runtime.gpus import gpu_memory_bytes
from ...topologies.hardware import available_memory_bytes, host_cores, host_memory_bytes
from ..terminal.stdout import put
from .doctor_gpus import GpuFindings, gpu_findings, gpu_fixes, gpu_lines

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
# Enough for four times the caches of a large machine; a start of the server waits for less.
_FILL_SECONDS = 5.0
_PACKAGES = ("moewe", "torch", "numpy", "transformers")
_EXTRAS = {"bench": ("aiohttp", "matplotlib")}
_WIDTH = 37  # of names


@dataclasses.dataclass(frozen=True, kw_only=True)
class Findings:
    """All that is known of this machine.

    Attributes:
        versions: of Python and packages; "missing" where one is not there.
        cpu: its name; `isas` is what it has, `cpus` how many it may use.
        kernels: which native kernels are used, or why none are; `isa` is None then.
        compiler: what it says of itself, or why there is none.
        cache: the folder of compiled kernels.
        operations: name of an operation -> who does it.
        read_bytes_per_second: by `cpus` threads together; `read_in_cache` when a cache answered.
        matrix_rates: operations/s of the same threads, by number format; empty without native kernels.
        gpus: memory of each that torch can use.
        gpu: what the driver and torch say of GPUs.
        fixes: what is missing or in the way, one line each with the fix.
    """

    versions: dict[str, str]
    cpu: str
    isas: tuple[str, ...]
    cpus: int
    memory_bytes: int
    free_bytes: int
    llc_bytes: int
    compiler: str
    cache: str
    kernels: str
    isa: str | None
    operations: dict[str, str]
    read_bytes_per_second: float
    read_in_cache: bool
    matrix_rates: dict[str, float]
    gpus: tuple[int, ...]
    gpu: GpuFindings
    fixes: tuple[str, ...]


def doctor(*, as_json: bool) -> int:
    """Print what was found; returns the exit code."""
    found = examine()
    put(json.dumps(dataclasses.asdict(found), indent=2) + "\n" if as_json else drawn(found))
    return 0


def examine() -> Findings:
    """Look at everything and measure; some seconds, and more when kernels have to be compiled."""
    cpu, threads = this_cpu(), host_cores()
    outcome = prepare()
    read = measure_read_bandwidth(threads, available_memory_bytes(), _FILL_SECONDS)
    rate = measure_matrix_rate(threads)
    gpus, no_gpu = _gpus()
    gpu = gpu_findings()
    compiler, no_compiler = _compiler()
    versions = {"python": platform.python_version()} | {name: _version(name) for name in _PACKAGES}
    fixes = [*kernel_fixes(outcome, cpu, no_compiler), *huge_page_fixes(), *cache_fixes(read)]
    fixes += [*_extra_fixes(), *(gpu_fixes(gpu) or no_gpu)]
    return Findings(
        versions=versions,
        cpu=cpu.name,
        isas=cpu.isas(),
        cpus=threads,
        memory_bytes=host_memory_bytes(),
        free_bytes=available_memory_bytes(),
        llc_bytes=llc_bytes(),
        compiler=compiler,
        cache=str(native_cache()),
        kernels=outcome.why,
        isa=outcome.isa,
        operations={operation.name: operation.path(outcome) for operation in OPERATIONS},
        read_bytes_per_second=read.bytes_per_second,
        read_in_cache=read.cache_resident,
        matrix_rates={} if rate is None else {"bf16": rate.bf16, "int8": rate.int8},
        gpus=gpus,
        gpu=gpu,
        fixes=tuple(fixes),
    )


def kernel_fixes(outcome: Outcome, cpu: Cpu, no_compiler: str | None) -> list[str]:
    """Return what keeps this machine from its best kernels."""
    if outcome.library is None:
        why = outcome.why if outcome.why != "MOEWE_NATIVE=0" else "MOEWE_NATIVE=0 turns them off; unset it"
        fixes = [f"torch does the work of the native kernels: {why}"]
        return fixes if no_compiler is None or no_compiler in why else [*fixes, no_compiler]
    if outcome.isa in cpu.isas()[1:]:
        forced = os.environ.get("MOEWE_NATIVE_ISA")
        why = (
            "MOEWE_NATIVE_ISA says so; unset it"
            if forced
            else "the kernel does not permit AMX; Linux 5.16 or newer does"
        )
        return [f"kernels use {outcome.isa} although the CPU has {cpu.isas()[0]}: {why}"]
    return []


def huge_page_fixes(path: Path = HUGE_PAGES) -> list[str]:
    """Return what to do where Linux hands out no huge pages: reading weights then misses in the translation cache."""
    try:
        never = "[never]" in path.read_text()
    except OSError:
        return []
    return [f"huge pages are off, which slows reading of weights: echo madvise > {path} (as root)"] if never else []


def cache_fixes(read: Bandwidth) -> list[str]:
    """Return what to do where there was too little memory to see past the caches."""
    if not read.cache_resident:
        return []
    wanted = least_free_bytes(llc_bytes())
    return [
        f"the read bandwidth is of {read.buffer_bytes >> 20} MiB, under twice the last-level caches "
        f"({llc_bytes() >> 20} MiB), so it is no ceiling: have {_gib(wanted)} free, and nothing else running"
    ]


def _extra_fixes() -> list[str]:
    return [
        f"{', '.join(missing)} missing, for `moewe bench`: pip install 'moewe[{extra}]'"
        for extra, modules in _EXTRAS.items()
        if (missing := [name for name in modules if find_spec(name) is None])
    ]


def _gpus() -> tuple[tuple[int, ...], list[str]]:
    """Return the memory of each GPU, and a line where one is there that cannot be used."""
    try:
        return gpu_memory_bytes(), []
    except ValueError as error:
        present = Path("/dev/nvidiactl").exists()
        return (), [f"there is a GPU, but {error}"] if present else []


def _compiler() -> tuple[str, str | None]:
    try:
        return compiler_version(), None
    except BuildError as error:
        return "none", str(error)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"


def drawn(found: Findings) -> str:
    """Return the findings as text, one line each."""
    facts = {
        "versions": ", ".join(f"{name} {number}" for name, number in found.versions.items()),
        "CPU": f"{found.cpu}, {found.cpus} usable, {' '.join(found.isas) or f'none of {chr(32).join(ISAS)}'}",
        "memory": f"{_gib(found.memory_bytes)}, {_gib(found.free_bytes)} free; "
        f"last-level cache {found.llc_bytes >> 20} MiB",
        "GPU": (", ".join(map(_gib, found.gpus)) or "none that torch can use") + _by_nvml(found.gpu),
        **gpu_lines(found.gpu),
        "compiler": found.compiler,
        "cache of compiled kernels": found.cache,
        "native kernels": found.kernels if found.isa else "none (below is why)",
    }
    cached = ", partly from caches: memory is slower" if found.read_in_cache else ""
    speeds = {"reading memory": f"{found.read_bytes_per_second / 1e9:.1f} GB/s{cached}"}
    units = {"bf16": "TFLOP/s", "int8": "TOP/s"}
    speeds |= {
        f"{name} products in cache": f"{rate / 1e12:.2f} {units[name]}" for name, rate in found.matrix_rates.items()
    }
    lines = [*_table(facts), "", f"speed of {found.cpus} threads", *_table(speeds), ""]
    lines += ["operations on the CPU, bf16 (other dtypes: torch)", *_table(found.operations), ""]
    lines += ["to mend", *(f"  {fix}" for fix in found.fixes)] if found.fixes else ["nothing to mend"]
    return "\n".join(lines) + "\n"


def _by_nvml(gpu: GpuFindings) -> str:
    return f" (NVML: {gpu.inventory.why_none})" if gpu.inventory.why_none else ""


def _table(rows: dict[str, Any]) -> list[str]:
    return [f"  {name:<{_WIDTH}} {value}" for name, value in rows.items()]


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f} GiB"
