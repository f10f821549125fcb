"""Small sources, a cache of their own and stand-ins for the compiler, so that tests of the native build take a moment.

Not the kernels. A stand-in is a script that does something and then is the real compiler.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from moewe.native import build, library
from moewe.native.build import SOURCES, Recipe, recipe
from moewe.native.cpu import this_cpu


def use_small_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let this process build a copy of isa.cpp into an empty cache; returns the folder of sources."""
    if not this_cpu().isas():
        pytest.skip("the CPU has no AVX2")
    sources = tmp_path / "csrc"
    sources.mkdir()
    shutil.copy(SOURCES / "isa.cpp", sources)
    (sources / "some.h").write_text("// nothing\n")
    monkeypatch.setattr(build, "SOURCES", sources)
    monkeypatch.setattr(library, "_outcome", None)
    monkeypatch.setenv("MOEWE_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("CXX", "MOEWE_NATIVE", "MOEWE_NATIVE_ISA", "MOEWE_NATIVE_FAILED"):
        monkeypatch.setenv(name, "")  # so that whatever is set from here on is undone
        monkeypatch.delenv(name)
    return sources


def small_recipe() -> Recipe:
    """How the small sources are compiled on any machine that can."""
    return recipe("avx2", this_cpu())


def stand_in_compiler(folder: Path, before: str) -> Path:
    """Write a compiler that runs the shell lines `before`, then compiles; of its version nothing is special."""
    script = folder / "compiler"
    script.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exec g++ --version\n{before}\nexec g++ "$@"\n')
    script.chmod(0o755)
    return script
