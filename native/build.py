"""Compiles the C++ kernels of csrc/ into a shared library, once for each source, compiler and CPU, and keeps it.

Not the loading of it (library.py) and no choice of instructions (library.py passes them). Nothing is compiled by an
installation: only by the first start that needs it. A finished entry of the cache is a folder with the library and a
marker that names its hash; it is moved into place whole, so that a half-written one cannot be taken for it.
Units: seconds.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .cache import cache_folder, locked
from .cpu import Cpu

SOURCES = Path(__file__).parent / "csrc"
LIBRARY, MARKER, REPORT = "libmoewe.so", "complete.json", "failed.txt"
COMPILE_SECONDS = 300.0
# The bits of a result may not depend on which product the compiler chose to fuse: intrinsics say where fma is meant.
_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-pthread", "-ffp-contract=off", "-Wno-psabi")
_LINK_FLAGS = ("-shared", "-pthread")
_NO_AMX = ("-mno-amx-tile", "-mno-amx-bf16", "-mno-amx-int8")
_POLL_SECONDS = 0.01


class BuildError(RuntimeError):
    """Why there is no library: one line, with the fix where there is one."""


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the bits of the library.

    Attributes:
        compiler: the command, in words.
        version: what it says of itself.
        flags: for compiling.
        sources: the files that are compiled, each to an object.
        key: a short hash of all of it, of the headers and of the CPU.
    """

    compiler: tuple[str, ...]
    version: str
    flags: tuple[str, ...]
    sources: tuple[Path, ...]
    key: str

    def folder(self) -> Path:
        """Return where its library lies once it is compiled."""
        return native_cache() / self.key


def native_cache() -> Path:
    """Return the folder that holds all compiled libraries of this user."""
    return cache_folder() / "native"


def find_compiler() -> tuple[str, ...]:
    """Return the command of the C++ compiler: the words of CXX, else g++, else clang++.

    Raises:
        BuildError: there is none.
    """
    if wanted := shlex.split(os.environ.get("CXX", "")):
        found = shutil.which(wanted[0])
        if found is None:
            raise BuildError(f"CXX={wanted[0]} cannot be run; unset CXX or name a C++17 compiler")
        return (os.path.abspath(found) if os.sep in wanted[0] else wanted[0], *wanted[1:])  # it runs in another folder
    for name in ("g++", "clang++"):
        if shutil.which(name) is not None:
            return (name,)
    raise BuildError("there is no C++ compiler; install g++ (apt install g++) or set CXX")


def compiler_version() -> str:
    """Return what the compiler says of itself.

    Raises:
        BuildError: there is none that can be run.
    """
    return _version(find_compiler())


def arch_flags(isa: str, cpu: Cpu) -> tuple[str, ...]:
    """Return the flags that let the compiler use `isa` and nothing better."""
    if isa == "amx" or (isa, *cpu.isas()[:1]) == ("avx512", "avx512"):
        return ("-march=native",)
    if isa == "avx512":
        return ("-march=native", *_NO_AMX)
    return ("-march=haswell",)  # the same on every machine, so that a forced path tests what others run


def recipe(isa: str, cpu: Cpu) -> Recipe:
    """Return how to compile SOURCES for `isa` on `cpu`.

    Raises:
        BuildError: there is no compiler, or it does not say its version.
    """
    compiler = find_compiler()
    version = _version(compiler)
    flags = (*_FLAGS, *arch_flags(isa, cpu))
    digest = hashlib.sha256()
    for part in (*compiler, version, *flags, *_LINK_FLAGS, cpu.name, *sorted(cpu.flags)):
        digest.update(part.encode() + b"\0")
    files = sorted(path for path in SOURCES.iterdir() if path.suffix in {".cpp", ".h"})
    for path in files:
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\0".encode() + content)
    compiled = tuple(path for path in files if path.suffix == ".cpp")
    return Recipe(compiler, version, flags, compiled, f"{isa}-{digest.hexdigest()[:16]}")


def is_complete(folder: Path) -> bool:
    """Return True when `folder` holds a library that is what its marker says."""
    try:
        marker = json.loads((folder / MARKER).read_text())
        return bool(marker["sha256"] == hashlib.sha256((folder / LIBRARY).read_bytes()).hexdigest())
    except (OSError, ValueError, KeyError, TypeError):
        return False


def build(recipe: Recipe, *, on_compile: Callable[[], None], on_wait: Callable[[], None]) -> Path:
    """Return the library, compiling it if the cache has no undamaged one; a second process waits for the first.

    Args:
        recipe: how.
        on_compile: called before anything is compiled.
        on_wait: called when another process is compiling the same.

    Raises:
        BuildError: it cannot be compiled or written; the compiler's own words lie in a file that the message names.
    """
    target = recipe.folder()
    if is_complete(target):
        return target / LIBRARY
    try:
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with locked(target.parent / f".{recipe.key}.lock", on_wait=on_wait, seconds=2 * COMPILE_SECONDS):
            if not is_complete(target):  # another process may have built it while this one waited
                on_compile()
                _build(recipe, target)
    except TimeoutError as error:
        raise BuildError(f"{error}; end that process") from error
    except OSError as error:
        why = error.strerror or error
        raise BuildError(f"cannot write {target} ({why}); set MOEWE_CACHE_DIR to another folder") from error
    return target / LIBRARY


def _build(recipe: Recipe, target: Path) -> None:
    """Compile beside `target`, then rename. The caller holds the lock: older scratch is a dead builder's."""
    prefix = f".{target.name}.building-"
    for stale in target.parent.glob(prefix + "*"):
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=target.parent, ignore_cleanup_errors=True) as scratch:
        work, finished = Path(scratch), Path(scratch) / "finished"
        finished.mkdir()
        report = target.parent / REPORT
        objects = [work / f"{path.stem}.o" for path in recipe.sources]
        deadline = time.monotonic() + COMPILE_SECONDS
        commands = [
            [*recipe.compiler, *recipe.flags, "-c", str(path), "-o", str(out)]
            for path, out in zip(recipe.sources, objects, strict=True)
        ]
        _run_all(commands, work, deadline, report)
        library = finished / LIBRARY
        _run_all([[*recipe.compiler, *_LINK_FLAGS, *map(str, objects), "-o", str(library)]], work, deadline, report)
        marker = {"sha256": hashlib.sha256(library.read_bytes()).hexdigest(), "compiler": recipe.version}
        marker["flags"] = " ".join(recipe.flags)
        (finished / MARKER).write_text(json.dumps(marker, indent=2) + "\n")
        if target.exists():
            os.rename(target, work / "replaced")
        os.rename(finished, target)
        report.unlink(missing_ok=True)


def _run_all(commands: Sequence[Sequence[str]], work: Path, deadline: float, report: Path) -> None:
    """Run the commands, as many at once as there are CPUs; raise BuildError when one fails or time is up."""
    environment = {**os.environ, "LC_ALL": "C", "TMPDIR": str(work)}
    waiting = list(enumerate(commands))
    running: dict[subprocess.Popen[bytes], Path] = {}
    try:
        while waiting or running:
            while waiting and len(running) < len(os.sched_getaffinity(0)):
                number, command = waiting.pop(0)
                output = work / f"output-{number}.txt"
                with output.open("wb") as file:
                    process = subprocess.Popen(
                        command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, cwd=work, env=environment,
                        start_new_session=True,
                    )  # fmt: skip
                running[process] = output
            for process in [process for process in running if process.poll() is not None]:
                output = running.pop(process)
                if process.returncode:
                    raise _failure(process.args, process.returncode, output.read_text(errors="replace"), report)
            if time.monotonic() > deadline:
                raise BuildError(f"{commands[0][0]} did not end within {COMPILE_SECONDS:.0f} s")
            time.sleep(_POLL_SECONDS)
    finally:
        for process in running:
            if process.returncode is None:  # nobody has waited for it, so its number is still its own
                os.killpg(process.pid, signal.SIGKILL)  # the driver's children too: they share its session
                process.wait()


def _failure(command: object, code: int, output: str, report: Path) -> BuildError:
    words = [str(word) for word in command] if isinstance(command, (list, tuple)) else [str(command)]
    report.write_text(f"{shlex.join(words)}\nexit code {code}\n{output}")
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    first = next((line for line in lines if "error:" in line), lines[0] if lines else f"exit code {code}")
    return BuildError(f"{words[0]} failed: {first} (all of it: {report})")


def _version(compiler: Sequence[str]) -> str:
    try:
        done = subprocess.run(
            [*compiler, "--version"], stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False,
            env={**os.environ, "LC_ALL": "C"},
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{compiler[0]} cannot be run ({error}); set CXX to a C++17 compiler") from error
    text = done.stdout.decode(errors="replace").strip()
    if done.returncode or not text:
        raise BuildError(
            f"{compiler[0]} --version failed with exit code {done.returncode}; set CXX to a C++17 compiler"
        )
    return text.splitlines()[0]
