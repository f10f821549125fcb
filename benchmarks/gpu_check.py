"""Are the GPU kernels right on this GPU, how near do they come to what it can do, and how long are whole steps?

One command for a machine with one GPU, in three stages, each of which writes its JSON as it goes:

1. `values`: every kernel in bf16, fp8, int8 and int4, over KV in bf16, fp8 and int8, against fp64 on fresh random
   inputs;
2. `speed`: share of the measured copy bandwidth and matrix rate at the shapes of six published models, beside torch's
   grouped product and scaled dot product attention, and what batch-invariant products cost;
3. `steps`: decode and prefill of a random Qwen3-30B-A3B through the engine, with CUDA graphs and without, batch
   invariance, and what the memory moves by the GPU's own counter.

Kernels are compiled by parallel processes first. Every stage has a time budget, in which all that it does falls, and
begins with what matters most; what there was no time for is named, and a second run goes on where the first stopped
(same sources, same card). A stage runs in a process of its own: what hangs or breaks the GPU is one error, and the
stage goes on behind it. Goals stand beside the figures. Exit code: 0 where all that ran is right, 1 where a value is
wrong or something failed, 2 without a GPU, 3 where there was no time for everything. Missed goals change no exit code.

    python benchmarks/gpu_check.py --out DIR
    python benchmarks/gpu_check.py --out DIR --show               # the tables of what is there; needs no GPU
    python benchmarks/gpu_check.py --stage values --interpret     # small shapes in Triton's interpreter; needs no GPU
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.gpu_check_plan import ROOT, Record, invariance_costs, table, verdicts
from benchmarks.gpu_check_watch import LATE_S, NO_GPU, NO_TIME, WRONG, environment, watch

# The first two take under eight minutes together, and all of it under ten, with everything but printing.
SECONDS = {"values": 160.0, "speed": 220.0, "steps": 210.0}


def run_stage(stage: str, args: argparse.Namespace, seed: int, links: Path) -> int | None:
    """Run a stage in its process; returns its exit code, None where time ended it."""
    seconds = SECONDS[stage] if args.seconds is None else args.seconds
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_check_stages.py"), stage, "--out", str(args.out)]
    command += ["--seconds", str(seconds - LATE_S), "--seed", str(seed)]
    command += ["--interpret"] * args.interpret + (["--layers", str(args.layers)] if args.layers else [])
    until = time.monotonic() + seconds
    return watch(command, args.out / f"{stage}.json", until, environment(links))


def printed(stage: str, record: Record) -> None:
    """Print the table of a stage, and what was left out."""
    print(f"\n{stage} ({record.key.get('card')}, {record.seconds:.0f} s, {record.path})")
    for line in (*table(record.results), *invariance_costs(record.results)):
        print(line)
    for name, why in record.left_out.items():
        print(f"left out: {name}: {why}")
    sys.stdout.flush()  # whatever ends a later stage


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", nargs="+", choices=SECONDS, default=list(SECONDS))
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "out" / "gpu_check")
    parser.add_argument("--seconds", type=float, help="of each stage; default: 160, 220, 210")
    parser.add_argument("--layers", type=int, help="of the checkpoint of stage 3; default: all 48, 61 GB")
    parser.add_argument("--seed", type=int, help="of the inputs of stage 1; default: another every time")
    parser.add_argument("--show", action="store_true", help="print the tables of what is there, run nothing")
    parser.add_argument("--interpret", action="store_true", help="stage 1 with small shapes, without a GPU")
    args = parser.parse_args()
    if args.interpret:
        args.stage = ["values"]
    seed = random.SystemRandom().randrange(1 << 31) if args.seed is None else args.seed
    records, could_begin = [], True
    for stage in args.stage:
        if not args.show:
            with tempfile.TemporaryDirectory() as links:
                ended = run_stage(stage, args, seed, Path(links))
            if ended == NO_GPU:
                return NO_GPU
            could_begin &= not ended
        record = Record.read(args.out / f"{stage}.json")
        if record is None:
            print(f"\n{stage}: nothing is there")
            continue
        printed(stage, record)
        records.append(record)
    print("\ngoals")
    for line in verdicts(record.results for record in records):
        print(f"  {line}")
    if not could_begin or any("error" in one for record in records for one in record.results.values()):
        return WRONG
    return NO_TIME if any(record.left_out for record in records) else 0


if __name__ == "__main__":
    sys.exit(main())
