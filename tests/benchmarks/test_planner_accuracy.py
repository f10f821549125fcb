"""benchmarks/planner_accuracy.py on made-up rows: splits, gate and line; and deployments that come out finite."""

from __future__ import annotations

import csv
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from moewe.topologies.planner.step_time import CONSTANTS

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
LAYER_US = 70.0


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import planner_accuracy

    return planner_accuracy


@pytest.fixture
def rows(bench: ModuleType) -> list[Any]:
    """Rows that the planner's own form made, with another constant than the one that is fixed."""
    rows_module = sys.modules["planner_rows"]
    predictor = rows_module.Predictor()
    constants = replace(CONSTANTS, layer_seconds=LAYER_US * 1e-6)
    made = []
    for ep in (8, 16, 32):
        for precision in ("fp4", "fp8"):
            for batch in (16.0, 64.0, 256.0):
                row = rows_module.Row(
                    system="gb200", precision=precision, backend="sglang", isl=1024, osl=1024,
                    concurrency=int(batch * ep), ep=ep, batch=batch, nominal=batch, ttft=0.1, tpot=1.0,
                )  # fmt: skip
                made.append(replace(row, tpot=predictor.tpot(row, constants)))
    return made


def test_what_made_the_rows_is_found_again(bench: ModuleType, rows: list[Any]) -> None:
    predictor = sys.modules["planner_rows"].Predictor()
    model = bench.planner_fit(predictor)(rows)
    assert bench.error(model, rows).max() < 1e-9
    line = bench.line_fit(rows)
    assert 1 < bench.error(line, rows).mean() < 40
    straight = [replace(row, tpot=0.01 + 1e-4 * row.batch) for row in rows]
    assert bench.error(bench.line_fit(straight), straight).max() < 0.1


def test_splits_leave_out_each_value_once_and_the_gate_names_where_the_line_is_better(
    bench: ModuleType, rows: list[Any]
) -> None:
    seen: list[tuple[int, int]] = []

    def constant(value: float) -> Any:
        def fit(rest: list[Any]) -> Any:
            seen.append((len(rest), len(rows) - len(rest)))
            return lambda others: np.array([value * row.tpot for row in others])

        return fit

    found = bench.splits(rows, {"planner": constant(1.1), "line": constant(1.2)}, {})
    assert [(e["split"], e["left_out"], e["rows"]) for e in found[:3]] == [
        ("width", "EP16", 6),
        ("width", "EP32", 6),
        ("width", "EP8", 6),
    ]
    assert all(e["planner"] == pytest.approx(10) and e["line"] == pytest.approx(20) for e in found)
    assert all(e["aiconfigurator"] is None and e["refused"] == e["rows"] for e in found)
    assert (12, 6) in seen and bench.gate(found) == []
    worse = [e | {"planner": 30.0} if e["left_out"] in ("EP8", "fp4", "sglang") else e for e in found]
    assert bench.gate(worse) == ["EP8", "fp4"]
    few = [e | {"planner": 30.0, "rows": 3} if e["left_out"] == "EP8" else e for e in found]
    assert bench.gate(few) == []


def test_rows_are_read_with_the_batch_that_decodes(bench: ModuleType, tmp_path: Path) -> None:
    entry = {
        "id": "x", "silicon_data_source": "a; silicon_concurrency=64; b", "backend": "trtllm", "system": "gb200",
        "model_path": "deepseek-ai/DeepSeek-V3", "precision": "fp8", "mode": "disagg", "isl": "1024", "osl": "100",
        "decode_num_workers": "2", "decode_tp_size": "1", "decode_pp_size": "1", "decode_attention_dp_size": "8",
        "decode_moe_tp_size": "1", "decode_moe_ep_size": "8", "silicon_ttft_ms": "1000", "silicon_tpot_ms": "10",
    }  # fmt: skip
    other = [{"decode_attention_dp_size": "1"}, {"system": "h100_sxm"}, {"decode_num_workers": ""}, {"mode": "agg"}]
    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(entry))
        writer.writeheader()
        writer.writerows([entry, *({**entry, **change} for change in other)])
    (row,) = sys.modules["planner_rows"].read_rows(path, ("gb200",))
    # One second of two is decoding, so half of the requests decode, on 16 ranks.
    assert (row.ep, row.batch, row.nominal, row.tpot) == (8, pytest.approx(2), 4, 0.01)


def test_deployments_come_out_as_the_page_says(bench: ModuleType) -> None:
    found = bench.deployments()
    assert {entry["row"] for entry in found} == {
        "1", "2", "3a", "3b", "4", "5a", "5b", "7", "8", "9", "10", "11", "11b", "14",
    }  # fmt: skip
    within = bench.rows_within(found)
    assert len(within) == 14 and sum(within.values()) == 10
    page = (Path(BENCHMARKS).parent / "docs" / "planner.md").read_text()
    for entry in found:
        line = (
            f"| {entry['row']} | {entry['what']} | {entry['published']:,} | {entry['predicted']:,.0f} | "
            f"{entry['error']:+.0f} % |"
        )
        assert line in page, line


def test_aiconfigurator_is_compared_on_the_rows_that_it_does_not_refuse(
    bench: ModuleType, rows: list[Any], tmp_path: Path
) -> None:
    peer = sys.modules["planner_aiconfigurator"]
    said = {peer.key_of(row): 1.5 * row.tpot if row.ep == 8 else None for row in rows}
    peer.write(said, tmp_path / "said.csv")
    again = peer.recorded(tmp_path / "said.csv")
    assert again == {key: value if value is None else pytest.approx(value, rel=1e-3) for key, value in said.items()}
    planner = np.array([10.0 if row.ep == 8 else 90.0 for row in rows])
    found = bench.beside_aiconfigurator(rows, planner, again)
    assert found == {"aiconfigurator": pytest.approx(50, rel=1e-2), "planner_there": 10.0, "refused": 12}
    assert "fails" in bench._beside(found | {"aiconfigurator": None})
