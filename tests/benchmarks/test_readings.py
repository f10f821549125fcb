"""benchmarks/readings.py shows what it is about, for the two conditions that take least. Not how fast anything is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))  # the scripts import each other as neighbours
    import readings

    return readings


@pytest.mark.slow
@pytest.mark.spawn
@pytest.mark.parametrize("name", ["link", "host"])
def test_a_condition_shows_in_the_verdict(tmp_path: Path, name: str) -> None:
    out = tmp_path / "record.json"
    command = [sys.executable, FOLDER / "readings.py", name, "--seconds", "3", "--no-mend", "--out", out]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    figures = json.loads(out.read_text())["results"][name]
    assert set(figures["ranks"]) == {name} and max(figures["shares"], key=figures["shares"].get) == name
    assert f"verdict of ranks: {', '.join(figures['ranks'])}; shares: {name} " in done.stdout


def test_every_reading_has_a_change_that_the_page_names(script: ModuleType) -> None:
    page = (FOLDER.parent / "docs" / "operations.md").read_text()
    for name, reading in script.READINGS.items():
        assert f"readings.py {name}`" in page, name
        assert reading.mend and reading.mend != reading.flags and reading.change in page, name


def test_what_mends_a_reading_is_told_from_what_does_not(script: ModuleType) -> None:
    before = {"tokens_per_second": 10.0, "imbalance": 2.0, "itl_p95_ms": 500.0, "shares": {"link": 0.8}}
    after = {"tokens_per_second": 14.0, "imbalance": 1.2, "itl_p95_ms": 100.0, "shares": {"link": 0.1}}
    for name, reading in script.READINGS.items():
        assert reading.helps(before, after), name
        assert not reading.helps(before, before) and not reading.helps(after, before), name


def test_the_model_that_no_cache_holds_grows_with_the_caches(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for llc in (32 << 20, 480 << 20, 1536 << 20):
        monkeypatch.setattr(script, "llc_bytes", lambda llc=llc: llc)
        script.over_the_caches(tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        experts = config["num_experts"] * config["num_hidden_layers"]
        held = 3 * config["hidden_size"] * config["moe_intermediate_size"] * 2 * experts
        assert 2.5 * llc <= held < 3 * llc or config["num_experts"] == 16


def test_quantiles_are_bounds_of_buckets(script: ModuleType) -> None:
    name = "moewe_inter_token_latency_seconds_bucket"
    buckets = [({"le": bound}, count) for bound, count in (("0.01", 40.0), ("0.1", 99.0), ("+Inf", 100.0))]
    assert [script.quantile_ms({name: buckets}, share) for share in (0.4, 0.5, 0.95)] == [10.0, 100.0, 100.0]
