"""One stage of gpu_check, in the process that gpu_check_watch.py looks after: `STAGE --out DIR --until TIME ...`.

Not the command (gpu_check.py). Everything that a stage does counts as its time: starting Python and torch, compiling,
measuring what the card reaches, weights of an engine. Units: seconds.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from benchmarks.gpu_check_plan import (
    SOURCES,
    Budget,
    Item,
    Record,
    Unsound,
    run_items,
    source_hash,
)
from benchmarks.gpu_check_watch import NO_GPU, UNSOUND, die_with_parent

_COMPILE_SHARE = 0.45
_INTERPRETED_S = 600.0  # at most for an item, on a machine that does other things too


def cases(*, small: bool) -> list[Any]:
    """Return the cases of stage 1, the most important first."""
    from benchmarks.gpu_check_values import moe_cases
    from benchmarks.gpu_check_values_attention import attention_cases
    from benchmarks.gpu_check_values_decode import decode_cases
    from benchmarks.gpu_check_values_linear import linear_cases

    parts = (moe_cases, attention_cases, linear_cases, decode_cases)
    made = [case for part in parts for case in part(small=small)]
    return sorted(made, key=lambda case: case.rank)


def speeds() -> list[Any]:
    """Return what stage 2 measures, the most important first."""
    from benchmarks.gpu_check_linear import linear_speeds
    from benchmarks.gpu_check_rows import row_speeds
    from benchmarks.gpu_check_speed import attention_speeds, expert_speeds

    made = [*expert_speeds(), *attention_speeds(), *row_speeds(), *linear_speeds()]
    return sorted(made, key=lambda speed: speed.rank)


def stage_launches(stage: str, target: Any) -> Iterator[Any]:
    """Yield what a stage launches, the most important first, over tensors without memory."""
    import torch

    from benchmarks.gpu_check_inputs import Place

    if stage == "values":
        place = Place(device=torch.device("meta"))
        for case in cases(small=False):
            yield from case.make(place, target).launches
    elif stage == "speed":
        for speed in speeds():
            yield from speed.launches(target)
    else:
        from benchmarks.gpu_check_steps import step_launches

        yield from step_launches(target)


@cache
def distinct_launches(stage: str, target: Any) -> list[Any]:
    """Return of `stage_launches` one for each kernel that must be compiled."""
    from moewe.native.gpu.compiling import launch_key

    found: dict[str, Any] = {}
    for launch in stage_launches(stage, target):
        found.setdefault(launch_key(launch, target), launch)
    return list(found.values())


def warmed(job: tuple[str, int]) -> None:
    """Compile the kernel of this number of a stage, in a process of its own, which does several."""
    die_with_parent()
    import torch

    from benchmarks.gpu_check_device import warm
    from moewe.models.kernels.choice import target_of

    stage, number = job
    warm(distinct_launches(stage, target_of(torch.device("cuda", 0)))[number])


def told(number: list[int], total: int, name: str, figures: dict[str, Any]) -> None:
    """Print one line of progress."""
    number[0] += 1
    what = figures.get("error") or (f"{figures['us']:.1f} us" if "us" in figures else figures.get("said", ""))
    print(f"  [{number[0]}/{total}] {name}: {what}", file=sys.stderr, flush=True)


class Run:
    """A stage being run.

    Args:
        args: of the command line; the stage began `args.seconds` before `args.until`.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.budget = Budget(args.seconds, start=args.until - args.seconds)

    def items(self, items: Iterable[Item], key: dict[str, str], target: Any) -> None:
        """Run what is left; for a GPU kernels are compiled beforehand.

        Raises:
            Unsound: this process can run no more of it.
        """
        from benchmarks import gpu_check_device as device

        args = self.args
        record = Record.open(args.out / f"{args.stage}.json", key, keep_errors=args.keep_errors)
        made = list(items)
        left = [item for item in made if item.name not in record.results]
        print(f"{args.stage}: {len(left)} of {len(made)} to do", file=sys.stderr, flush=True)
        if left and target is not None and not args.keep_errors:  # begun again, it has compiled
            jobs = [(args.stage, i) for i in range(len(distinct_launches(args.stage, target)))]
            device.compile_ahead(warmed, jobs, min(_COMPILE_SHARE * args.seconds, self.budget.left))
        run_items(made, record, self.budget, partial(told, [0], len(left)), is_sound=device.is_sound)


def values_stage(run: Run) -> None:
    """Run stage 1."""
    import torch

    from benchmarks.gpu_check_device import card, memory_given_back
    from benchmarks.gpu_check_inputs import Place
    from moewe.models.kernels.choice import target_of

    interpret, seed = run.args.interpret, run.args.seed
    place = Place(device=torch.device("cpu") if interpret else torch.device("cuda", 0), small=interpret)
    target = target_of(place.device)

    def values(case: Any, number: int) -> dict[str, Any]:
        torch.manual_seed(seed + number)
        with memory_given_back():
            return {**case.run(place, target), "seed": seed + number}

    items = [
        Item(name=case.name, rank=case.rank, run=partial(values, case, number), floor_s=0.2,
             **({"most_s": _INTERPRETED_S} if interpret else {}))
        for number, case in enumerate(cases(small=interpret))
    ]  # fmt: skip
    run.items(items, {"sources": source_hash(SOURCES["values"]), **card()}, None if interpret else target)


def speed_stage(run: Run) -> None:
    """Run stage 2."""
    import torch

    from benchmarks.gpu_check_device import CEILINGS, card, ceilings, memory_given_back, told_ceilings
    from benchmarks.gpu_check_inputs import Place
    from moewe.models.kernels.choice import target_of

    place, reached = Place(device=torch.device("cuda", 0)), ceilings()
    target = target_of(place.device)

    def speed(one: Any) -> dict[str, Any]:
        with memory_given_back():
            return {**one.run(place, target, reached)}

    # What broke this stage's process once breaks it again: where it is begun anew, torch is not asked for that.
    record = Record.read(run.args.out / "speed.json") if run.args.keep_errors else None
    refused = set() if record is None else refused_baselines(record.results)
    measured = [replace(one, baseline=None) if family(one.name) in refused else one for one in speeds()]
    items = [Item(name=CEILINGS, rank=-1, run=lambda: {**reached, "said": told_ceilings(reached)}, floor_s=0.0)]
    items += [Item(name=one.name, rank=one.rank, run=partial(speed, one), floor_s=0.5) for one in measured]
    run.items(items, {"sources": source_hash(SOURCES["speed"]), **card()}, target)


def family(name: str) -> str:
    """Return the first word of an item's name, which says what is measured."""
    return name.split()[0]


def refused_baselines(results: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """Return the families in which torch could not do the same."""
    return {family(name) for name, figures in results.items() if "torch_error" in figures}


def steps_stage(run: Run) -> None:
    """Run stage 3."""
    import torch

    from benchmarks import gpu_check_steps as steps
    from benchmarks.gpu_check_device import card, ceilings
    from moewe.models.kernels.choice import target_of

    reached, uuid, layers = ceilings(), f"GPU-{torch.cuda.get_device_properties(0).uuid}", run.args.layers
    torch.cuda.empty_cache()
    with tempfile.TemporaryDirectory() as folder:
        engines = steps.Engines(Path(folder), steps.raw_config(layers), steps.options_for_gpu())
        key = {"sources": source_hash(SOURCES["steps"]), "layers": str(layers or "all"), **card()}
        try:
            run.items(steps.items(engines, reached, uuid), key, target_of(torch.device("cuda", 0)))
        finally:
            engines.close()


STAGES: dict[str, Callable[[Run], None]] = {"values": values_stage, "speed": speed_stage, "steps": steps_stage}


def no_gpu() -> str | None:
    """Return why there is no GPU for this script, or None."""
    import torch

    if torch.version.cuda is None:
        return "this torch is for CPUs"
    return None if torch.cuda.is_available() else "torch sees no GPU; check the driver (nvidia-smi)"


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--until", type=float, required=True, help="when time is over, by the monotonic clock")
    parser.add_argument("--seconds", type=float, required=True, help="of the stage in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--interpret", action="store_true")
    parser.add_argument("--keep-errors", action="store_true", help="what failed is not tried again")
    args = parser.parse_args(words)
    if args.interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton
    else:
        os.environ.pop("TRITON_INTERPRET", None)
        if (why := no_gpu()) is not None:
            print(f"gpu_check needs a GPU: {why}; `--interpret` proves the script without one", file=sys.stderr)
            return NO_GPU
    try:
        STAGES[args.stage](Run(args))
    except Unsound:
        return UNSOUND
    return 0


if __name__ == "__main__":
    die_with_parent()
    ended = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(ended)  # a broken GPU may not let Python end by itself
