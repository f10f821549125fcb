"""Tests of what is read from /proc/cpuinfo, and of the permission for AMX."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from moewe.native import cpu as module
from moewe.native.cpu import ISAS, Cpu, parse_cpuinfo, this_cpu

LISTING = """processor\t: 0
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: 143
model name\t: Intel(R) Xeon(R) Platinum 8488C
stepping\t: 8
flags\t\t: fpu avx2 fma f16c bmi2
bugs\t\t: spectre_v1

processor\t: 1
model name\t: another
flags\t\t: none
"""


def test_the_first_cpu_of_the_listing() -> None:
    cpu = parse_cpuinfo(LISTING, "x86_64")
    assert cpu == Cpu(
        "x86_64", "Intel(R) Xeon(R) Platinum 8488C (6-143-8)", frozenset({"fpu", "avx2", "fma", "f16c", "bmi2"})
    )
    assert cpu.isas() == ("avx2",)
    assert cpu.missing("avx512") == ["avx512bw", "avx512dq", "avx512f", "avx512vl"] and cpu.missing("avx2") == []


def test_each_needs_what_those_below_it_need() -> None:
    nothing = Cpu("x86_64", "", frozenset())
    for isa in ISAS:
        needed = nothing.missing(isa)
        assert Cpu("x86_64", "", frozenset(needed)).isas() == ISAS[ISAS.index(isa) :]
        for one in needed:
            assert isa not in Cpu("x86_64", "", frozenset(needed) - {one}).isas()
        assert Cpu("aarch64", "", frozenset(needed)).isas() == ()


def test_a_machine_that_does_not_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CPUINFO", tmp_path / "absent")
    this_cpu.cache_clear()
    try:
        assert this_cpu().flags == frozenset() and this_cpu().isas() == ()
    finally:
        this_cpu.cache_clear()
    assert parse_cpuinfo("", "x86_64") == Cpu("x86_64", "unknown CPU (?-?-?)", frozenset())


def test_the_permission_holds_for_threads_and_is_asked_once() -> None:
    """In a process of its own: where the kernel has AMX, a thread may use tiles afterwards."""
    code = (
        "from moewe.native.cpu import amx_is_permitted, this_cpu; import threading; "
        "first = amx_is_permitted(); found = []; "
        "t = threading.Thread(target=lambda: found.append(amx_is_permitted.__wrapped__())); t.start(); t.join(); "
        "assert found == [first]; print(first, 'amx_tile' in this_cpu().flags)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    permitted, has = done.stdout.split()
    assert permitted == has
