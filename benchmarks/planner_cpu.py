"""Are the planner's decode steps right on this host, and does it name the faster layout? Measured on the real engine.

Three models of random weights, each alone (EP1), as two replicas (DP2) and with experts over two and four ranks, whose
rows go through shared memory or over a slowed link; five batches. The planner knows of the host what an EP1 start
measures (bandwidth, rate of products) and of an exchange what the ranks of that layout measured before they served; its
constants for hosts are those of topologies/planner/step_time.py, or with --fit those that suit EP1 of one model best.
A comparison is a pair of layouts at one model, batch and link whose steps differ by more than 5 %.

    python benchmarks/planner_cpu.py                       # measures (a quarter of an hour, on a quiet machine)
    python benchmarks/planner_cpu.py --from FILE [--fit]   # works with what was measured before

Units: seconds; percent of what was measured.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import records
from cpu_steps import MODELS, PROMPT_TOKENS, Measured, measure, write_model

from moewe.models.architecture import architecture
from moewe.models.families import load_config
from moewe.runtime.messages import Ready
from moewe.topologies import parse_topology
from moewe.topologies.exchange_cost import ExchangeCost
from moewe.topologies.planner.architecture import Architecture
from moewe.topologies.planner.hardware import Hardware, local_host
from moewe.topologies.planner.step_time import MEASURED, Constants, Rows, Setting, step_time

SLOW = "rate=200,delay=500"  # MB/s and microseconds
LAYOUTS = {
    "shared memory": ("EP1DP1", "EP1DP2", "EP2DP1", "EP4DP1"),
    "slow link": ("EP1DP1", "EP1DP2", f"EP2DP1[domains=1+1,{SLOW}]", f"EP4DP1[domains=2+2,{SLOW}]"),
}
BATCHES = [2, 4, 8, 16, 32]
FITTED_ON = "granite"
DIFFERS = 0.05


@dataclass(frozen=True)
class Point:
    """One step: which, how long it took, and how long it should."""

    model: str
    topology: str
    rows: int
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Relative to what was measured."""
        return self.predicted / self.measured - 1


def measure_all(rounds: int) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Return what was measured, by model and topology, a record a round."""
    topologies = list(dict.fromkeys(itertools.chain(*LAYOUTS.values())))
    found: dict[str, dict[str, list[dict[str, Any]]]] = {name: {each: [] for each in topologies} for name in MODELS}
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        for turn, name, topology in itertools.product(range(rounds), MODELS, topologies):
            path = write_model(Path(folder) / name, name)
            threads = max(1, cores // parse_topology(topology).num_ranks)
            done = measure(path, topology, BATCHES, threads=threads)
            found[name][topology].append(done.record())
            steps = ", ".join(f"{rows}: {1e3 * seconds:.1f}" for rows, seconds in done.seconds.items())
            print(f"round {turn + 1}  {name:8} {topology:38} ms of a step by rows  {steps}", flush=True)
    return found


def read(records_of: list[dict[str, Any]]) -> Measured:
    """Return what was measured in all rounds together: the first start, medians of steps."""
    first = msgspec.convert(records_of[0]["ready"], list[Ready])
    rows = list(records_of[0]["seconds"])
    return Measured(first, {int(each): statistics.median(one["seconds"][each] for one in records_of) for each in rows})


def models() -> dict[str, Architecture]:
    """Return what the planner knows of each model."""
    with tempfile.TemporaryDirectory() as folder:
        return {
            name: architecture(load_config(write_model(Path(folder) / name, name)), name=name, weights="bf16")
            for name in MODELS
        }


def host(alone: Measured) -> Hardware:
    """Return this host as a start of EP1 measured it."""
    (ready,) = alone.ready
    return local_host(
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=0.0,
        memory_bandwidth=ready.memory_bandwidth[0],
        bf16_flops=ready.matrix_rates[0]["bfloat16"],
        int8_flops=ready.matrix_rates[0]["int8"],
    )


def setting(model: Architecture, topology: str, machine: Hardware, done: Measured, constants: Constants) -> Setting:
    """Return what the planner is asked."""
    links = done.ready[0].links
    link: ExchangeCost | None = links.exchanges[0] if links is not None else None
    return Setting(model=model, topology=parse_topology(topology), hardware=machine, constants=constants, link=link)


def rows_of(topology: str, rows: int, steps: int) -> Rows:
    """Return a step in which `rows` sequences over all ranks decode, in the middle of `steps`."""
    return Rows(decodes=rows / parse_topology(topology).num_ranks, context=PROMPT_TOKENS + steps / 2)


def fit(model: Architecture, machine: Hardware, done: Measured) -> Constants:
    """Return the constants with which EP1 of `model` is right: what reads, products and a step take, none negative."""
    plain = Constants(memory_efficiency=1.0, flops_efficiency=1.0, layer_seconds=0.0)
    asked = setting(model, "EP1DP1", machine, done, plain)
    known = []
    for rows in BATCHES:
        parts = step_time(asked, rows_of("EP1DP1", rows, 32)).parts
        reading = sum(part.num_bytes for part in parts) / asked.bandwidth
        computing = sum(part.flops for part in parts) / asked.rate("bf16")
        known.append([reading, computing, 1.0])
    measured = np.array([done.seconds[rows] for rows in BATCHES])
    matrix, used = np.array(known) / measured[:, None], [0, 1, 2]
    while True:
        found = np.linalg.lstsq(matrix[:, used], np.ones(len(measured)), rcond=None)[0].tolist()
        if min(found) > 0:
            break
        used.pop(found.index(min(found)))
    reading, computing, step = (dict(zip(used, found, strict=True)).get(which, 0.0) for which in range(3))
    return Constants(
        memory_efficiency=1 / max(reading, 1e-9),
        flops_efficiency=1 / max(computing, 1e-9),
        layer_seconds=step / model.footprint.num_layers,
    )


def points(found: dict[str, dict[str, list[dict[str, Any]]]], constants: Constants | None) -> Iterator[Point]:
    """Yield every step that was measured, with what the planner says of it."""
    known = models()
    fitted_on = read(found[FITTED_ON]["EP1DP1"])
    chosen = constants or fit(known[FITTED_ON], host(fitted_on), fitted_on)
    print(f"constants: {chosen}")
    for name, by_topology in found.items():
        machine = host(read(by_topology["EP1DP1"]))
        for topology, records_of in by_topology.items():
            done = read(records_of)
            for rows, seconds in done.seconds.items():
                asked = setting(known[name], topology, machine, done, chosen)
                yield Point(name, topology, rows, seconds, step_time(asked, rows_of(topology, rows, 32)).seconds)


def compare(all_points: list[Point]) -> tuple[int, int, int, int]:
    """Return pairs that differ and how many of them are named right; the same of the best of each choice."""
    pairs = right = choices = best_right = 0
    seen = set()
    for name, rows, names in itertools.product(MODELS, BATCHES, LAYOUTS.values()):
        here = [point for point in all_points if (point.model, point.rows) == (name, rows) and point.topology in names]
        for one, other in itertools.combinations(here, 2):
            fast, slow = sorted((one, other), key=lambda point: point.measured)
            if slow.measured > (1 + DIFFERS) * fast.measured and (fast, slow) not in seen:
                seen.add((fast, slow))
                pairs += 1
                right += fast.predicted < slow.predicted
        if len(here) == len(names):
            best, second = sorted(point.measured for point in here)[:2]
            if second > (1 + DIFFERS) * best:
                choices += 1
                best_right += min(here, key=lambda point: point.predicted).measured == best
    return pairs, right, choices, best_right


def report(all_points: list[Point]) -> dict[str, Any]:
    """Print errors and comparisons; return them."""
    figures: dict[str, Any] = {"points": [vars(point) | {"error": point.error} for point in all_points]}
    groups = {
        "all": all_points,
        "models that no constant has seen": [point for point in all_points if point.model != FITTED_ON],
        **{name: [point for point in all_points if point.model == name] for name in MODELS},
        **{
            topology: [point for point in all_points if point.topology == topology]
            for topology in dict.fromkeys(point.topology for point in all_points)
        },
    }
    for title, chosen in groups.items():
        errors = [abs(point.error) for point in chosen]
        signed = statistics.median(point.error for point in chosen)
        print(f"{title:40} {len(errors):3} steps, median error {statistics.median(errors):6.1%} ({signed:+.1%}), "
              f"greatest {max(errors):.0%}")  # fmt: skip
        figures[title] = statistics.median(errors)
    pairs, right, choices, best_right = compare(all_points)
    print(f"pairs of layouts that differ by more than {DIFFERS:.0%}: the faster named right in {right} of {pairs}; "
          f"the best of four in {best_right} of {choices}")  # fmt: skip
    return figures | {"pairs": pairs, "right": right, "choices": choices, "best_right": best_right}


def main() -> None:
    """Measure, or take what was measured, and hold the planner against it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="source", type=Path, help="a record of this script, instead of measuring")
    parser.add_argument(
        "--fit", action="store_true", help=f"constants from EP1 of {FITTED_ON}, not those of the planner"
    )
    parser.add_argument("--rounds", type=int, default=2, help="starts of each layout")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found = json.loads(args.source.read_text())["results"]["measured"] if args.source else measure_all(args.rounds)
    figures = report(list(points(found, None if args.fit else replace(MEASURED))))
    records.write("planner_cpu", {"measured": found, "planned": figures}, args.out)


if __name__ == "__main__":
    main()
