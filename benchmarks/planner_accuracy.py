"""Are the planner's step times right, and does its physics say more than a line? Measured rows and deployments.

Question: what error has the planner on rows that its one fitted constant has not seen: other widths, precisions,
servers, machines? Beside it stand a line in batch, fitted on the same rows, and NVIDIA's aiconfigurator, which has
tables of kernels and fits nothing (planner_aiconfigurator.py). What was fixed when: docs/planner.md.

    pip install 'moewe[planner-data]'; python benchmarks/planner_accuracy.py [--json FILE]

Units: percent of what was measured; seconds. Reads files only: any machine gives the same figures.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from planner_aiconfigurator import Said, key_of, recorded
from planner_deployments import DEPLOYMENTS, predicted
from planner_rows import Predictor, Row, csv_path, read_rows

from moewe.topologies.planner.step_time import CONSTANTS, Constants

SEEN = ("gb200", "gb300")  # rows on which form and constant were chosen
UNSEEN = ("b200_sxm", "h200_sxm")  # rows that nobody had looked at before
LEAST_ROWS = 4  # of a width that the gate asks about
LAYER_US = np.arange(40.0, 160.5, 1.0)

Model = Callable[[Sequence[Row]], np.ndarray]
Fit = Callable[[Sequence[Row]], Model]


def planner_fit(predictor: Predictor) -> Fit:
    """Return a fit of the planner: the time of a layer beside bytes, FLOPs and exchange, to the mean relative error."""

    def fit(rows: Sequence[Row]) -> Model:
        measured = np.array([row.tpot for row in rows])
        errors = [
            float(np.abs(_planned(predictor, rows, replace(CONSTANTS, layer_seconds=us * 1e-6)) / measured - 1).mean())
            for us in LAYER_US
        ]
        best = replace(CONSTANTS, layer_seconds=float(LAYER_US[int(np.argmin(errors))]) * 1e-6)
        return lambda others: _planned(predictor, others, best)

    return fit


def _planned(predictor: Predictor, rows: Sequence[Row], constants: Constants) -> np.ndarray:
    return np.array([predictor.tpot(row, constants) for row in rows])


def line_fit(rows: Sequence[Row]) -> Model:
    """Fit a + b * batch to the mean relative error, by weighted least squares until it stands still."""
    batch, measured = np.array([row.batch for row in rows]), np.array([row.tpot for row in rows])
    columns = np.stack([np.ones(len(rows)), batch], axis=1) / measured[:, None]
    weights = np.ones(len(rows))
    for _ in range(200):
        solution = np.linalg.lstsq(columns * weights[:, None], weights, rcond=None)[0]
        weights = 1 / np.sqrt(np.maximum(np.abs(columns @ solution - 1), 1e-4))
    return lambda others: np.array([solution[0] + solution[1] * row.batch for row in others])


def error(model: Model, rows: Sequence[Row]) -> np.ndarray:
    """Return |predicted / measured - 1| in percent."""
    return 100 * np.abs(model(rows) / np.array([row.tpot for row in rows]) - 1)


SPLITS: dict[str, Callable[[Row], str]] = {
    "width": lambda row: f"EP{row.ep}",
    "precision": lambda row: row.precision,
    "backend": lambda row: row.backend,
    "system": lambda row: row.system,
    "workload": lambda row: f"{row.isl}/{row.osl}",
}


def beside_aiconfigurator(held: Sequence[Row], planner: np.ndarray, said: Said) -> dict[str, Any]:
    """Return the mean error of aiconfigurator on rows that it does not refuse, and ours on the same, in percent."""
    known = [i for i, row in enumerate(held) if said.get(key_of(row)) is not None]
    theirs: Model = lambda rows: np.array([said[key_of(row)] for row in rows], dtype=float)  # noqa: E731
    mean = float(error(theirs, [held[i] for i in known]).mean()) if known else None
    ours = float(planner[known].mean()) if known else None
    return {"aiconfigurator": mean, "planner_there": ours, "refused": len(held) - len(known)}


def splits(rows: Sequence[Row], fits: dict[str, Fit], said: Said) -> list[dict[str, Any]]:
    """Leave each value of each split out, fit on the rest, and return the errors on what was left out."""
    found = []
    for name, value_of in SPLITS.items():
        for value in sorted({value_of(row) for row in rows}):
            held, rest = ([row for row in rows if (value_of(row) == value) is out] for out in (True, False))
            errors = {kind: error(fit(rest), held) for kind, fit in fits.items()}
            means = {kind: float(each.mean()) for kind, each in errors.items()}
            theirs = beside_aiconfigurator(held, errors["planner"], said)
            found.append({"split": name, "left_out": value, "rows": len(held), **means, **theirs})
    return found


def gate(found: Sequence[dict[str, Any]]) -> list[str]:
    """Return what of the gate does not hold: beat the line on every width of four rows, and on each precision."""
    asked = [
        entry
        for entry in found
        if entry["split"] == "precision" or (entry["split"] == "width" and entry["rows"] >= LEAST_ROWS)
    ]
    return [f"{entry['left_out']}" for entry in asked if entry["planner"] >= entry["line"]]


def unseen(rows: Sequence[Row], others: Sequence[Row], predictor: Predictor, said: Said) -> list[dict[str, Any]]:
    """Return errors on rows of other machines, with everything as it was fixed before, beside the line of `rows`."""
    line = line_fit(rows)
    frozen: Model = lambda chosen: _planned(predictor, chosen, CONSTANTS)  # noqa: E731
    found = []
    for key in sorted({(row.system, row.precision) for row in others}):
        held = [row for row in others if (row.system, row.precision) == key]
        bias = float(100 * (frozen(held) / np.array([row.tpot for row in held]) - 1).mean())
        found.append({
            "left_out": " ".join(key), "rows": len(held), "planner": float(error(frozen, held).mean()),
            "line": float(error(line, held).mean()), "bias": bias,
            **beside_aiconfigurator(held, error(frozen, held), said),
        })  # fmt: skip
    return found


def deployments() -> list[dict[str, Any]]:
    """Return predicted and published rates of deployments."""
    found = []
    for deployment in DEPLOYMENTS:
        rate = predicted(deployment)
        found.append(
            {
                "row": deployment.row,
                "main": deployment.main,
                "what": deployment.what,
                "published": deployment.published,
                "predicted": rate,
                "error": 100 * (rate / deployment.published - 1),
                "unit": deployment.unit,
                "batch": deployment.batch_from,
            }
        )
    return found


def rows_within(found: Sequence[dict[str, Any]], most: float = 25.0) -> dict[str, bool]:
    """Return for each row whether the mean absolute error of its main figures is at most `most` percent."""
    errors: dict[str, list[float]] = {}
    for entry in found:
        if entry["main"]:
            errors.setdefault(entry["row"], []).append(abs(entry["error"]))
    return {row: float(np.mean(values)) <= most for row, values in errors.items()}


def report(rows: Sequence[Row], others: Sequence[Row]) -> dict[str, Any]:
    """Return all figures."""
    predictor = Predictor()
    frozen: Model = lambda chosen: _planned(predictor, chosen, CONSTANTS)  # noqa: E731
    fits: dict[str, Fit] = {"planner": planner_fit(predictor), "line": line_fit}
    said = recorded()
    found = splits(rows, fits, said)
    early = [row for row in rows if row.ttft < 0.1 * row.osl * row.tpot]
    nominal = np.array([predictor.tpot(row, CONSTANTS, batch=row.nominal) for row in early])
    return {
        "rows": len(rows),
        "all_rows_frozen": float(error(frozen, rows).mean()),
        "all_rows_frozen_most": float(error(frozen, rows).max()),
        "beside_aiconfigurator": beside_aiconfigurator(rows, error(frozen, rows), said),
        "splits": found,
        "gate_not_held_by": gate(found),
        "nominal_batch": {
            "rows": len(early),
            "planner": float(100 * np.abs(nominal / np.array([row.tpot for row in early]) - 1).mean()),
        },
        "unseen": unseen(rows, others, predictor, said),
        "deployments": deployments(),
    }


def text(found: dict[str, Any]) -> str:
    """Return the figures for people."""
    lines = [
        f"{found['rows']} rows, constants as fixed: mean error {found['all_rows_frozen']:.1f} %, "
        f"most {found['all_rows_frozen_most']:.0f} %",
        f"nominal batch, {found['nominal_batch']['rows']} rows whose prompts take under a tenth of decoding: "
        f"{found['nominal_batch']['planner']:.1f} %",
        f"all rows: aiconfigurator{_beside(found['beside_aiconfigurator']).rstrip()}",
        "",
        f"{'left out':24}{'rows':>5}{'planner %':>11}{'line %':>8}{_BESIDE}",
    ]
    for entry in found["splits"]:
        lines.append(
            f"{entry['split'] + ' ' + entry['left_out']:24}{entry['rows']:>5}"
            f"{entry['planner']:>11.1f}{entry['line']:>8.1f}{_beside(entry)}"
        )
    missed = found["gate_not_held_by"]
    lines += ["", f"gate: {'the line is better for ' + ', '.join(missed) if missed else 'holds'}", ""]
    lines.append(f"{'never looked at':24}{'rows':>5}{'planner %':>11}{'line %':>8}{'bias %':>8}{_BESIDE}")
    for entry in found["unseen"]:
        shown = f"{entry['planner']:>11.1f}{entry['line']:>8.1f}{entry['bias']:>+8.1f}{_beside(entry)}"
        lines.append(f"{entry['left_out']:24}{entry['rows']:>5}{shown}")
    lines += ["", f"{'deployment':46}{'published':>11}{'predicted':>11}{'error %':>9}  batch from"]
    for entry in found["deployments"]:
        lines.append(
            f"{entry['row'] + ' ' + entry['what']:46}{entry['published']:>11,.0f}{entry['predicted']:>11,.0f}"
            f"{entry['error']:>+9.0f}  {entry['batch']}"
        )
    within = rows_within(found["deployments"])
    lines.append(
        f"within 25 %: {sum(within.values())} of {len(within)} rows (by the mean of their main figures); not "
        f"{', '.join(row for row, is_in in within.items() if not is_in) or 'one more'}"
    )
    return "\n".join(lines)


_BESIDE = f"{'aiconfigurator %':>18}{'refused':>9}{'planner on the others %':>25}"


def _beside(entry: dict[str, Any]) -> str:
    if entry["aiconfigurator"] is None:
        return f"{'fails':>18}{entry['refused']:>9}"
    return f"{entry['aiconfigurator']:>18.1f}{entry['refused']:>9}{entry['planner_there']:>25.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures there")
    chosen = parser.parse_args()
    path = csv_path()
    found = report(read_rows(path, SEEN), read_rows(path, UNSEEN))
    print(text(found))
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
