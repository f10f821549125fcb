"""Tests of loading: what is compiled for is what was asked for, and where nothing can be, one line says why."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

import pytest

from moewe.native import library
from moewe.native.build import BuildError
from moewe.native.cpu import ISAS, Cpu, this_cpu
from moewe.native.library import choose_isa, load, native_isa, outcome, prepare
from tests.support.native_sources import stand_in_compiler, use_small_sources

EVERYTHING = frozenset(Cpu("x86_64", "", frozenset()).missing("amx"))
AVX512_ONLY = frozenset(Cpu("x86_64", "", frozenset()).missing("avx512"))


@pytest.fixture(autouse=True)
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return use_small_sources(tmp_path, monkeypatch)


def start_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_outcome", None)


def lines(caplog: pytest.LogCaptureFixture, least: int = logging.INFO) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= least]


def test_what_the_cpu_can_is_compiled_once_and_said(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO", "moewe.native.library")
    loaded = load()
    assert loaded is not None and load() is loaded
    assert native_isa() == this_cpu().isas()[0] == loaded.moewe_isa().decode()
    assert lines(caplog) == ["compiling native kernels (once, ~10 s)"]
    caplog.clear()
    start_over(monkeypatch)
    assert load() is not None and lines(caplog) == []


@pytest.mark.parametrize("isa", ISAS)
def test_forced_instructions(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEWE_NATIVE_ISA", isa)
    loaded = load()
    if isa in this_cpu().isas():
        assert loaded is not None and loaded.moewe_isa().decode() == isa == native_isa()
    else:
        assert loaded is None and f"for {isa}" in outcome().why


def expect_none(caplog: pytest.LogCaptureFixture, why: str, level: int = logging.WARNING) -> None:
    caplog.set_level("DEBUG", "moewe.native.library")
    assert load() is None and native_isa() is None
    assert load() is None
    last = caplog.records[-1]
    assert last.getMessage() == f"native kernels are not used: {why}; torch does their work" and last.levelno == level
    assert "compiling" not in "".join(lines(caplog)) and len(lines(caplog, logging.DEBUG)) == 1


def test_turned_off(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEWE_NATIVE", "0")
    expect_none(caplog, "MOEWE_NATIVE=0", logging.INFO)


def test_no_compiler(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nonexistent")
    expect_none(caplog, "CXX=/nonexistent cannot be run; unset CXX or name a C++17 compiler")


def test_unknown_instructions(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEWE_NATIVE_ISA", "sse2")
    expect_none(caplog, "MOEWE_NATIVE_ISA=sse2 is not known; use one of amx, avx512, avx2")


def test_a_cpu_that_lacks_the_instructions(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "this_cpu", lambda: Cpu("x86_64", "Old (6-1-1)", frozenset({"avx2", "bmi2"})))
    expect_none(caplog, "the CPU (Old (6-1-1)) lacks f16c, fma for avx2")


def test_another_architecture(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "this_cpu", lambda: Cpu("aarch64", "unknown CPU", frozenset()))
    expect_none(caplog, "there are no kernels for aarch64")


def test_a_mistake_in_the_source(
    sources: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (sources / "wrong.cpp").write_text("#error of ours\n")
    caplog.set_level("INFO", "moewe.native.library")
    assert load() is None
    said = lines(caplog)
    assert said[0].startswith("compiling") and len(said) == 2
    assert "wrong.cpp:1:2: error: #error of ours (all of it: " in said[1]


def test_a_library_for_other_instructions_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiler that does not know this CPU: -march=native then means less."""
    script = stand_in_compiler(tmp_path, 'set -- $(echo "$*" | sed s/-march=native/-march=haswell/)')
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setattr(library, "amx_is_permitted", lambda: True)
    if this_cpu().isas() == ("avx2",):
        pytest.skip("nothing is better than AVX2 here")
    assert load() is None
    assert "compiles for avx2 where" in lines(caplog)[-1]


def test_a_failure_is_said_and_tried_once_for_all_processes(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "/nonexistent")
    assert prepare().why == os.environ["MOEWE_NATIVE_FAILED"]
    start_over(monkeypatch)  # as in a process that was started with this environment
    monkeypatch.delenv("CXX")
    caplog.clear()
    expect_none(caplog, "CXX=/nonexistent cannot be run; unset CXX or name a C++17 compiler", logging.DEBUG)


def test_success_hands_nothing_down() -> None:
    assert prepare().library is load() is not None and "MOEWE_NATIVE_FAILED" not in os.environ


def test_threads_load_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "moewe.native.library")
    found: list[object] = []
    threads = [threading.Thread(target=lambda: found.append(load())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and len({id(one) for one in found}) == 1 and None not in found
    assert len(lines(caplog)) == 1


def test_amx_needs_the_permission_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = Cpu("x86_64", "New", EVERYTHING)
    monkeypatch.setattr(library, "amx_is_permitted", lambda: True)
    assert choose_isa(cpu, "") == choose_isa(cpu, "amx") == "amx"
    monkeypatch.setattr(library, "amx_is_permitted", lambda: False)
    assert choose_isa(cpu, "") == "avx512"
    assert choose_isa(cpu, "avx2") == "avx2"
    with pytest.raises(BuildError, match="does not permit AMX; unset MOEWE_NATIVE_ISA"):
        choose_isa(cpu, "amx")


def test_the_best_that_the_cpu_has(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_isa(Cpu("x86_64", "Some", AVX512_ONLY), "") == "avx512"
    with pytest.raises(BuildError, match=r"lacks amx_bf16, amx_int8, amx_tile, avx512_bf16, avx512_vnni for amx"):
        choose_isa(Cpu("x86_64", "Some", AVX512_ONLY), "amx")
