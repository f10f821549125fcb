"""Kernels of benchmarks/gpu_check.py compiled beforehand: by several processes within a time, one of them for real."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.gpu_check_device import compile_ahead

ROOT = Path(__file__).parents[2]
ONE_KERNEL = """
import sys
from types import SimpleNamespace
import torch, triton
from triton.backends.compiler import GPUTarget

class Driver:
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0

triton.runtime.driver.set_active(Driver())
card = SimpleNamespace(major=9, minor=0, multi_processor_count=132)
torch.cuda.get_device_properties = lambda device: card
from benchmarks import gpu_check_stages
gpu_check_stages.stage_launches = lambda stage, target: (
    one for speed in gpu_check_stages.speeds() if speed.name.startswith("scan") for one in speed.launches(target))
print(gpu_check_stages.warmed(("speed", 0, 1)))
"""


def warmed(part: tuple[str, int, int]) -> tuple[int, list[str]]:
    """Stand in for a process that compiles: one does, one fails in part, one fails; a single one takes too long."""
    _, own, parts = part
    if parts == 1:
        time.sleep(60)
    if own == 2:
        raise ValueError("no compiler")
    return 5, ["RuntimeError: no"] * 2 if own else []


@pytest.mark.slow
@pytest.mark.spawn
def test_what_fails_or_takes_long_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    compile_ahead(warmed, "speed", 100.0, processes=3)
    began = time.monotonic()
    compile_ahead(warmed, "speed", 0.5, processes=1)
    assert time.monotonic() < began + 30  # and not the minute that it sleeps
    first, *failed, last = capsys.readouterr().err.splitlines()
    assert first.startswith("  10 kernels compiled by 3 processes in ") and first.endswith(" s")
    assert sorted(failed) == [
        "  not compiled, 1 times: ValueError: no compiler",
        "  not compiled, 2 times: RuntimeError: no",
    ]
    assert last.startswith("  0 kernels compiled") and last.endswith(", 1 of them had no time for all of theirs")


@pytest.mark.slow
@pytest.mark.spawn
def test_a_kernel_is_compiled(tmp_path: Path) -> None:
    """For an H100, in a process whose kernels are not interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", ONE_KERNEL], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "(1, [])", done.stdout + done.stderr[-2000:]
    assert list(tmp_path.rglob("scan_kernel.cubin"))
