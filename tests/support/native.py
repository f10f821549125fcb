"""What tests of native kernels share: threads of a team, and the same tests again for other instructions.

Not a kernel and no expectations.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from moewe.native.cpu import this_cpu
from moewe.native.library import load

ROOT = Path(__file__).resolve().parents[2]
needs_native = pytest.mark.skipif(load() is None, reason="no native kernels")


@contextmanager
def team_of(threads: int) -> Iterator[None]:
    """Let so many threads work on the calls of this thread, and one again afterwards."""
    library = load()
    assert library is not None
    library.moewe_set_threads(threads)
    try:
        yield
    finally:
        library.moewe_set_threads(1)


def run_tests_on(isa: str, *tests: str) -> None:
    """Run tests, named as pytest does, in a process whose kernels use `isa`; skip where the CPU lacks it."""
    if isa not in this_cpu().isas():
        pytest.skip(f"this CPU has no {isa}")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "0", "-q", "-p", "no:cacheprovider", *tests],
        cwd=ROOT, env={**os.environ, "MOEWE_NATIVE_ISA": isa}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and "skipped" not in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]
