"""Launches to machine code for a GPU that need not be there, and what that code is like.

Not for a process whose kernels are interpreted. Triton brings ptxas and cuobjdump along; no driver is needed.
"""

from __future__ import annotations

import hashlib
import inspect
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from .launch import Launch, interpreting
from .machine_code import parse_instructions, parse_usage
from .signature import ALIGNMENT, signature_of
from .targets import GpuTarget


@dataclass(frozen=True, kw_only=True)
class CompiledKernel:
    """What came of one launch on one target. Fields: see `machine_code` and, of shared memory, `GpuTarget`."""

    registers: int
    stack_bytes: int
    shared_bytes: int
    total: int
    tensor: int
    loads: int
    wide_loads: int
    fused: int
    local: int
    by_name: dict[str, int]


def compile_launch(launch: Launch, target: GpuTarget) -> CompiledKernel:
    """Compile what `launch` would run on `target`."""
    import triton
    from triton.backends.compiler import GPUTarget

    assert not interpreting(), "kernels of this process are interpreted: TRITON_INTERPRET must not be set"
    made = triton.compile(source_of(launch), target=GPUTarget("cuda", target.capability, 32), options=launch.options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        listing = _disassemble(file.name)
    usage, instructions = parse_usage(listing), parse_instructions(listing)
    return CompiledKernel(**asdict(usage), shared_bytes=int(made.metadata.shared), **asdict(instructions))


def source_of(launch: Launch) -> Any:
    """Return what Triton compiles (`ASTSource`), which is what its JIT would make of the arguments on a GPU."""
    from triton.compiler import ASTSource

    signature = signature_of(launch)
    return ASTSource(
        fn=launch.kernel,
        signature=signature.types,
        constexprs={name: signature.constants[name] for name in signature.types if name in signature.constants},
        attrs={(launch.kernel.arg_names.index(name),): [["tt.divisibility", ALIGNMENT]] for name in signature.aligned},
    )


def launch_key(launch: Launch, target: GpuTarget) -> str:
    """Return a line that is the same where the machine code is, but for the text of the kernel (`source_hash`)."""
    options = f"warps={launch.num_warps} stages={launch.num_stages} fuses={launch.fuses_products}"
    return f"{target.name} {launch.name} {options} {signature_of(launch)}"


def source_hash(kernel: Any) -> str:
    """Return a hash of the files that hold `kernel` and the kernels it calls."""
    files = sorted(str(file) for file in source_files(kernel))
    digest = hashlib.sha256()
    for file in files:
        digest.update(_text(file))
    return digest.hexdigest()[:16]


@cache
def _text(file: str) -> bytes:
    return Path(file).read_bytes()


def source_files(kernel: Any) -> set[Path]:
    """Return the files of `kernel` and of what its module took from others to call."""
    return _sources(kernel, set())


def _sources(kernel: Any, seen: set[str]) -> set[Path]:
    function = kernel.fn
    path = inspect.getsourcefile(function)
    assert path is not None, function
    if path in seen:
        return set()
    seen.add(path)
    found = {Path(path)}
    for value in function.__globals__.values():
        if hasattr(value, "fn") and hasattr(value, "arg_names") and not value.fn.__module__.startswith("triton."):
            found |= _sources(value, seen)
    return found


def _disassemble(file: str) -> str:
    from triton import knobs

    command = [knobs.nvidia.cuobjdump.path, "-res-usage", "-sass", file]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
