"""What every benchmark script writes: one JSON record with the machine, the date, medians and ratios.

Not a benchmark and never imported by the product. Units are in the key names.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
from pathlib import Path
from typing import Any


def machine() -> dict[str, Any]:
    """Return what a reader needs to judge the figures: CPU, cores, memory, versions."""
    import torch

    cpu = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.split(":", 1)[1].strip()
            break
    flags = Path("/proc/cpuinfo").read_text()
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(pages / 2**30, 1),
        "amx_bf16": "amx_bf16" in flags,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
    }


def summary(values: list[float]) -> dict[str, float]:
    """Return median, least and greatest of repeated measurements."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "runs": len(values)}


def write(question: str, results: dict[str, Any], out: Path | None) -> None:
    """Write the record of one script as JSON, to `out` or to benchmarks/out/<question>.json."""
    record = {
        "question": question,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": machine(),
        "results": results,
    }
    path = out or Path(__file__).parent / "out" / f"{question}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n")
    print(f"record: {path}")
