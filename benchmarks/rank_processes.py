"""Ranks as processes of this host for a benchmark: the flags of a slowed link, and a run for each number of ranks.

Not a benchmark. `run_rank(rank, num_ranks, folder, args)` measures; rank 0 saves a dict as `folder`/results.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import records
import torch
import torch.multiprocessing as mp


def add_link_flags(parser: argparse.ArgumentParser) -> None:
    """Add how slow the link between domains is made, and where the record goes."""
    parser.add_argument("--rate", type=int, default=200, help="MB/s of the slowed link")
    parser.add_argument("--delay", type=int, default=500, help="microseconds of the slowed link")
    parser.add_argument("--out", type=Path)


def measure(name: str, run_rank: Callable[..., None], args: argparse.Namespace) -> None:
    """Run `args.ranks` ranks, one number after another, and write the record `name`."""
    results: dict[str, Any] = {"arguments": {key: value for key, value in vars(args).items() if key != "out"}}
    for num_ranks in args.ranks:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(run_rank, (num_ranks, folder, args), nprocs=num_ranks)
            results |= torch.load(Path(folder) / "results", weights_only=True)
    records.write(name, results, args.out)
