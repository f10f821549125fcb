"""Tests of compiling: once, whole or not at all, again when anything changed or broke, and with errors that say why."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from moewe.native import build as module
from moewe.native.build import LIBRARY, MARKER, BuildError, arch_flags, find_compiler, is_complete, recipe
from moewe.native.cpu import Cpu, this_cpu
from tests.support.native_sources import small_recipe, stand_in_compiler, use_small_sources

# Builds what the arguments say and prints each thing that happens.
CHILD = """
import sys
from pathlib import Path
from moewe.native import build
from tests.support.native_sources import small_recipe
build.SOURCES = Path(sys.argv[1])
say = lambda word: lambda: print(word, flush=True)
print(build.build(small_recipe(), on_compile=say("compiling"), on_wait=say("waiting")), flush=True)
"""
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return use_small_sources(tmp_path, monkeypatch)


def built() -> tuple[Path, list[str]]:
    """Build; returns the library and what happened."""
    said: list[str] = []
    path = module.build(
        small_recipe(), on_compile=lambda: said.append("compiled"), on_wait=lambda: said.append("waited")
    )
    return path, said


def child(sources: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", CHILD, str(sources)], stdout=subprocess.PIPE, text=True, cwd=ROOT)


def said_by(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def wait_gone(pid: int) -> None:
    """Wait until a process has ended, be it that nobody has asked how."""
    stat = Path(f"/proc/{pid}/stat")
    deadline = time.monotonic() + 60
    with suppress(OSError):  # gone between two looks
        while stat.read_text().rpartition(")")[2].split()[0] != "Z":
            assert time.monotonic() < deadline, f"process {pid} lives"
            time.sleep(0.01)


def test_a_second_call_compiles_nothing(sources: Path) -> None:
    path, said = built()
    assert said == ["compiled"] and path == small_recipe().folder() / LIBRARY and path.is_file()
    assert built() == (path, [])
    assert sorted(entry.name for entry in path.parent.parent.iterdir()) == [path.parent.name], "scratch was left"


def test_two_processes_at_once_compile_once(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, gate = tmp_path / "log", tmp_path / "gate"
    wait = f'case "$*" in *" -c "*) echo "$*" >> {log};; esac\nwhile [ ! -e {gate} ]; do sleep 0.01; done'
    monkeypatch.setenv("CXX", str(stand_in_compiler(tmp_path, wait)))
    first = child(sources)
    assert said_by(first) == "compiling"
    second = child(sources)
    assert said_by(second) == "waiting"
    gate.touch()
    assert said_by(first) == said_by(second) == str(small_recipe().folder() / LIBRARY)
    assert first.wait(60) == second.wait(60) == 0
    assert len(log.read_text().splitlines()) == 1


def test_a_killed_builder_blocks_nobody(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, pid_file = tmp_path / "gate", tmp_path / "pid"
    script = stand_in_compiler(tmp_path, f"echo $$ > {pid_file}; while [ ! -e {gate} ]; do sleep 0.01; done")
    monkeypatch.setenv("CXX", str(script))
    dead = child(sources)
    assert said_by(dead) == "compiling"
    cache = small_recipe().folder().parent
    while not (pid_file.exists() and any(cache.glob(".*.building-*"))):
        assert dead.poll() is None
    dead.kill()
    dead.wait()
    gate.touch()
    wait_gone(int(pid_file.read_text()))  # its compiler; until then it may write what is cleared away
    path, said = built()
    assert said == ["compiled"] and is_complete(path.parent)
    assert [entry.name for entry in cache.iterdir()] == [path.parent.name], "scratch of the dead builder was left"


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / LIBRARY).write_bytes((folder / LIBRARY).read_bytes()[:-1]),
        lambda folder: (folder / LIBRARY).unlink(),
        lambda folder: (folder / MARKER).unlink(),
        lambda folder: (folder / MARKER).write_text('{"sha256": '),
        lambda folder: (folder / MARKER).write_text("[]"),
        lambda folder: (folder / MARKER).write_text(json.dumps({"sha256": "0" * 64})),
    ],
    ids=["short", "no library", "no marker", "half a marker", "no mapping", "other hash"],
)
def test_a_damaged_entry_is_built_again(sources: Path, damage: Callable[[Path], object]) -> None:
    path, _ = built()
    damage(path.parent)
    assert built() == (path, ["compiled"])
    assert is_complete(path.parent) and built() == (path, [])


def test_two_that_fail_at_once_are_one_failure(tmp_path: Path) -> None:
    """The second has been waited for when the first is told: it is not there to be killed any more."""
    commands = [("sh", "-c", "exit 1")] * 2
    with pytest.raises(BuildError, match="sh failed: exit code 1"):
        module._run_all(commands, tmp_path, time.monotonic() + 60, tmp_path / "report.txt")


def test_a_mistake_in_the_source_is_one_line_and_a_file(sources: Path) -> None:
    (sources / "a_wrong.cpp").write_text("int f() { return absent; }\n")
    with pytest.raises(
        BuildError, match=r"^g\+\+ failed: .*a_wrong\.cpp:1:18: error: .*absent.* \(all of it: (.*)\)$"
    ) as e:
        built()
    report = Path(str(e.value).rpartition("(all of it: ")[2][:-1])
    assert "-std=c++17" in report.read_text() and "absent" in report.read_text()
    (sources / "a_wrong.cpp").write_text("int f() { return 0; }\n")
    assert built()[1] == ["compiled"] and not report.exists()


def test_a_compiler_that_does_not_end_is_ended(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pid_file = tmp_path / "pid"
    monkeypatch.setenv("CXX", str(stand_in_compiler(tmp_path, f"sleep 600 & echo $! > {pid_file}; wait")))
    monkeypatch.setattr(module, "COMPILE_SECONDS", 2.0)
    with pytest.raises(BuildError, match=r"compiler did not end within"):
        built()
    wait_gone(int(pid_file.read_text()))


def test_a_live_holder_of_the_lock_is_waited_for_only_so_long(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = tmp_path / "gate"
    monkeypatch.setenv("CXX", str(stand_in_compiler(tmp_path, f"while [ ! -e {gate} ]; do sleep 0.01; done")))
    holder = child(sources)
    assert said_by(holder) == "compiling"
    monkeypatch.setattr(module, "COMPILE_SECONDS", 0.05)
    with pytest.raises(BuildError, match=r"another process has held .*; end that process"):
        built()
    gate.touch()
    assert holder.wait(60) == 0


def test_a_cache_that_cannot_be_written_names_the_fix(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MOEWE_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(BuildError, match=r"cannot write .*file.*; set MOEWE_CACHE_DIR"):
        built()


def test_the_key_names_all_that_decides_the_bits(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = this_cpu()
    keys = [small_recipe().key, recipe("avx512", cpu).key]
    assert keys[0] == small_recipe().key
    keys.append(recipe("avx2", replace(cpu, name="another (1-2-3)")).key)
    keys.append(recipe("avx2", replace(cpu, flags=cpu.flags | {"some_new_one"})).key)
    (sources / "some.h").write_text("// something\n")
    keys.append(small_recipe().key)
    (sources / "isa.cpp").write_text((sources / "isa.cpp").read_text() + "\n")
    keys.append(small_recipe().key)
    (sources / "more.cpp").write_text("")
    keys.append(small_recipe().key)
    script = tmp_path / "g++"
    script.write_text('#!/bin/sh\necho "g++ (of tomorrow) 99.1"\n')
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    keys.append(small_recipe().key)
    script.write_text('#!/bin/sh\necho "g++ (of tomorrow) 99.2"\n')
    keys.append(small_recipe().key)
    assert len(set(keys)) == len(keys)


def test_no_compiler(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nonexistent/g++")
    with pytest.raises(BuildError, match=r"^CXX=/nonexistent/g\+\+ cannot be run; unset CXX"):
        find_compiler()
    monkeypatch.setenv("CXX", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match=r"there is no C\+\+ compiler; install g\+\+"):
        find_compiler()


def test_a_compiler_that_is_none(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(BuildError, match=r"^false --version failed with exit code 1; set CXX"):
        small_recipe()


def test_a_compiler_named_from_here_runs_elsewhere(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in_compiler(tmp_path, "")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CXX", "./compiler")
    assert find_compiler() == (str(tmp_path / "compiler"),) and built()[1] == ["compiled"]


def test_words_of_cxx(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "env g++")
    assert find_compiler() == ("env", "g++")
    assert built()[1] == ["compiled"]


@pytest.mark.parametrize(
    ("isa", "best", "flags"),
    [
        ("amx", "amx", ("-march=native",)),
        ("avx512", "amx", ("-march=native", "-mno-amx-tile", "-mno-amx-bf16", "-mno-amx-int8")),
        ("avx512", "avx512", ("-march=native",)),
        ("avx2", "amx", ("-march=haswell",)),
        ("avx2", "avx2", ("-march=haswell",)),
    ],
)
def test_flags_allow_nothing_better_than_asked(isa: str, best: str, flags: tuple[str, ...]) -> None:
    cpu = Cpu("x86_64", "some", frozenset(Cpu("x86_64", "", frozenset()).missing(best)))
    assert cpu.isas()[0] == best and arch_flags(isa, cpu) == flags


def test_compilers_may_run_beside_each_other_but_not_more_than_there_are_cpus(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each notes its begin and its end: at no time are there more begins than ends plus CPUs."""
    for number in range(5):
        (sources / f"file{number}.cpp").write_text(f"int f{number}() {{ return {number}; }}\n")
    log = tmp_path / "log"
    script = stand_in_compiler(tmp_path, f"echo + >> {log}; trap 'echo - >> {log}' EXIT; g++ \"$@\"; exit $?")
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    built()
    running, most = 0, 0
    for line in log.read_text().split():
        running += 1 if line == "+" else -1
        most = max(most, running)
    assert most <= 2 and log.read_text().split().count("+") == 5 + 1 + 1
