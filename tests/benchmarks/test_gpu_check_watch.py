"""benchmarks/gpu_check_watch.py: what hangs, dies or breaks the GPU loses one item of a stage, and time ends it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import gpu_check_watch
from benchmarks.gpu_check_plan import Record
from benchmarks.gpu_check_watch import NO_GPU, environment, watch

ROOT = Path(__file__).parents[2]
STAGE = """
import argparse, os, signal, subprocess, sys, time
from pathlib import Path
sys.path.insert(0, {root!r})
from benchmarks.gpu_check_plan import Budget, Item, Record, Unsound, run_items
from benchmarks.gpu_check_watch import UNSOUND

parser = argparse.ArgumentParser()
parser.add_argument("--until", type=float)
parser.add_argument("--keep-errors", action="store_true")
args = parser.parse_args()

def hang():
    child = subprocess.Popen(["sleep", "60"])
    Path({folder!r}, "child").write_text(str(child.pid))
    time.sleep(60)

def fault():
    raise RuntimeError("an illegal memory access was encountered")

does = {{
    "first": lambda: {{"us": 1.0}}, "hangs": hang, "of the same engine": hang,
    "dies": lambda: os.kill(os.getpid(), signal.SIGKILL), "fault": fault,
    "last": lambda: {{"us": 2.0}}, "too long": lambda: time.sleep(60), "behind": lambda: {{"us": 3.0}},
}}
items = [
    Item(name=name, rank=0, run=run, floor_s=0.0, most_s=0.3 if name == "hangs" else 60.0,
         group="engine" if name in ("hangs", "of the same engine") else None)
    for name, run in does.items()
]
record = Record.open(Path({folder!r}, "stage.json"), {{"card": "c"}}, keep_errors=args.keep_errors)
try:
    run_items(items, record, Budget(args.until - time.monotonic()), lambda *_: None, is_sound=lambda: False)
except Unsound:
    os._exit(UNSOUND)
"""


@pytest.mark.slow
@pytest.mark.spawn
def test_one_item_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gpu_check_watch, "_RESTART_S", 0.5)
    monkeypatch.setattr(gpu_check_watch, "LATE_S", 0.1)
    (tmp_path / "stage.py").write_text(STAGE.format(root=str(ROOT), folder=str(tmp_path)))
    path = tmp_path / "stage.json"
    began = time.monotonic()
    assert watch([sys.executable, str(tmp_path / "stage.py")], path, began + 4) is None
    assert time.monotonic() < began + 30  # and not the minute that two of them sleep
    record = Record.read(path)
    assert record is not None and not record.finished
    assert {name: one.get("error", one.get("us")) for name, one in record.results.items()} == {
        "first": 1.0,
        "hangs": "it did not return in time",
        "dies": "its process ended with signal 9",
        "fault": "RuntimeError: an illegal memory access was encountered",
        "last": 2.0,
    }
    assert record.left_out == {
        "of the same engine": "see hangs", "too long": "time was over while it ran", "behind": "not come to",
    }  # fmt: skip
    assert "hangs: it did not return in time; begun again behind it" in capfd.readouterr().err
    child = Path("/proc", (tmp_path / "child").read_text(), "stat")
    assert not child.exists() or child.read_text().split()[2] == "Z"  # what an item started went with it


@pytest.mark.slow
@pytest.mark.spawn
def test_a_stage_that_cannot_begin_is_not_begun_again(tmp_path: Path) -> None:
    for code in (NO_GPU, 1):
        command = [sys.executable, "-c", f"raise SystemExit({code})"]
        assert watch(command, tmp_path / "stage.json", time.monotonic() + 30) == code


@pytest.mark.slow
@pytest.mark.spawn
def test_moewe_need_not_be_installed(tmp_path: Path) -> None:
    """By a Python without what this one has installed: packages of the repository are found, and nothing else is."""
    script = "from benchmarks.gpu_check_watch import environment; import sys, pathlib, json; "
    script += "print(json.dumps(environment(pathlib.Path(sys.argv[1]))))"
    alone = [sys.executable, "-S"]
    made = subprocess.run([*alone, "-c", script, tmp_path], cwd=ROOT, check=True, capture_output=True, text=True)
    code = "import benchmarks.gpu_check_plan, moewe.native.gpu, moewe.runtime.processes; print(moewe.__file__)"
    found = subprocess.run(
        [*alone, "-c", code], env=json.loads(made.stdout), check=True, capture_output=True, text=True
    )
    assert Path(found.stdout.strip()) == tmp_path / "moewe" / "__init__.py"
    assert environment(tmp_path)["PYTHONPATH"].split(":")[0] == str(ROOT)  # here it is installed
