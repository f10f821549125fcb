"""What `moewe doctor` says of GPUs, over a fake NVML: a line each, links, what was not read, and what to mend."""

from __future__ import annotations

from pathlib import Path

import pytest

from moewe.native.gpu_inventory import GpuInventory, read_inventory
from moewe.runtime.gpus import nccl_file
from moewe.server.commands.doctor_gpus import GpuFindings, gpu_findings, gpu_fixes, gpu_lines
from tests.support.fake_gpus import FakeGpu, FakeGpus


def findings(*gpus: FakeGpu, torch_cuda: str | None = "12.8") -> GpuFindings:
    nvml = FakeGpus(*gpus)
    nvml.nvmlInit()
    return GpuFindings(inventory=read_inventory(nvml), torch_cuda=torch_cuda, nccl="2.27.5, /x/libnccl.so.2")


def test_a_line_a_gpu_and_how_they_are_linked() -> None:
    lines = gpu_lines(findings(FakeGpu(), FakeGpu(domain=1, nvlinks=(), fabric_state=1, refuses=("clocks",))))
    assert lines["driver"] == "570.86.15, CUDA 12.8 at most; torch is for CUDA 12.8"
    assert lines["NCCL"] == "2.27.5, /x/libnccl.so.2"
    assert lines["GPU 0"].startswith(
        "NVIDIA H200; 141.0 GiB, 100.0 GiB free; SM 345 of 1980 MHz; memory 3201 of 3201 MHz; GPM; NVLink 18 to switch"
    )
    assert lines["GPU 1"] == "NVIDIA H200; 141.0 GiB, 100.0 GiB free; GPM; NVLink none"
    assert lines["GPU 1, not read"].startswith("clock of multiprocessors: Not Supported; clock of memory: ")
    assert lines["NVLink domains"] == "0, 1"
    assert [lines[f"{row:>26}"].split() for row in (0, 1)] == [["self", "yes"], ["yes", "self"]]


def test_one_gpu_has_no_matrix() -> None:
    assert set(gpu_lines(findings(FakeGpu()))) == {"driver", "NCCL", "GPU 0"}


def test_what_to_mend() -> None:
    assert gpu_fixes(findings(FakeGpu(reasons=0x1))) == []
    (slowed,) = gpu_fixes(findings(FakeGpu(reasons=0x4)))
    assert slowed == "GPU 0 is slowed down: power limit; look at its cooling and power limit"
    (apart,) = gpu_fixes(findings(FakeGpu(), FakeGpu(domain=1)))
    assert apart.startswith("2 GPUs are 2 NVLink domains")
    (for_cpus,) = gpu_fixes(findings(FakeGpu(), torch_cuda=None))
    assert for_cpus == "there are 1 GPUs, but this torch is for CPUs; install a CUDA build of torch"
    (newer,) = gpu_fixes(findings(FakeGpu(), torch_cuda="13.0"))
    assert "torch is for CUDA 13.0, but the driver 570.86.15 runs 12.8 at most" in newer


def test_without_a_gpu_there_is_nothing_to_say_and_to_mend() -> None:
    found = GpuFindings(inventory=GpuInventory(why_none="no driver"), torch_cuda=None, nccl="none")
    assert gpu_lines(found) == {} and gpu_fixes(found) == []


@pytest.mark.gpu
def test_this_machine() -> None:
    found = gpu_findings()
    assert found.inventory.gpus and found.torch_cuda is not None and found.nccl[0].isdigit()


def test_which_nccl_is_loaded(tmp_path: Path) -> None:
    assert nccl_file(["/lib/libc.so", "/a/libnccl.so.2.27"], []) == "/a/libnccl.so.2.27"
    assert nccl_file(["/lib/libc.so"], [tmp_path]) == "built into torch"
    library = tmp_path / "nccl" / "lib" / "libnccl.so.2"
    library.parent.mkdir(parents=True)
    library.touch()
    assert nccl_file([], [tmp_path]) == f"{library} (not loaded yet)"
