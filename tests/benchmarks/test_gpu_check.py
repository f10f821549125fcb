"""benchmarks/gpu_check.py: order, time, going on, goals, the table; all values in the interpreter. No GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_check_plan import (
    GOALS,
    SOURCES,
    Budget,
    Item,
    LeftOut,
    Record,
    decode_attention_goal,
    experts_goal,
    invariance_costs,
    run_items,
    share_figures,
    source_hash,
    table,
    verdicts,
)

ROOT = Path(__file__).parents[2]
KEY = {"card": "c", "sources": "s"}


class Clock:
    """Seconds that pass when a test says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def items(clock: Clock, order: list[str], *taking: tuple[str, int, float]) -> Iterator[Item]:
    """Yield items (name, rank, seconds) that write their names down."""

    def run(name: str, seconds: float) -> dict[str, Any]:
        order.append(name)
        clock.now += seconds
        if name == "broken":
            raise AssertionError("3 of 4 numbers differ\nmore")
        if name == "large":
            raise LeftOut("does not fit")
        if name == "fault":
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")
        return {"us": seconds}

    for name, rank, seconds in taking:
        yield Item(name=name, rank=rank, run=lambda name=name, seconds=seconds: run(name, seconds), floor_s=1.0)


def run(path: Path, clock: Clock, seconds: float, *taking: tuple[str, int, float]) -> tuple[Record, list[str]]:
    order: list[str] = []
    record = Record.open(path, KEY)
    run_items(items(clock, order, *taking), record, Budget(seconds, clock), lambda name, figures: None)
    return record, order


def test_what_matters_most_comes_first_and_what_has_no_time_is_named(tmp_path: Path, clock: Clock) -> None:
    taking = [("late", 2, 5.0), ("first", 0, 4.0), ("second", 1, 4.0), ("last", 3, 1.0)]
    record, order = run(tmp_path / "a.json", clock, 11.0, *taking)
    assert order == ["first", "second"]  # 3 s are left, and the slowest of the last ones took 4
    assert record.left_out == {"late": "no time: 3 s left", "last": "no time: 3 s left"} and not record.finished
    record, order = run(tmp_path / "a.json", clock, 11.0, *taking)
    assert order == ["late", "last"] and record.finished and record.seconds == 6.0
    assert run(tmp_path / "a.json", clock, 11.0, *taking)[1] == []
    assert json.loads((tmp_path / "a.json").read_text())["results"]["second"] == {"us": 4.0, "took_s": 4.0}


def test_what_one_kind_takes_says_nothing_of_another(clock: Clock) -> None:
    budget = Budget(20.0, clock, start=-2.0)
    budget.note(12.0, "start")
    budget.note(3.0, "step")
    clock.now = 9.0
    assert (budget.left, budget.allows(3.0, "start"), budget.allows(3.0, "step")) == (9.0, False, True)


def test_a_failure_stops_nothing_and_is_tried_again(tmp_path: Path, clock: Clock) -> None:
    taking = [("broken", 0, 1.0), ("large", 1, 0.0), ("fault", 1, 1.0), ("sound", 2, 1.0)]
    record, order = run(tmp_path / "a.json", clock, 60.0, *taking)
    assert order == ["broken", "large", "fault", "sound"] and not record.finished
    assert record.results["fault"]["error"] == "RuntimeError: CUDA error: an illegal memory access was encountered"
    assert "in run" in record.results["fault"]["trace"]
    assert record.results["broken"] == {"error": "AssertionError: 3 of 4 numbers differ", "took_s": 1.0}
    assert record.left_out == {"large": "does not fit"}
    assert run(tmp_path / "a.json", clock, 60.0, *taking)[1] == ["broken", "large", "fault"]


@pytest.mark.parametrize("text", ["", "[]", '{"key": {"card": "other"}, "results": {"a": {}}}', '{"key": 3}'])
def test_another_card_or_a_broken_file_begins_anew(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    assert Record.open(tmp_path / "a.json", KEY).results == {}


def test_a_record_says_when_it_was_written(tmp_path: Path) -> None:
    before = datetime.now(UTC).replace(microsecond=0)
    Record.open(tmp_path / "a.json", KEY).write()
    written = datetime.fromisoformat(json.loads((tmp_path / "a.json").read_text())["date"])
    assert before <= written <= datetime.now(UTC)


def test_a_hash_follows_names_and_contents(tmp_path: Path) -> None:
    def hashed(**files: str) -> str:
        for path in tmp_path.glob("*.py"):
            path.unlink()
        for name, text in files.items():
            (tmp_path / f"{name}.py").write_text(text)
        return source_hash(("*.py",), tmp_path)

    assert len({hashed(a="1"), hashed(a="2"), hashed(b="1"), hashed(a="1", b="")}) == 4 and hashed(a="1") == hashed(
        a="1"
    )
    assert source_hash(("*.py", "a.py"), tmp_path) == hashed(a="1")


def test_a_stage_depends_on_its_own_part_of_the_script() -> None:
    files = {stage: {str(path) for one in patterns for path in ROOT.glob(one)} for stage, patterns in SOURCES.items()}
    for stage, own in (("values", "values_attention"), ("speed", "rows"), ("steps", "steps")):
        assert [name for name in files if str(ROOT / f"benchmarks/gpu_check_{own}.py") in files[name]] == [stage]
    found = [path.relative_to(ROOT) for path in ROOT.glob("**/kernels/*_triton.py")]
    kernels = {str(ROOT / path) for path in found if path.parts[0] not in (".typing", "build")}
    assert kernels and all(kernels <= own for own in files.values())


def test_goals_go_with_sizes() -> None:
    assert experts_goal(1, 8, bound_by_memory=True) == experts_goal(256, 128, bound_by_memory=True) == "decode experts"
    assert experts_goal(1, 2, bound_by_memory=True) is None is experts_goal(1024, 128, bound_by_memory=True)
    assert experts_goal(4096, 128, bound_by_memory=False) == "prefill experts"
    assert decode_attention_goal(32, 8192) == "decode attention" and decode_attention_goal(1, 8192) is None
    assert GOALS["decode experts"].judged({"bandwidth_share": 0.8}) == "goal >= 80%: met"
    assert GOALS["prefill attention"].judged({"rate_share": 0.549}) == "goal >= 55%: missed"
    assert GOALS["decode step"].judged({"times_floor": 1.61}) == "goal <= 1.60x: missed"
    assert GOALS["decode step"].judged({}) == "goal <= 1.60x: not measured"


def test_shares_are_of_what_was_measured() -> None:
    reached = {"copy_bytes_per_second": 4e12, "matrix_flops_per_second": 8e14}
    figures = share_figures(2e6, 8e8, 2e-6, reached)
    assert figures == pytest.approx({"us": 2.0, "bandwidth_share": 0.25, "rate_share": 0.5, "times_floor": 2.0})


def test_the_table_is_plain_and_says_met_or_missed() -> None:
    results = {
        "a": {"us": 12.34, "bandwidth_share": 0.5, "rate_share": 0.1, "times_floor": 2.0, "goal": "decode experts"},
        "longer": {"us": 1.0, "bandwidth_share": 0.9, "rate_share": 0.2, "times_floor": 1.1, "torch_us": 3.0},
        "b": {"error": "ValueError: no"},
    }
    lines = table(results)
    assert all(line.isascii() for line in lines) and len(lines) == 4
    assert lines[0].split() == ["us", "of", "copy", "of", "matrix", "x", "floor", "torch", "us", "error"]
    assert lines[1].split("  ")[0] == "a" and lines[1].endswith("goal >= 80%: missed")
    assert lines[3].endswith("ValueError: no")
    assert verdicts([results]) == [
        "decode experts: 0 of 1 met", *(f"{name}: not measured" for name in list(GOALS)[1:])
    ]  # fmt: skip


def test_what_invariance_costs() -> None:
    results = {
        "experts": {"us": 10.0, "invariant_us": 12.5},
        "norm": {"us": 3.0},
        "linear bf16 batch-invariant, qkv": {"us": 3.0, "torch_us": 2.0},
        "decode attention over bf16": {"us": 4.0, "torch_us": 9.0},
        "decode, graphs, batch 1": {"us": 100.0},
        "decode, batch-invariant, batch 1": {"us": 90.0},
        "decode, graphs, batch 8": {"us": 100.0},
        "prefill, graphs": {"error": "no"},
    }
    assert invariance_costs(results) == [
        "batch invariance, experts: +25% time (10.0 -> 12.5 us)",
        "batch invariance, linear bf16 batch-invariant, qkv: +50% time (2.0 -> 3.0 us)",
        "batch invariance, decode, graphs, batch 1: -10% time (100.0 -> 90.0 us)",
        "batch invariance, attention: +0% time, its splits and tiles are fixed in any case",
    ]


def script(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "benchmarks" / "gpu_check.py", *words]
    return subprocess.run(command, check=False, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.spawn
def test_every_value_is_right_in_the_interpreter(tmp_path: Path) -> None:
    """Once; the next run finds everything there."""
    done = script("--interpret", "--out", tmp_path, "--seconds", "600")
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    found = json.loads((tmp_path / "values.json").read_text())
    assert found["finished"] and not found["left_out"] and len(found["results"]) > 40
    shown = script("--show", "--stage", "values", "--out", tmp_path)
    assert shown.returncode == 0 and set(found["results"]) <= {
        line.split("  ")[0] for line in shown.stdout.splitlines()
    }
    again = script("--interpret", "--out", tmp_path)
    assert again.returncode == 0 and f"values: 0 of {len(found['results'])} to do" in again.stderr


@pytest.mark.slow
@pytest.mark.spawn
def test_without_a_gpu_there_is_one_line(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = script("--out", tmp_path)
    assert done.returncode == 2 and done.stderr.startswith("gpu_check needs a GPU: ")
    assert len(done.stderr.splitlines()) == 1 and not done.stdout
