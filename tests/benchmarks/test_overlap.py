"""benchmarks/overlap.py on two small ranks: outputs are the same whatever overlaps, and all ways are timed.

Not how fast anything is.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "overlap.py"


@pytest.mark.slow
@pytest.mark.spawn
def test_every_way_is_compared_and_timed(tmp_path: Path) -> None:
    out = tmp_path / "record.json"
    sizes = "--tokens 1 6 --width 64 --ffn-width 32 --experts 8 --top-k 2 --layers 2 --repeats 2 --rate 500 --delay 100"
    exchanges = ["--exchanges", "hierarchical", "all_to_all", "padded"]
    subprocess.run([sys.executable, SCRIPT, *sizes.split(), *exchanges, "--out", out], check=True)
    results = json.loads(out.read_text())["results"]
    cases = {key: value for key, value in results.items() if key != "arguments"}
    assert set(cases) == {f"{name}/EP2/T{rows}" for name in exchanges[1:] for rows in (1, 6)}
    for case in cases.values():
        assert case["chosen"] == "shared" and case["chosen_over_fastest"] >= 1.0
        assert case["fastest"] == min(("none", "shared", "halves"), key=lambda way: case[f"layer_us_{way}"]["median"])
        for overlap in ("none", "shared", "halves"):
            assert case[f"layer_us_{overlap}"]["runs"] == 2 and case[f"layer_us_{overlap}"]["min"] > 0
