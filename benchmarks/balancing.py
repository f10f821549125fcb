"""What would live balancing (`--eplb auto`) make of routing: how even are ranks, how much time is won, moves included?

Simulated, not measured: recorded and synthetic routing is played window by window through the planner that serves,
with the model of a layer's time (moewe.topologies.layer_cost) in place of a clock and an assumed time for each
transfer. Once all ranks share a host; once they are GPUs in two domains of as many ranks with a slow link between,
which one copy of a token crosses. A trace file (moewe.moe.wide_ep.traces) joins with --trace; `--trace demo` records
the demo while it answers.
Units: imbalance is rows of the fullest rank / mean in the last window, crossing is copies of tokens to the other domain
in it, seconds are those of the model.

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
from moewe.moe.wide_ep.placement import ExpertPlacement, expert_load, first_placement, traffic
from moewe.moe.wide_ep.traces import RoutingTrace, load_trace
from moewe.topologies.layer_cost import ExpertSize, LayerCost, TokenRows
from moewe.topologies.machine import GPU_CEILINGS, HOST_CEILINGS

WINDOW = 4096
REDUNDANT = 0.25  # of the experts
# An expert of 4096 x 1536 in bf16, on ranks that share a host; a transfer at some 10 GB/s, as from the page cache.
SIZE = ExpertSize(expert_bytes=6 * 4096 * 1536, row_bytes=8192, flops=6 * 4096 * 1536)
OPTIONS = PolicyOptions(transfer_s=0.004, horizon_steps=100)
# GPUs are through with the tokens of a window in a millisecond: theirs are that many times as long, and a minute has
# the steps of some sixty such layers.
GPU_TIMES, GPU_STEPS = 16, 700


@dataclass(frozen=True, kw_only=True)
class Case:
    """Routing of some layers [L, T, K] and the steps of a window of it: few for prompts, many for decode."""

    name: str
    num_experts: int
    width: int
    steps: int
    ids: np.ndarray
    window: int = WINDOW


def synthetic_cases(num_windows: int, num_layers: int, only: str) -> Iterator[Case]:
    """256 experts, top-8, at EP8: popularity that is even, that stays, and that changes; those named by `only`."""
    makers: dict[str, tuple[Callable[..., np.ndarray], dict[str, Any]]] = {
        "uniform": (synthetic.uniform, {}),
        "zipf 1.2": (synthetic.zipf, {}),
        **{
            f"hot set shifts after {windows:g} windows": (synthetic.shifting, {"period": int(WINDOW * windows)})
            for windows in (1, 2, 6, 10)
        },
    }
    for name, (make, options) in makers.items():
        if only not in name:
            continue
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


def windows_of(case: Case, times: int) -> list[LoadSteps]:
    """Return the loads of a case, window by window; each is played so many times at once."""
    number = case.ids.shape[1] // case.window
    parts = [case.ids[:, i * case.window : (i + 1) * case.window] for i in range(number)]
    return [(PhaseLoad(load=times * expert_load(part, case.num_experts), steps=times * case.steps),) for part in parts]


def measure(case: Case, num_domains: int) -> dict[str, float]:
    """Play a case; the last window is judged and not decided on."""
    domains = tuple(rank * num_domains // case.width for rank in range(case.width))
    start = first_placement(
        case.ids.shape[0], case.num_experts, num_redundant=round(case.num_experts * REDUNDANT), domains=domains
    )
    ceilings, options = GPU_CEILINGS, replace(OPTIONS, horizon_steps=GPU_STEPS)
    token = TokenRows(top_k=case.ids.shape[2], together=num_domains > 1)
    if num_domains == 1:
        options = OPTIONS
        ceilings = replace(
            HOST_CEILINGS,
            memory_bandwidth=HOST_CEILINGS.memory_bandwidth / case.width,
            flops=HOST_CEILINGS.flops / case.width,
        )
    model = LayerCost(SIZE, ceilings, start.slot_ranges, domains, token=token)
    windows = windows_of(case, 1 if num_domains == 1 else GPU_TIMES)
    result = simulate(start, windows, model=model, options=options)
    judged = total_load(windows[-1])
    found = {
        "seconds_off": result.off_seconds,
        "seconds_auto": result.seconds,
        "ratio": result.seconds / result.off_seconds,
        "moves": result.num_moves,
        "transfer_seconds": result.transfer_seconds,
        "windows": len(windows),
    }
    for name, placement in (("off", start), ("auto", result.placement)):
        found[f"imbalance_{name}"] = float(expected_imbalance(placement, judged).mean())
        found[f"crossing_{name}"] = crossing(placement, case.ids[:, -case.window :])
    return found


def crossing(placement: ExpertPlacement, ids: np.ndarray) -> float:
    """Return copies that cross to other domains, for a token and layer, of tokens [L, T, K] that come in turns."""
    source = np.arange(ids.shape[1]) % placement.num_ranks
    copies = [traffic(chosen, placement, layer, source).domain_copies for layer, chosen in enumerate(ids)]
    return float(np.mean(copies)) / ids.shape[1]


def main() -> None:
    """Play all, print a table, write a record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", nargs="*", default=[], help="trace files, or the word demo")
    parser.add_argument("--windows", type=int, default=96)
    parser.add_argument("--layers", type=int, default=1, help="synthetic layers, each with a seed of its own")
    parser.add_argument("--no-synthetic", action="store_true")
    parser.add_argument("--only", default="", help="play synthetic cases with this in their name")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    print(
        "| routing | windows | imbalance off | auto | moves | seconds auto / off "
        "| two domains: imbalance off | auto | crossing off | auto | moves | seconds auto / off |\n" + "|---" * 12 + "|"
    )

    def run(case: Case) -> None:
        one, two = (measure(case, num_domains) for num_domains in (1, 2))
        results[case.name] = {"one_domain": one, "two_domains": two}
        cells = [f"{number:.2f}" for number in (one["imbalance_off"], one["imbalance_auto"])]
        cells += [f"{one['moves']}", f"{one['ratio']:.3f}"]
        cells += [f"{two[f'{what}_{name}']:.2f}" for what in ("imbalance", "crossing") for name in ("off", "auto")]
        cells += [f"{two['moves']}", f"{two['ratio']:.3f}"]
        print(f"| {case.name} | {one['windows']} | {' | '.join(cells)} |", flush=True)

    if not arguments.no_synthetic:
        for case in synthetic_cases(arguments.windows, arguments.layers, arguments.only):
            run(case)
    for name in arguments.trace:
        trace = record_demo() if name == "demo" else load_trace(Path(name))
        for case in trace_cases(trace, Path(name).stem):
            run(case)
    for domains in ("one_domain", "two_domains"):
        worst = max(results, key=lambda name: results[name][domains]["ratio"])
        print(f"slowest against off, {domains}: {worst}, {results[worst][domains]['ratio']:.3f}")
    records.write("balancing", {"cases": results, "window": WINDOW, "transfer_s": OPTIONS.transfer_s}, arguments.out)


if __name__ == "__main__":
    main()
