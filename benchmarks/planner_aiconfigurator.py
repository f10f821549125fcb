"""What NVIDIA's aiconfigurator 0.12.0 says of the rows that planner_accuracy.py compares, recorded in a file beside it.

Its package takes 0.8 GB, so the file is read and not made each time; `python benchmarks/planner_aiconfigurator.py`
makes it again where `aiconfigurator==0.12.0` is installed. It is asked for decoding alone (`cli_estimate`, mode
static_gen) on as many ranks as the row has, with its own tables and choices of kernels, fp8 KV, and the batch that the
planner gets, rounded. Units: seconds in Python, milliseconds in the file; an empty field is a refusal.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path

from planner_rows import Row, csv_path, read_rows

FILE = Path(__file__).with_name("planner_aiconfigurator.csv")
CHECKPOINTS = {"fp8": "deepseek-ai/DeepSeek-V3", "fp4": "nvidia/DeepSeek-V3.1-NVFP4"}
_KEY = ("system", "precision", "backend", "isl", "osl", "ep", "batch")
Key = tuple[str, ...]
Said = Mapping[Key, float | None]  # seconds; None where it refuses


def key_of(row: Row) -> Key:
    """Return what it is asked of a row; rows of which it is asked the same are alike to it."""
    return (*(str(getattr(row, name)) for name in _KEY[:-1]), str(max(1, round(row.batch))))


def recorded(path: Path = FILE) -> Said:
    """Return its seconds of a decode step by row; None where it refuses."""
    with path.open(newline="") as file:
        return {
            tuple(entry[name] for name in _KEY): float(entry["tpot_ms"]) / 1e3 if entry["tpot_ms"] else None
            for entry in csv.DictReader(file)
        }


def ask(row: Row) -> float | None:
    """Return what it says now."""
    from aiconfigurator.cli.api import cli_estimate

    try:
        found = cli_estimate(
            CHECKPOINTS[row.precision], row.system, mode="static_gen", backend_name=row.backend, isl=row.isl,
            osl=row.osl, batch_size=int(key_of(row)[-1]), attention_dp_size=row.ep, moe_ep_size=row.ep,
            moe_tp_size=1, kvcache_quant_mode="fp8",
        )  # fmt: skip
    except Exception as error:  # whatever it raises where it has no data
        print(*key_of(row), "refused:", " ".join(str(error).split())[:160])
        return None
    return float(found.tpot) / 1e3


def write(said: Said, path: Path = FILE) -> None:
    """Record it."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*_KEY, "tpot_ms"])
        for key, seconds in said.items():
            writer.writerow([*key, "" if seconds is None else f"{1e3 * seconds:.3f}"])


def main() -> None:
    rows = read_rows(csv_path(), ("gb200", "gb300", "b200_sxm", "h200_sxm"))
    alike = {key_of(row): row for row in rows}
    write({key: ask(row) for key, row in alike.items()})


if __name__ == "__main__":
    main()
