"""What a DCGM exporter says: its lines, hostile ones too, and what follows for ranks. Nothing is asked here."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moewe.runtime.metrics.dcgm import MOST_GAP_S, WINDOW_S, ExporterCounts, GpuReading, read_exporter
from moewe.runtime.metrics.export import Metrics
from moewe.runtime.rank_stats import Gpu
from tests.runtime.test_metrics import ready, scrape, stats

UUID, OTHER = "GPU-604ac76c-d9cf-fef3-62e9-d92044ab6e52", "GPU-f3ac76c0-0000-fef3-62e9-d92044ab6e52"
PEAK = 4.8e12


def sample(name: str, value: object, uuid: str = UUID, more: str = "") -> str:
    labels = f'gpu="0",UUID="{uuid}",pci_bus_id="00000000:07:00.0",device="nvidia0",modelName="NVIDIA H200"{more}'
    return f'DCGM_FI_{name}{{{labels},Hostname="a}}b\\"c"}} {value}\n'


def test_readings_are_by_uuid() -> None:
    page = (
        "# HELP DCGM_FI_PROF_DRAM_ACTIVE Ratio of cycles the device memory interface is active.\n"
        "# TYPE DCGM_FI_PROF_DRAM_ACTIVE gauge\n"
        + sample("PROF_DRAM_ACTIVE", 0.25)
        + sample("PROF_DRAM_ACTIVE", "0.5", OTHER)
        + sample("DEV_TOTAL_ENERGY_CONSUMPTION", "81542137")
        + sample("DEV_GPU_TEMP", 40)
    )
    assert read_exporter(page) == {UUID: GpuReading(0.25, 81542137), OTHER: GpuReading(0.5, None)}


def test_instances_of_a_divided_gpu_are_left_out() -> None:
    page = sample("PROF_DRAM_ACTIVE", 0.25, more=',GPU_I_PROFILE="1g.18gb",GPU_I_ID="1"')
    assert read_exporter(page) == {}


@pytest.mark.parametrize("value", ["-0.1", "1.1", "nan", "inf", "1e400", "x", "", "0.1 0.2 0.3" * 20, "0x1"])
def test_values_that_a_share_cannot_have_are_left_out(value: str) -> None:
    found = read_exporter(sample("PROF_DRAM_ACTIVE", value))
    assert found == {} or value.startswith("0.1 ")  # a number and a time behind it


@pytest.mark.parametrize(
    "page",
    [
        "",
        "\0" * 100,
        "DCGM_FI_PROF_DRAM_ACTIVE 0.5",
        "DCGM_FI_PROF_DRAM_ACTIVE{} 0.5",
        'DCGM_FI_PROF_DRAM_ACTIVE{UUID="MIG-1"} 0.5',
        'DCGM_FI_PROF_DRAM_ACTIVE{UUID="GPU-<script>"} 0.5',
        'DCGM_FI_PROF_DRAM_ACTIVE{UUID="' + UUID + '" 0.5',
        'DCGM_FI_PROF_DRAM_ACTIVE{a="' + "x" * 5_000 + '",UUID="' + UUID + '"} 0.5',
        'DCGM_FI_PROF_DRAM_ACTIVE{' + 'a="' * 1_300 + "} 0.5",
    ],
    ids=["empty", "zeros", "no labels", "no label", "MIG", "no UUID", "open", "long", "quotes"],
)  # fmt: skip
def test_lines_that_are_not_understood_are_left_out(page: str) -> None:
    assert read_exporter(page + "\n" + sample("PROF_DRAM_ACTIVE", 0.5, OTHER)) == {OTHER: GpuReading(0.5)}


@given(st.text(alphabet='DCGM_FI_PROF_DRAM_ACTIVE{}"\\=,UUID-0. \n'))
def test_no_text_is_an_error(text: str) -> None:
    read_exporter('DCGM_FI_PROF_DRAM_ACTIVE{' + text)  # fmt: skip


def test_no_more_gpus_than_a_host_can_have() -> None:
    page = "".join(sample("PROF_DRAM_ACTIVE", 0.5, f"GPU-{number:08x}") for number in range(1_000))
    assert len(read_exporter(page)) == 256


def counts() -> ExporterCounts:
    return ExporterCounts([Gpu(uuid=UUID, peak_bytes_per_second=PEAK), Gpu(uuid=OTHER, peak_bytes_per_second=PEAK)])


def test_bytes_are_the_share_of_the_peak_over_the_time_between_looks() -> None:
    found = counts()
    found.observe({UUID: GpuReading(0.5, 1_000)}, [1e12, 1e12], 100.0)
    assert found.measured_bytes(0) == 0.0 and found.model_error(0) == 0.0, "nobody knows since when"
    found.observe({UUID: GpuReading(0.25, 3_000)}, [1e12 + 10.8e12, 2e12], 110.0)
    assert found.measured_bytes(0) == pytest.approx(0.25 * PEAK * 10)
    assert found.model_error(0) == pytest.approx(10.8 / 12 - 1)
    assert found.joules(0) == pytest.approx(2.0)
    assert found.measured_bytes(1) == found.joules(1) == found.model_error(1) == 0.0, "not heard of"


def test_time_in_which_nobody_listened_does_not_count() -> None:
    found = counts()
    for now, counted in ((0.0, 0.0), (10.0, 9e12), (11.0 + MOST_GAP_S, 99e12), (21.0 + MOST_GAP_S, 108e12)):
        found.observe({UUID: GpuReading(0.25)}, [counted], now)
    assert found.measured_bytes(0) == pytest.approx(2 * 0.25 * PEAK * 10)
    assert found.model_error(0) == pytest.approx(9 / 12 - 1)
    found.observe({}, [118e12], 31.0 + MOST_GAP_S)  # it answers, but not of this GPU
    assert found.model_error(0) == pytest.approx(9 / 12 - 1)


def test_the_error_is_of_a_window() -> None:
    found = counts()
    for look in range(40):
        share = 0.5 if look < 20 else 0.25
        found.observe({UUID: GpuReading(share)}, [look * 12e12], look * 10.0)
    assert WINDOW_S < 200 and found.model_error(0) == pytest.approx(0.0)
    assert len(found._past) <= WINDOW_S / 10 + 2


def test_ranks_that_begin_anew_or_have_not_counted_are_waited_for() -> None:
    found = counts()
    for now, counted in ((0.0, []), (10.0, [5.0, 5.0]), (20.0, [7.0, 1.0])):
        found.observe({UUID: GpuReading(0.5), OTHER: GpuReading(0.5)}, counted, now)
    assert found.measured_bytes(0) == pytest.approx(0.5 * PEAK * 10)
    assert found.measured_bytes(1) == 0.0, "its counter went back"


def test_an_exporter_stands_in_for_ranks_without_counters_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = Metrics(version="1", model="m", topology="EP2DP1")
    gpus = (Gpu(uuid=UUID, peak_bytes_per_second=30.0), Gpu(uuid=OTHER, peak_bytes_per_second=30.0))
    metrics.set_ready(0, msgspec.structs.replace(ready(), gpus=gpus))
    readings = {uuid: GpuReading(0.5, 1_000) for uuid in (UUID, OTHER)}
    clock = [50.0]
    monkeypatch.setattr("moewe.runtime.metrics.export.time.monotonic", lambda: clock[0])
    for steps, millijoules in ((0, 1_000), (4, 1_500)):
        own = stats(steps)
        by_hand = msgspec.structs.replace(own.ranks[1], measured_bytes=777.0, joules=7.0)
        metrics.observe_stats(0, msgspec.structs.replace(own, ranks=(own.ranks[0], by_hand)))
        assert metrics.observe_exporter({uuid: GpuReading(0.5, millijoules) for uuid in readings})
        clock[0] += 10.0
    values = scrape(metrics)
    rank0, rank1 = ((("rank", rank), ("replica", "0")) for rank in "01")
    assert values["moewe_measured_memory_bytes_total", rank0] == 0.5 * 30 * 10
    assert values["moewe_model_error_ratio", rank0] == pytest.approx(4 * 1_500 / 150 - 1)
    assert values["moewe_gpu_energy_joules_total", rank0] == pytest.approx(0.5)
    assert values["moewe_measured_memory_bytes_total", rank1] == 777.0, "NVML in the rank goes first"
    assert values["moewe_gpu_energy_joules_total", rank1] == 7.0
    assert not metrics.observe_exporter({"GPU-none": GpuReading(0.5)})
