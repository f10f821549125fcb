"""What NVML says of GPUs, over a fake: domains, links, refusals by name. No GPU is asked here."""

from __future__ import annotations

import sys

import pytest

from moewe.native.gpu_inventory import gpu_inventory, joined, read_inventory
from tests.support.fake_gpus import FakeGpu, FakeGpus


def test_two_domains_of_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    bridge = FakeGpu(nvlinks=(0, 0, -1, 0), domain=1, fabric_state=0, reasons=0x1 | 0x40, gpm=0)
    nvml = FakeGpus(FakeGpu(), FakeGpu(), bridge, FakeGpu(domain=2, nvlinks=(), memory=(0, 0)))
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    found = gpu_inventory()
    assert nvml.initialised == 0 and (found.driver, found.cuda_driver, found.why_none) == ("570.86.15", "12.8", "")
    assert found.domains == ((0, 1), (2,), (3,))
    assert found.p2p[0] == ("self", "nvlink", "yes", "no") and found.p2p[2][:2] == ("yes", "yes")
    first, _, third, last = found.gpus
    assert (first.links, first.fabric, first.slowed_by, first.has_gpm) == (
        {"switch": 18}, f"cluster 00ab{'00' * 14}, clique 7", (), True,
    )  # fmt: skip
    assert (first.sm_mhz, first.memory_mhz, first.memory_bytes) == ((345, 1980), (3201, 3201), 141 << 30)
    assert (third.links, third.fabric, third.has_gpm) == ({"GPU": 3}, "", False)
    assert third.slowed_by == ("idle", "heat (hardware)") and last.links == {} and not last.unread


def test_what_is_refused_is_named_and_the_rest_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeGpus(FakeGpu(refuses=("clocks", "fabric", "memory", "p2p", "name")), FakeGpu())
    for name in ("nvmlGpmQueryDeviceSupport", "nvmlDeviceGetCurrentClocksEventReasons"):
        monkeypatch.delattr(FakeGpus, name)  # an old package
    nvml.nvmlInit()
    found = read_inventory(nvml)
    gpu = found.gpus[0]
    assert (gpu.name, gpu.memory_bytes, gpu.sm_mhz, gpu.fabric, gpu.uuid) == ("unknown", None, None, None, "GPU-1")
    assert found.p2p == (("self", "?"), ("nvlink", "self")) and found.domains == ((0, 1),)
    assert "GPM: this nvidia-ml-py does not know it; install a newer one" in gpu.unread
    assert "NVLink fabric: Not Supported" in gpu.unread and "memory: Not Supported" in gpu.unread


def test_why_there_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpu_inventory().why_none == "the package nvidia-ml-py is missing; pip install nvidia-ml-py"
    monkeypatch.setitem(sys.modules, "pynvml", FakeGpus(starts=False))
    assert gpu_inventory().why_none == "NVML does not start: Driver Not Loaded"
    monkeypatch.setitem(sys.modules, "pynvml", FakeGpus())
    assert gpu_inventory().why_none == "the driver knows no GPU"


def test_groups_join_over_others() -> None:
    a, b = "nvlink", "no"
    assert joined(((b, b, a), (b, b, a), (a, a, b))) == ((0, 1, 2),)
    assert joined(()) == ()
