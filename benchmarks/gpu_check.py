"""Are the GPU kernels right on this GPU, how near do they come to what it can do, and how long are whole steps?

One command for a machine with one GPU, in three stages, each of which writes its JSON as it goes:

1. `values`: every kernel in bf16, fp8, int8 and int4, over KV in bf16, fp8 and int8, against fp64 on fresh random
   inputs;
2. `speed`: share of the measured copy bandwidth and matrix rate at the shapes of six published models, beside torch's
   grouped product and scaled dot product attention, and what batch-invariant products cost;
3. `steps`: decode and prefill of a random Qwen3-30B-A3B through the engine, with CUDA graphs and without, batch
   invariance, and what the memory moves by the GPU's own counter.

Kernels are compiled by parallel processes first. Every stage has a time budget and begins with what matters most; what
there was no time for is named, and a second run goes on where the first stopped (same sources, same card). Goals stand
beside the figures. Exit code: 0 where all that ran is right, 1 where a value is wrong or something failed, 2 without a
GPU, 3 where there was no time for everything. Missed goals change no exit code.

    python benchmarks/gpu_check.py --out DIR
    python benchmarks/gpu_check.py --stage values --interpret     # small shapes in Triton's interpreter; needs no GPU
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.gpu_check_plan import (
    ROOT,
    RUNTIME_SOURCES,
    SOURCES,
    Budget,
    Item,
    Record,
    invariance_costs,
    run_items,
    source_hash,
    table,
    verdicts,
)

STAGES = ("values", "speed", "steps")
# The first two take under eight minutes together, compiling included.
SECONDS = {"values": 170.0, "speed": 300.0, "steps": 330.0}
_COMPILE_SHARE = 0.4
NO_GPU, WRONG, NO_TIME = 2, 1, 3


def cases(*, small: bool) -> list[Any]:
    """Return the cases of stage 1, the most important first."""
    from benchmarks.gpu_check_values import moe_cases
    from benchmarks.gpu_check_values_attention import attention_cases
    from benchmarks.gpu_check_values_linear import linear_cases

    made = [*moe_cases(small=small), *attention_cases(small=small), *linear_cases(small=small)]
    return sorted(made, key=lambda case: case.rank)


def speeds() -> list[Any]:
    """Return what stage 2 measures, the most important first."""
    from benchmarks.gpu_check_rows import row_speeds
    from benchmarks.gpu_check_speed import attention_speeds, expert_speeds

    return sorted([*expert_speeds(), *attention_speeds(), *row_speeds()], key=lambda speed: speed.rank)


def warmed(part: tuple[str, int, int]) -> int:
    """Compile every n-th distinct kernel of a stage, in a process of its own; returns how many."""
    import torch

    from benchmarks.gpu_check_device import warm
    from benchmarks.gpu_check_inputs import Place
    from moewe.models.kernels.choice import target_of
    from moewe.native.gpu.compiling import launch_key

    stage, own, parts = part
    target, place = target_of(torch.device("cuda")), Place(device=torch.device("meta"))
    if stage == "values":
        launches = (launch for case in cases(small=False) for launch in case.make(place, target).launches)
    else:
        launches = (launch for speed in speeds() for launch in speed.launches(target))
    seen: set[str] = set()
    done = 0
    for launch in launches:
        key = launch_key(launch, target)
        if key in seen:
            continue
        seen.add(key)
        if len(seen) % parts == own:
            warm(launch)
            done += 1
    return done


def told(number: list[int], total: int, name: str, figures: dict[str, Any]) -> None:
    """Print one line of progress."""
    number[0] += 1
    what = figures.get("error") or (f"{figures['us']:.1f} us" if "us" in figures else figures.get("said", ""))
    print(f"  [{number[0]}/{total}] {name}: {what}", file=sys.stderr, flush=True)


def run_stage(
    stage: str, items: Iterable[Item], out: Path, key: dict[str, str], seconds: float, *, compile_ahead: bool
) -> Record:
    """Run what is left of a stage; returns its record."""
    record = Record.open(out / f"{stage}.json", key)
    made = list(items)
    left = [item for item in made if item.name not in record.results]
    print(f"{stage}: {len(left)} of {len(made)} to do", file=sys.stderr, flush=True)
    if not left:
        return record
    budget = Budget(seconds)
    if compile_ahead:
        from benchmarks import gpu_check_device

        gpu_check_device.compile_ahead(warmed, stage, _COMPILE_SHARE * seconds)
    run_items(made, record, budget, partial(told, [0], len(left)))
    return record


def values_stage(out: Path, seconds: float, seed: int, *, interpret: bool) -> Record:
    """Run stage 1."""
    import torch

    from benchmarks.gpu_check_device import card, memory_given_back
    from benchmarks.gpu_check_inputs import Place
    from moewe.models.kernels.choice import target_of

    place = Place(device=torch.device("cpu" if interpret else "cuda"), small=interpret)
    target = target_of(place.device)

    def run(case: Any, number: int) -> dict[str, Any]:
        torch.manual_seed(seed + number)
        with memory_given_back():
            return {**case.run(place, target), "seed": seed + number}

    items = [
        Item(name=case.name, rank=case.rank, run=partial(run, case, number), floor_s=0.2)
        for number, case in enumerate(cases(small=interpret))
    ]
    key = {"sources": source_hash(SOURCES), **card()}
    return run_stage("values", items, out, key, seconds, compile_ahead=not interpret)


def speed_stage(out: Path, seconds: float) -> Record:
    """Run stage 2."""
    import torch

    from benchmarks.gpu_check_device import card, ceilings, memory_given_back
    from benchmarks.gpu_check_inputs import Place
    from moewe.models.kernels.choice import target_of

    place, reached = Place(device=torch.device("cuda")), ceilings()
    target = target_of(place.device)
    print(f"  this GPU copies {reached['copy_bytes_per_second'] / 1e12:.2f} TB/s and multiplies "
          f"{reached['matrix_flops_per_second'] / 1e12:.0f} TFLOP/s in bf16", file=sys.stderr)  # fmt: skip

    def run(speed: Any) -> dict[str, Any]:
        with memory_given_back():
            return {**speed.run(place, target, reached)}

    items = [Item(name=one.name, rank=one.rank, run=partial(run, one), floor_s=0.5) for one in speeds()]
    key = {"sources": source_hash(SOURCES), **card()}
    return run_stage("speed", items, out, key, seconds, compile_ahead=True)


def steps_stage(out: Path, seconds: float, layers: int | None) -> Record:
    """Run stage 3."""
    import torch

    from benchmarks import gpu_check_steps as steps
    from benchmarks.gpu_check_device import card, ceilings

    reached, uuid = ceilings(), f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    torch.cuda.empty_cache()
    with tempfile.TemporaryDirectory() as folder:
        engines = steps.Engines(Path(folder), steps.raw_config(layers), steps.options_for_gpu())
        key = {"sources": source_hash(RUNTIME_SOURCES), "layers": str(layers or "all"), **card()}
        try:
            return run_stage("steps", steps.items(engines, reached, uuid), out, key, seconds, compile_ahead=False)
        finally:
            engines.close()


def printed(stage: str, record: Record) -> None:
    """Print the table of a stage, and what was left out."""
    print(f"\n{stage} ({record.key.get('card')}, {record.seconds:.0f} s, {record.path})")
    for line in table(record.results):
        print(line)
    for line in invariance_costs(record.results):
        print(line)
    for name, why in record.left_out.items():
        print(f"left out: {name}: {why}")


def no_gpu() -> str | None:
    """Return why there is no GPU for this script, or None."""
    import torch

    if torch.version.cuda is None:
        return "this torch is for CPUs"
    return None if torch.cuda.is_available() else "torch sees no GPU; check the driver (nvidia-smi)"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "out" / "gpu_check")
    parser.add_argument("--seconds", type=float, help="of each stage; default: 170, 300, 330")
    parser.add_argument("--layers", type=int, help="of the checkpoint of stage 3; default: all 48, 61 GB")
    parser.add_argument("--seed", type=int, help="of the inputs of stage 1; default: another every time")
    parser.add_argument("--interpret", action="store_true", help="stage 1 with small shapes, without a GPU")
    args = parser.parse_args()
    if args.interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton
        args.stage = ["values"]
    else:
        os.environ.pop("TRITON_INTERPRET", None)
        if (why := no_gpu()) is not None:
            print(f"gpu_check needs a GPU: {why}; `--interpret` proves the script without one", file=sys.stderr)
            return NO_GPU
    seed = random.SystemRandom().randrange(1 << 31) if args.seed is None else args.seed
    records = []
    for stage in args.stage:
        seconds = SECONDS[stage] if args.seconds is None else args.seconds
        if stage == "values":
            record = values_stage(args.out, seconds, seed, interpret=args.interpret)
        elif stage == "speed":
            record = speed_stage(args.out, seconds)
        else:
            record = steps_stage(args.out, seconds, args.layers)
        printed(stage, record)
        records.append(record)
    print("\ngoals")
    for line in verdicts(record.results for record in records):
        print(f"  {line}")
    if any("error" in one for record in records for one in record.results.values()):
        return WRONG
    return NO_TIME if any(record.left_out for record in records) else 0


if __name__ == "__main__":
    sys.exit(main())
