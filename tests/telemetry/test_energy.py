"""Energy counters as made-up files of powercap: wraps, missing and hostile files, and a bounded number of series."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from moewe.telemetry import HostEnergy, WrappingCounter


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0  # every look comes a second after the last one
        return self.now


def zone(folder: Path, name: str, label: str, energy: str, most: str = "1000000") -> Path:
    path = folder / name
    path.mkdir(parents=True)
    for file, text in (("name", label), ("energy_uj", energy), ("max_energy_range_uj", most)):
        (path / file).write_text(text + "\n")
    return path


def test_packages_memory_and_platform_are_counted_from_the_first_reading(tmp_path: Path) -> None:
    package = zone(tmp_path, "intel-rapl:0", "package-0", "500000")
    memory = zone(tmp_path, "intel-rapl:0:1", "dram", "7")
    zone(tmp_path, "intel-rapl:0:0", "core", "1")  # a part of its package
    zone(tmp_path, "intel-rapl:1", "package-1-die-0", "9")
    zone(tmp_path, "intel-rapl:2", "psys", "1")
    zone(tmp_path, "intel-rapl-mmio:0", "package-0", "1")  # the same package by another way
    energy = HostEnergy(tmp_path, Clock())
    assert energy.joules() == {"package-0": 0.0, "package-0-dram": 0.0, "package-1-die-0": 0.0, "psys": 0.0}
    (package / "energy_uj").write_text("750000")
    (memory / "energy_uj").write_text("1007")
    energy.read()
    assert energy.joules()["package-0"] == pytest.approx(0.25)
    assert energy.joules()["package-0-dram"] == pytest.approx(0.001)


def test_a_counter_that_wraps_goes_on(tmp_path: Path) -> None:
    package = zone(tmp_path, "intel-rapl:0", "package-0", "999000", "999999")
    energy = HostEnergy(tmp_path, Clock())
    for value, joules in (("999999", 0.000999), ("0", 0.001), ("500000", 0.501), ("100", 1.0011)):
        (package / "energy_uj").write_text(value)
        energy.read()
        assert energy.joules()["package-0"] == pytest.approx(joules), value


def test_it_is_read_once_a_second_at_most(tmp_path: Path) -> None:
    package, now = zone(tmp_path, "intel-rapl:0", "package-0", "0"), [0.0]
    energy = HostEnergy(tmp_path, lambda: now[0])
    (package / "energy_uj").write_text("500000")
    now[0] = 0.9
    energy.read()
    assert energy.joules() == {"package-0": 0.0}
    now[0] = 1.0
    energy.read()
    assert energy.joules() == {"package-0": 0.5}


@pytest.mark.parametrize(
    "text", ["", "x", "-5", "1e9", "0x10", "٣", "9" * 5_000, "1000001", "12 34", "\0", "nan"], ids=repr
)  # fmt: skip
def test_what_is_no_reading_is_left_out(tmp_path: Path, text: str) -> None:
    package = zone(tmp_path, "intel-rapl:0", "package-0", "1000")
    energy = HostEnergy(tmp_path, Clock())
    (package / "energy_uj").write_text(text)
    energy.read()
    assert energy.joules() == {"package-0": 0.0}
    (package / "energy_uj").write_text("3000")
    energy.read()
    assert energy.joules()["package-0"] == pytest.approx(0.002)


def test_a_counter_that_comes_and_goes_keeps_its_total(tmp_path: Path) -> None:
    package = zone(tmp_path, "intel-rapl:0", "package-0", "1000")
    energy = HostEnergy(tmp_path, Clock())
    (package / "energy_uj").rename(package / "hidden")
    energy.read()
    assert energy.joules() == {"package-0": 0.0}
    (package / "energy_uj").write_text("2000")
    energy.read()
    assert energy.joules()["package-0"] == pytest.approx(0.001)


def test_without_powercap_nothing_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert HostEnergy(tmp_path / "absent").joules() == HostEnergy(tmp_path).joules() == {}
    assert not caplog.records


def test_a_counter_that_may_not_be_read_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    package = zone(tmp_path, "intel-rapl:0", "package-0", "1000")
    (package / "energy_uj").unlink()
    (package / "energy_uj").mkdir()  # an error that root gets, too
    with caplog.at_level(logging.INFO):
        assert HostEnergy(tmp_path).joules() == {}
    assert f"{package / 'energy_uj'} is there and cannot be read" in caplog.text


def test_names_and_numbers_of_series_are_bounded_whatever_files_say(tmp_path: Path) -> None:
    zone(tmp_path, "intel-rapl:0", 'package-0"} 1\nevil', "1")
    zone(tmp_path, "intel-rapl:0:0", "dram", "1")  # of a package without a name of its own
    zone(tmp_path, "intel-rapl:1", "package-1" + "1" * 100, "1")
    zone(tmp_path, "intel-rapl:../../etc".replace("/", "_"), "package-2", "1")
    assert HostEnergy(tmp_path).joules() == {}
    for number in range(100, 500):
        zone(tmp_path, f"intel-rapl:{number}", f"package-{number}", "1")
    assert 0 < len(HostEnergy(tmp_path).joules()) <= 32
    os.symlink(tmp_path / "loop", tmp_path / "loop")
    assert HostEnergy(tmp_path / "loop").joules() == {}


@pytest.mark.parametrize(("most", "total"), [(9, 3 + 2), (0, 3)])
def test_a_wrap_of_unknown_size_gains_nothing(most: int, total: int) -> None:
    counter = WrappingCounter(most)
    for value in (5, 8, 0):
        counter.read(value)
    assert counter.total == total
