"""What would live balancing (`--eplb auto`) make of routing: how even are ranks, how much time is won, moves included?

Simulated, not measured: recorded and synthetic routing is played window by window through the same planner that serves,
with the model of step time (moewe.topologies.cost) in place of a clock and an assumed time for each transfer. A trace
file (moewe.moe.wide_ep.traces) joins with --trace; `--trace demo` records the demo while it answers.
Units: imbalance is rows of the fullest rank / mean in the last window, seconds are those of the model.

    python benchmarks/balancing.py --trace demo
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import records
from placement import record_demo

from moewe.moe.wide_ep import synthetic
from moewe.moe.wide_ep.balancing import LoadSteps, PhaseLoad, PolicyOptions, expected_imbalance, simulate
from moewe.moe.wide_ep.balancing.load_steps import total_load
from moewe.moe.wide_ep.placement import expert_load, first_placement
from moewe.moe.wide_ep.traces import RoutingTrace, load_trace
from moewe.topologies.cost import ExpertSize, expert_layer_seconds
from moewe.topologies.machine import HOST_CEILINGS

WINDOW = 4096
REDUNDANT = 0.25  # of the experts
# An expert of 4096 x 1536 in bf16, on ranks that share a host; a transfer at some 10 GB/s, as from the page cache.
SIZE = ExpertSize(expert_bytes=6 * 4096 * 1536, row_bytes=8192, flops=6 * 4096 * 1536)
OPTIONS = PolicyOptions(transfer_s=0.004, horizon_steps=100)


@dataclass(frozen=True, kw_only=True)
class Case:
    """Routing of some layers [L, T, K] and the steps of a window of it: few for prompts, many for decode."""

    name: str
    num_experts: int
    width: int
    steps: int
    ids: np.ndarray
    window: int = WINDOW


def synthetic_cases(num_windows: int, num_layers: int) -> Iterator[Case]:
    """256 experts, top-8, at EP8: popularity that is even, that stays, and that changes ever faster."""
    makers: dict[str, tuple[Callable[..., np.ndarray], dict[str, Any]]] = {
        "uniform": (synthetic.uniform, {}),
        "zipf 1.2": (synthetic.zipf, {}),
        **{
            f"hot set shifts after {windows:g} windows": (synthetic.shifting, {"period": int(WINDOW * windows)})
            for windows in (0.5, 1, 2, 3, 6, 10)
        },
    }
    for name, (make, options) in makers.items():
        ids = np.stack([make(num_windows * WINDOW, 256, 8, seed=seed, **options) for seed in range(num_layers)])
        for phase, steps in (("prompts", 1), ("decode", 64)):
            yield Case(name=f"{name}, {phase}", num_experts=256, width=8, steps=steps, ids=ids)


def trace_cases(trace: RoutingTrace, name: str) -> Iterator[Case]:
    """The phases of a trace at EP4, in windows of an eighth of it, but at most WINDOW tokens."""
    for phase, ids in trace.ids.items():
        window = min(WINDOW, ids.shape[1] // 8)
        if window:
            steps = 1 if phase == "prefill" else max(1, window // 8)
            yield Case(
                name=f"{name} {phase}", num_experts=trace.num_experts, width=4, steps=steps, ids=ids, window=window
            )


def windows_of(case: Case) -> list[LoadSteps]:
    """Return the loads of a case, window by window."""
    number = case.ids.shape[1] // case.window
    parts = [case.ids[:, i * case.window : (i + 1) * case.window] for i in range(number)]
    return [(PhaseLoad(load=expert_load(part, case.num_experts), steps=case.steps),) for part in parts]


def measure(case: Case) -> dict[str, float]:
    """Play a case; the last window is judged and not decided on."""
    domains = (0,) * case.width
    start = first_placement(
        case.ids.shape[0], case.num_experts, num_redundant=round(case.num_experts * REDUNDANT), domains=domains
    )
    ceilings = replace(
        HOST_CEILINGS,
        memory_bandwidth=HOST_CEILINGS.memory_bandwidth / case.width,
        flops=HOST_CEILINGS.flops / case.width,
    )
    layer_time = expert_layer_seconds(SIZE, ceilings, start.slot_ranges, domains)
    windows = windows_of(case)
    result = simulate(start, windows, layer_time=layer_time, options=OPTIONS)
    judged = total_load(windows[-1])
    return {
        "imbalance_off": float(expected_imbalance(start, judged).mean()),
        "imbalance_auto": float(expected_imbalance(result.placement, judged).mean()),
        "seconds_off": result.off_seconds,
        "seconds_auto": result.seconds,
        "ratio": result.seconds / result.off_seconds,
        "moves": result.num_moves,
        "transfer_seconds": result.transfer_seconds,
        "windows": len(windows),
    }


def main() -> None:
    """Play all, print a table, write a record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", nargs="*", default=[], help="trace files, or the word demo")
    parser.add_argument("--windows", type=int, default=24)
    parser.add_argument("--layers", type=int, default=2, help="synthetic layers, each with a seed of its own")
    parser.add_argument("--no-synthetic", action="store_true")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    print("| routing | windows | imbalance off | auto | moves | seconds auto / off |\n|---|---|---|---|---|---|")

    def run(case: Case) -> None:
        results[case.name] = found = measure(case)
        print(
            f"| {case.name} | {found['windows']} | {found['imbalance_off']:.2f} | {found['imbalance_auto']:.2f} "
            f"| {found['moves']} | {found['ratio']:.3f} |",
            flush=True,
        )

    if not arguments.no_synthetic:
        for case in synthetic_cases(arguments.windows, arguments.layers):
            run(case)
    for name in arguments.trace:
        trace = record_demo() if name == "demo" else load_trace(Path(name))
        for case in trace_cases(trace, Path(name).stem):
            run(case)
    worst = max(results, key=lambda name: results[name]["ratio"])
    print(f"slowest against off: {worst}, {results[worst]['ratio']:.3f}")
    records.write("balancing", {"cases": results, "window": WINDOW, "transfer_s": OPTIONS.transfer_s}, arguments.out)


if __name__ == "__main__":
    main()
