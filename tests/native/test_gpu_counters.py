"""The counters of a GPU over a fake NVML: sums, short intervals, refusals. No GPU is asked here."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace

import pytest

from moewe.native.gpu_counters import EnergyCounter, GpmCounter, GpuCounters, open_counters

PEAK = 2e6 * 3201 * 6144 / 8  # an H200's: 3201 MHz, 6144 bits


class FakeNvml(ModuleType):
    """As much of pynvml as is asked: a GPU that moves `percent` of its peak between samples."""

    NVML_CLOCK_MEM, NVML_GPM_METRICS_GET_VERSION, NVML_GPM_METRIC_DRAM_BW_UTIL, NVML_SUCCESS = 2, 33, 10, 0

    class NVMLError(Exception):
        """As of NVML."""

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.supported, self.fails, self.percent, self.samples = 1, False, 25.0, 0
        self.millijoules: int | None = 5_000
        self.answer = 0  # of the metric

    def nvmlInit(self) -> None:
        if self.fails:
            raise self.NVMLError("no driver")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def nvmlGpmQueryDeviceSupport(self, device: str) -> SimpleNamespace:
        return SimpleNamespace(isSupportedDevice=self.supported)

    def nvmlDeviceGetMaxClockInfo(self, device: str, kind: int) -> int:
        return 3201 if kind == self.NVML_CLOCK_MEM else 0

    def nvmlDeviceGetMemoryBusWidth(self, device: str) -> int:
        return 6144

    def nvmlDeviceGetTotalEnergyConsumption(self, device: str) -> int:
        if self.millijoules is None:
            raise self.NVMLError("not supported")
        return self.millijoules

    def nvmlGpmSampleAlloc(self) -> SimpleNamespace:
        return SimpleNamespace(number=None)

    def nvmlGpmSampleGet(self, device: str, sample: SimpleNamespace) -> None:
        if self.fails:
            raise self.NVMLError("lost")
        self.samples += 1
        sample.number = self.samples

    def c_nvmlGpmMetricsGet_t(self) -> SimpleNamespace:
        return SimpleNamespace(metrics=[SimpleNamespace(metricId=0, nvmlReturn=0, value=0.0)])

    def nvmlGpmMetricsGet(self, asked: SimpleNamespace) -> None:
        assert asked.version == 33 and asked.numMetrics == 1 and asked.metrics[0].metricId == 10
        assert asked.sample2.number > asked.sample1.number, "samples follow each other"
        asked.metrics[0].value, asked.metrics[0].nvmlReturn = self.percent, self.answer


def clock(*times: float) -> Iterator[float]:
    return iter(times)


def test_bytes_are_the_share_of_the_peak_over_the_time_between_samples() -> None:
    nvml = FakeNvml()
    counter = GpmCounter(nvml, "GPU-1", clock(10.0, 12.0, 12.05, 13.0).__next__)
    assert counter.peak_bytes_per_second == PEAK
    assert counter.take() == pytest.approx(0.25 * PEAK * 2)
    assert counter.take() == 0.0  # too soon: the next call has its time too
    nvml.percent = 50.0
    assert counter.take() == pytest.approx(0.5 * PEAK)


@pytest.mark.parametrize(("percent", "answer"), [(float("nan"), 0), (25.0, 3)])
def test_a_sample_without_a_figure_is_left_to_the_next(percent: float, answer: int) -> None:
    nvml = FakeNvml()
    counter = GpmCounter(nvml, "GPU-1", clock(10.0, 12.0, 13.0).__next__)
    nvml.percent, nvml.answer = percent, answer
    assert counter.take() == 0.0
    nvml.percent, nvml.answer = 50.0, 0
    assert counter.take() == pytest.approx(0.5 * PEAK * 3)


def test_a_counter_that_fails_is_not_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    nvml = FakeNvml()
    counter = GpmCounter(nvml, "GPU-1", clock(0.0, 1.0, 2.0).__next__)
    nvml.fails = True
    assert counter.take() == 0.0 and "not asked again: lost" in caplog.text
    nvml.fails = False
    assert counter.take() == 0.0


def test_energy_is_what_a_gpu_used_between_two_calls() -> None:
    nvml = FakeNvml()
    counter = EnergyCounter(nvml, "GPU-1")
    gains = []
    for millijoules in (5_250, 5_250, None, 6_250, 100, 350):  # None: no answer; 100: the driver was loaded anew
        nvml.millijoules = millijoules
        gains.append(counter.take())
    assert gains == pytest.approx([0.25, 0.0, 0.0, 1.0, 0.0, 0.25])


def test_gpus_have_the_counters_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert open_counters("GPU-1") == GpuCounters(uuid="GPU-1")
    nvml = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    found = open_counters("GPU-1")
    assert isinstance(found.memory, GpmCounter) and isinstance(found.energy, EnergyCounter)
    assert (found.uuid, found.peak_bytes_per_second) == ("GPU-1", PEAK)
    nvml.supported = 0
    found = open_counters("GPU-1")
    assert found.memory is None and found.energy is not None and found.peak_bytes_per_second == PEAK
    nvml.supported, nvml.millijoules = 1, None
    found = open_counters("GPU-1")
    assert found.memory is not None and found.energy is None
    nvml.fails = True
    assert open_counters("GPU-1") == GpuCounters(uuid="GPU-1")
