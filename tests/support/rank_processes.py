"""Runs the same code in a process for each rank, which meet through a store file.

Not a group: what joins the ranks is for the code, which gets its rank and the path of the store as arguments.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 120


def run_rank_processes(code: str, num_ranks: int, folder: Path) -> list[str]:
    """Return what each rank printed; `folder` is where the store will be."""
    command = [sys.executable, "-c", code]
    ranks = [
        subprocess.Popen([*command, str(rank), str(folder / "store")], stdout=subprocess.PIPE, text=True, cwd=ROOT)
        for rank in range(num_ranks)
    ]
    return [rank.communicate(timeout=TIMEOUT_S)[0] for rank in ranks]
