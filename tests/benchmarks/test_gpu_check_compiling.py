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
gpu_check_stages.warmed(("speed", 0))
"""


def warmed(job: str) -> None:
    """Stand in for a process that compiles."""
    if job == "slow":
        time.sleep(60)
    if job != "sound":
        raise ValueError(job)


@pytest.mark.slow
@pytest.mark.spawn
def test_what_fails_or_takes_long_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    compile_ahead(warmed, ["sound", "no compiler", "sound", "no compiler", "sound"], 100.0, processes=2)
    began = time.monotonic()
    compile_ahead(warmed, ["slow", "sound"], 0.5, processes=1)
    assert time.monotonic() < began + 30  # and not the minute that it sleeps
    first, failed, last = capsys.readouterr().err.splitlines()
    assert first.startswith("  3 of 5 kernels compiled by 2 processes in ")
    assert failed == "  not compiled, 2 times: ValueError: no compiler"
    assert last.startswith("  0 of 2 kernels compiled by 1 processes in ")


@pytest.mark.slow
@pytest.mark.spawn
def test_a_kernel_is_compiled(tmp_path: Path) -> None:
    """For an H100, in a process whose kernels are not interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", ONE_KERNEL], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert list(tmp_path.rglob("scan_kernel.cubin"))
