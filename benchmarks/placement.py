"""How even are ranks, and how much crosses domains, under each placement of experts, from EP8 to EP72?

Counts, not times: recorded and synthetic routing is replayed through placements. Every placement is made from one
window of tokens and judged on the next. A trace file (moewe.moe.wide_ep.traces) joins with --trace; `--trace demo`
records the demo model while it answers.
Units: imbalance is rows of the fullest rank / mean; KB are thousands of bytes a token and layer, both ways together.

    python benchmarks/placement.py
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import records

from moewe.moe.wide_ep import synthetic
from moewe.moe.wide_ep.placement import (
    ExpertPlacement,
    balanced_placement,
    coactivation,
    eplb_placement,
    expert_load,
    linear_placement,
    round_robin_placement,
    traffic,
)
from moewe.moe.wide_ep.traces import RoutingTrace, load_trace
from moewe.topologies import RankGrid, make_topology

ROW_BYTES = 7168 * 2  # a row of DeepSeek-V3 and Kimi K2 in bf16
WIDTHS = (8, 16, 32, 64, 72)
REDUNDANT = 0.25  # of the experts, rounded up so that slots divide: EPLB needs that, ours does not


@dataclass(frozen=True, kw_only=True)
class Case:
    """Routing of some layers: `fit` makes placements, `judge` measures them, [L, T, K] each."""

    name: str
    num_experts: int
    num_groups: int
    fit: np.ndarray
    judge: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Known:
    """What a policy may look at."""

    load: np.ndarray
    pairs: np.ndarray
    domains: tuple[int, ...]
    num_redundant: int
    num_groups: int

    @property
    def shape(self) -> tuple[int, int]:
        """L, E."""
        return self.load.shape[0], self.load.shape[1]


def ours(known: Known, num_redundant: int, *, sees_pairs: bool) -> ExpertPlacement:
    """Our placement; with pairs it also gets the groups of the router."""
    return balanced_placement(
        known.load,
        num_redundant=num_redundant,
        domains=known.domains,
        coactivation=known.pairs if sees_pairs else None,
        num_groups=known.num_groups if sees_pairs else 1,
    )


POLICIES: dict[str, Callable[[Known], ExpertPlacement]] = {
    "linear": lambda known: linear_placement(*known.shape, domains=known.domains),
    "round robin": lambda known: round_robin_placement(*known.shape, domains=known.domains),
    "ours, red=0": lambda known: ours(known, 0, sees_pairs=False),
    "eplb": lambda known: eplb_placement(
        known.load, num_redundant=known.num_redundant, domains=known.domains, num_groups=known.num_groups
    ),
    "ours": lambda known: ours(known, known.num_redundant, sees_pairs=False),
    "ours, pairs": lambda known: ours(known, known.num_redundant, sees_pairs=True),
}


def synthetic_cases(window: int, num_layers: int, only: tuple[str, ...]) -> Iterator[Case]:
    """Routing of 256-expert models (DeepSeek-V3: top-8, 8 groups) and 384-expert models (Kimi K2: top-8)."""
    makers: dict[str, tuple[Callable[..., np.ndarray], dict[str, Any], int]] = {
        "uniform": (synthetic.uniform, {}, 1),
        "zipf 1.2": (synthetic.zipf, {}, 1),
        "shifting": (synthetic.shifting, {"period": window * 3 // 2}, 1),
        "teams": (synthetic.correlated, {}, 1),
        "groups 4/8": (synthetic.grouped, {}, 8),
    }
    for num_experts in (256, 384):
        for name, (make, options, groups) in makers.items():
            if (groups > 1 and num_experts != 256) or not f"{name}, {num_experts}".startswith(only):
                continue
            ids = np.stack([make(2 * window, num_experts, 8, seed=seed, **options) for seed in range(num_layers)])
            yield Case(
                name=f"{name}, {num_experts}",
                num_experts=num_experts,
                num_groups=groups,
                fit=ids[:, :window],
                judge=ids[:, window:],
            )


def trace_cases(trace: RoutingTrace, name: str) -> Iterator[Case]:
    """The two halves of each recorded phase."""
    for phase, ids in trace.ids.items():
        half = ids.shape[1] // 2
        if half:
            yield Case(
                name=f"{name} {phase}",
                num_experts=trace.num_experts,
                num_groups=trace.num_groups,
                fit=ids[:, :half],
                judge=ids[:, half:],
            )


def record_demo() -> RoutingTrace:
    """Let the demo continue pieces of our own documentation and keep what its routers chose."""
    from moewe.runtime.options import engine_config
    from moewe.runtime.params import SamplingParams
    from moewe.runtime.recording import record_routing
    from moewe.runtime.session import locate

    pages = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
    text = "\n".join(page.read_text() for page in pages)
    prompts = [text[i * 3000 : i * 3000 + 600] for i in range(8)]
    config = engine_config({"model": "demo", "max_model_len": 1024, "max_num_batched_tokens": 256})
    params = SamplingParams(max_tokens=32, temperature=0.8, seed=1, ignore_eos=True)
    return record_routing(locate(config), prompts, params, most_tokens=8192)


def redundant_slots(num_experts: int, width: int) -> int:
    """Return a quarter of the experts, and more until all ranks have equally many slots."""
    least = num_experts + int(num_experts * REDUNDANT)
    return -(-least // width) * width - num_experts


def by_token(ids: np.ndarray, placement: ExpertPlacement, layer: int) -> float:
    """Return the imbalance if tokens took replicas in turn instead of ranks: what a finer split would give."""
    count = placement.num_replicas[layer][ids]
    turn = np.arange(len(ids))[:, None] % count
    ranks = placement.slot_rank[placement.logical_to_physical[layer][ids, turn]]
    rows = np.bincount(ranks.ravel(), minlength=placement.num_ranks)
    return float(rows.max() / rows.mean())


def measure(case: Case, width: int, domain_size: int) -> dict[str, dict[str, float]]:
    """Return what each policy does to a case, means over layers."""
    domains = RankGrid(make_topology(width), domain_size).domains()
    known = Known(
        load=expert_load(case.fit, case.num_experts),
        pairs=np.stack([coactivation(ids, case.num_experts) for ids in case.fit]),
        domains=domains,
        num_redundant=redundant_slots(case.num_experts, width),
        num_groups=case.num_groups,
    )
    source = np.arange(case.judge.shape[1]) % width
    results = {}
    for name, policy in POLICIES.items():
        placement = policy(known)
        layers = [traffic(ids, placement, layer, source) for layer, ids in enumerate(case.judge)]
        expected = int((case.judge >= 0).sum())
        assert sum(int(each.rows.sum()) for each in layers) == expected, "a row went astray"
        turns = [by_token(ids, placement, layer) for layer, ids in enumerate(case.judge)]
        results[name] = {
            "imbalance": float(np.mean([each.imbalance for each in layers])),
            "imbalance_of_worst_layer": max(each.imbalance for each in layers),
            "imbalance_by_token": float(np.mean(turns)),
            "bytes_between_flat": float(np.mean([each.bytes_between(ROW_BYTES) for each in layers])),
            "bytes_between_hierarchical": float(
                np.mean([each.bytes_between(ROW_BYTES, hierarchical=True) for each in layers])
            ),
            "slots": placement.num_slots,
        }
    return results


def show(case: Case, width: int, results: dict[str, dict[str, float]]) -> None:
    """Print a line for a case and a width: imbalance, and KB between domains (flat/hierarchical)."""
    cells = []
    for each in results.values():
        far = (
            ""
            if not each["bytes_between_flat"]
            else (f" {each['bytes_between_flat'] / 1e3:.0f}/{each['bytes_between_hierarchical'] / 1e3:.0f}")
        )
        cells.append(f"{each['imbalance']:.2f}{far}")
    print(f"| {case.name} | EP{width} | " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    """Measure all, print a table, write a record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", nargs="*", default=[], help="trace files, or the word demo")
    parser.add_argument("--widths", type=int, nargs="*", default=list(WIDTHS))
    parser.add_argument("--domain-size", type=int, default=8, help="ranks of a domain")
    parser.add_argument("--window", type=int, default=16_384, help="tokens of a window over the group")
    parser.add_argument("--layers", type=int, default=3, help="synthetic layers, each with a seed of its own")
    parser.add_argument("--no-synthetic", action="store_true")
    parser.add_argument("--only", nargs="*", default=[""], help="synthetic cases whose names begin so")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    print("| routing | topology | " + " | ".join(POLICIES) + " |")
    print("|---" * (2 + len(POLICIES)) + "|")

    def run(case: Case) -> None:
        for width in arguments.widths:
            if width <= case.num_experts:
                measured = measure(case, width, arguments.domain_size)
                results.setdefault(case.name, {})[f"EP{width}"] = measured
                show(case, width, measured)

    if not arguments.no_synthetic:
        for case in synthetic_cases(arguments.window, arguments.layers, tuple(arguments.only)):
            run(case)
    for name in arguments.trace:
        trace = record_demo() if name == "demo" else load_trace(Path(name))
        for case in trace_cases(trace, Path(name).stem):
            run(case)
    settings = {"domain_size": arguments.domain_size, "window": arguments.window, "row_bytes": ROW_BYTES}
    records.write("placement", {"settings": settings, "cases": results}, arguments.out)


if __name__ == "__main__":
    main()
