"""benchmarks/telemetry_check.py names each figure that does not hold. Not how fast anything is."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
SOUND = {
    "step_bytes": 1e9,
    "step_bytes_reported": 1e9,
    "step_seconds": 0.1,
    "step_seconds_reported": 0.1,
    "bytes_per_second": 1e10,
    "bytes_per_second_reported": 1e10,
    "ceiling_bytes_per_second": 2e10,
    "cache_resident": 0.0,
}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)  # the scripts import each other as neighbours
    import telemetry_check

    return telemetry_check


def test_figures_that_hold_have_no_fault(script: ModuleType) -> None:
    assert script.faults(SOUND) == []
    assert script.faults(SOUND | {"bytes_per_second_reported": 1.029e10}) == []


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"cache_resident": 1.0}, ["ceiling: 20.00 GB/s was measured in caches"]),
        (
            {"bytes_per_second_reported": 1.05e10, "step_seconds_reported": 0.1 / 1.05},
            [
                "bandwidth: reported 10.50 GB/s, measured 10.00 (+5.00%); bytes of a step differ by +0.00%, its "
                "seconds by -4.76%"
            ],
        ),
        ({"ceiling_bytes_per_second": 1e10, "bytes_per_second": 9.9e9}, ["reported bandwidth: 10.00 GB/s is above"]),
        (
            {"ceiling_bytes_per_second": 9e9},
            ["reported bandwidth: 10.00 GB/s is above the ceiling of 9.00", "measured bandwidth: 10.00 GB/s is above"],
        ),
    ],
    ids=["ceiling", "difference", "reported", "both"],
)
def test_each_fault_is_named(script: ModuleType, wrong: dict[str, float], words: list[str]) -> None:
    found = script.faults(SOUND | wrong)
    assert len(found) == len(words)
    assert all(line.startswith(start) for line, start in zip(found, words))
