"""benchmarks/planner_scale.py on a small group: every request gets its tokens, and all parts of a step are timed.

Not how fast anything is.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import planner_scale

    return planner_scale


@pytest.mark.parametrize("churn", [0.0, 0.1])
def test_as_many_sequences_come_as_go(bench: ModuleType, churn: float) -> None:
    group = bench.Bench(3, 8, churn, 200)
    group.fill()
    for _ in range(200):
        group.step()
    group.scheduler.check_invariants()
    assert group.scheduler.num_running > 16
    assert (group.num_ended > 100) if churn else (group.num_ended == 0)
    assert group.num_tokens >= 200 * 16
    found = group.figures()
    assert found["steps"] == 200 and (found["changes_median"] > 0) == bool(churn)
    assert all(own["median_ms"] > 0 for part, own in found["times"].items() if churn or part != "add")


def test_a_lost_token_is_noticed(bench: ModuleType) -> None:
    group = bench.Bench(2, 4, 0.3, 1)
    group.fill()
    with pytest.raises(AssertionError, match="ended after"):
        for _ in range(200):
            for request in group._live.values():
                request.append([bench.TOKEN] * 3)
            group.step(timed=False)


def test_the_record_has_all_scenarios(bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.gc, "freeze", lambda: None)
    out = tmp_path / "record.json"
    words = ["planner_scale", "--ranks", "2", "--seqs", "4", "--steps", "5", "--soak-steps", "20", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", words)
    bench.main()
    results = json.loads(out.read_text())["results"]
    assert set(bench.SCENARIOS) <= set(results)
    assert {*bench.PARTS, "add", "rank", "engine", "engine and add"} == set(results["steady"]["times"])
    assert results["soak"]["steps"] == 20 and len(results["soak"]["mib"]) == 20
    monkeypatch.setattr(sys, "argv", ["planner_scale", "--steps", "2000"])
    with pytest.raises(SystemExit):
        bench.main()
