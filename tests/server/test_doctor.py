"""Tests of `moewe doctor`: it says what there is and what to mend, as text and as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moewe.native.bandwidth import Bandwidth
from moewe.native.cpu import Cpu
from moewe.native.library import Outcome
from moewe.native.matrix_rate import MatrixRate
from moewe.native.operations import OPERATIONS
from moewe.server.cli import main as cli
from moewe.server.commands import doctor
from tests.support.native_sources import use_small_sources

AMX = Cpu("x86_64", "New (6-143-8)", frozenset(Cpu("x86_64", "", frozenset()).missing("amx")))
LIBRARY: Any = object()


@pytest.fixture(autouse=True)
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small sources, and figures instead of measurements."""
    use_small_sources(tmp_path, monkeypatch)
    monkeypatch.setattr(doctor, "measure_read_bandwidth", lambda *_: Bandwidth(33.3e9, 1 << 30, cache_resident=False))
    monkeypatch.setattr(doctor, "measure_matrix_rate", lambda threads: MatrixRate(threads, 7.5e12, 15e12))
    monkeypatch.setattr(doctor, "HUGE_PAGES", tmp_path / "absent")


def run(capfd: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        cli.main(["doctor", *words])
    out, err = capfd.readouterr()
    assert isinstance(left.value.code, int)
    return left.value.code, out, err


def row(text: str, name: str) -> str:
    (found,) = [line for line in text.splitlines() if line[2:40].rstrip() == name]
    return found[40:].strip()


def test_text(capfd: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capfd)
    assert code == 0 and err.count("compiling native kernels") == len(err.splitlines()) == 1
    assert row(out, "reading memory") == "33.3 GB/s"
    assert row(out, "bf16 products in cache") == "7.50 TFLOP/s" and row(out, "int8 products in cache") == "15.00 TOP/s"
    assert "compiled by" in row(out, "native kernels") and "moewe " in row(out, "versions")
    for operation in OPERATIONS:  # of which the small sources have none
        assert row(out, operation.name) == "torch"


def test_json_says_the_same(capfd: pytest.CaptureFixture[str]) -> None:
    found = json.loads(run(capfd, "--json")[1])
    assert found["read_bytes_per_second"] == 33.3e9 and found["matrix_rates"] == {"bf16": 7.5e12, "int8": 15e12}
    assert found["isa"] == found["isas"][0] and found["operations"] == {one.name: "torch" for one in OPERATIONS}
    assert found["memory_bytes"] >= found["free_bytes"] > 0 and found["cpus"] >= 1


def test_a_machine_without_a_compiler(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nonexistent")
    monkeypatch.setattr(doctor, "measure_matrix_rate", lambda threads: None)
    monkeypatch.setattr(doctor, "measure_read_bandwidth", lambda *_: Bandwidth(99e9, 1 << 20, cache_resident=True))
    code, out, _ = run(capfd)
    assert code == 0 and row(out, "compiler") == "none" and row(out, "native kernels").startswith("none")
    assert row(out, "reading memory") == "99.0 GB/s, partly from caches: memory is slower" and "products" not in out
    to_mend = out.partition("to mend\n")[2]
    assert to_mend.count("the read bandwidth is of 1 MiB, under twice the last-level caches") == 1
    assert to_mend.count("CXX=/nonexistent cannot be run; unset CXX or name a C++17 compiler") == 1


def test_nothing_to_mend(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_extra_fixes", lambda: [])
    assert run(capfd)[1].endswith("\nnothing to mend\n")


@pytest.mark.parametrize(
    ("outcome", "forced", "no_compiler", "expected"),
    [
        (Outcome(LIBRARY, "amx", ""), "", None, []),
        (Outcome(LIBRARY, "avx512", ""), "", None, ["the kernel does not permit AMX; Linux 5.16 or newer does"]),
        (Outcome(LIBRARY, "avx2", ""), "avx2", None, ["MOEWE_NATIVE_ISA says so; unset it"]),
        (Outcome(None, None, "MOEWE_NATIVE=0"), "", None, ["MOEWE_NATIVE=0 turns them off; unset it"]),
        (Outcome(None, None, "MOEWE_NATIVE=0"), "", "there is no compiler; install", ["unset it", "install"]),
        (Outcome(None, None, "there is no compiler; install"), "", "there is no compiler; install", ["install"]),
    ],
    ids=["best", "not permitted", "forced", "off", "off and no compiler", "no compiler"],
)
def test_what_keeps_a_machine_from_its_best_kernels(
    outcome: Outcome, forced: str, no_compiler: str | None, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if forced:
        monkeypatch.setenv("MOEWE_NATIVE_ISA", forced)
    fixes = doctor.kernel_fixes(outcome, AMX, no_compiler)
    assert len(fixes) == len(expected)
    assert all(fix.endswith(end) for fix, end in zip(fixes, expected, strict=True)), fixes


def test_huge_pages(tmp_path: Path) -> None:
    setting = tmp_path / "enabled"
    assert doctor.huge_page_fixes(setting) == []
    setting.write_text("always [madvise] never\n")
    assert doctor.huge_page_fixes(setting) == []
    setting.write_text("always madvise [never]\n")
    assert doctor.huge_page_fixes(setting) == [
        f"huge pages are off, which slows reading of weights: echo madvise > {setting} (as root)"
    ]
