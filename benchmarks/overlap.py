"""What does overlap save a MoE layer over a slowed link: shared experts, or halves in turns, while rows travel?

Ranks are processes of this host, one thread each, in two domains; the link between them sleeps until its bytes could be
there (--rate MB/s, --delay us). A pass goes through several layers whose weights do not fit a cache together; passes
without overlap, with shared experts under the dispatch, and in halves take turns within one run, each being the first
in every third round. The time of a pass is that of the slowest rank. Outputs are compared before anything is timed: to
the bit where kernels are native. Before, ranks probe their links as a server does at its start; beside each time stands
what the model of `--overlap auto` makes of these figures, what it would choose, and which way was fastest by the clock.
On a machine with fewer cores than ranks times are those of ranks that take turns, and say little.

    taskset -c 0-1 python benchmarks/overlap.py --ranks 2 --tokens 16 128 512 2048 --repeats 15
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import rank_processes
import records
import torch
import torch.distributed as dist

from moewe.moe.activation import SILU, Activation
from moewe.moe.gated import ExpertWeights
from moewe.moe.layer import MoELayer
from moewe.moe.probing import LinkProber
from moewe.moe.routing import RoutingConfig
from moewe.moe.wide_ep import linear_placement
from moewe.moe.wide_ep.exchanges import GroupShape, SlowRate, StepwiseExchange
from moewe.moe.wide_ep.exchanges.joining import join_over_links, link_members
from moewe.moe.wide_ep.exchanges.links import DistributedLink, Link, LoneLink
from moewe.native.bandwidth import measure_read_bandwidth
from moewe.native.library import load, set_threads
from moewe.native.matrix_rate import measure_matrix_rate
from moewe.quant import Matrix, can_pack, pack
from moewe.runtime.options import layout_config
from moewe.runtime.overlap import overlap_facts
from moewe.telemetry import RankCounters
from moewe.topologies import RankGrid, parse_topology
from moewe.topologies.exchange_choice import OVER_LINKS
from moewe.topologies.exchange_cost import MeasuredLinks
from moewe.topologies.groups import destroy_group, init_group, make_subgroups
from moewe.topologies.link_probes import RankFound, found_by, probe_links
from moewe.topologies.overlap_choice import (
    HALVES,
    NOTHING,
    SHARED,
    MoELoad,
    OverlapFacts,
    choose_overlap,
    layer_seconds,
)

OVERLAPS = (NOTHING, SHARED, HALVES)
TIMEOUT_S = 600.0
BANDWIDTH_BYTES = 1 << 30  # of all ranks together
ALLOWED_ERROR = 2e-2  # largest error over the largest magnitude, where kernels are not native


@dataclass(frozen=True)
class FFN:
    """Shared experts as one FFN."""

    w13: Matrix
    w2: Matrix
    b13: None = None
    b2: None = None


@dataclass(frozen=True)
class Weights:
    """Of one layer on one rank."""

    router: torch.Tensor
    experts: ExpertWeights
    shared: FFN | None
    router_bias: None = None
    selection_bias: None = None
    shared_gate: None = None


@dataclass(frozen=True)
class Switches:
    """Of a model with plain experts."""

    routing: RoutingConfig
    activation: Activation = SILU
    weigh_input: bool = False


def noise(*shape: int, generator: torch.Generator) -> torch.Tensor:
    return (torch.randn(*shape, generator=generator) * shape[-1] ** -0.5).to(torch.bfloat16)


def topology_of(num_ranks: int, args: argparse.Namespace) -> str:
    domains = f"{num_ranks - num_ranks // 2}+{num_ranks // 2}"
    return f"EP{num_ranks}DP1[domains={domains},rate={args.rate},delay={args.delay}]"


def weights_of(layer: int, rank: int, num_slots: int, args: argparse.Namespace) -> Weights:
    """Return weights; router and shared experts are the same on all ranks."""
    own, common = (torch.Generator().manual_seed(seed) for seed in (1000 * layer + rank + 1, 1000 * layer))
    width, ffn = args.width, args.ffn_width
    router = noise(args.experts, width, generator=common)
    matrices = [
        noise(num_slots, 2 * ffn, width, generator=own), noise(num_slots, width, ffn, generator=own),
        noise(2 * args.shared * ffn, width, generator=common), noise(width, args.shared * ffn, generator=common),
    ]  # fmt: skip
    if can_pack(torch.bfloat16, torch.device("cpu")):
        matrices = [pack(matrix, gate_up=i % 2 == 0) for i, matrix in enumerate(matrices[: 4 if args.shared else 2])]
    shared = FFN(matrices[2], matrices[3]) if args.shared else None
    return Weights(router, ExpertWeights(w13=matrices[0], w2=matrices[1]), shared)


def facts_of(num_ranks: int, measured: tuple[float, float], args: argparse.Namespace) -> OverlapFacts:
    """Return what an engine would choose by."""
    topology = topology_of(num_ranks, args)
    expert = 3 * args.width * args.ffn_width
    load = MoELoad(
        num_experts=args.experts, top_k=args.top_k, expert_bytes=2 * expert, expert_flops=2 * expert,
        shared_bytes=2 * expert * args.shared, row_bytes=2 * args.width,
    )  # fmt: skip
    config = layout_config({"model": "benchmark", "topology": topology})
    grid = RankGrid(parse_topology(topology), num_ranks)
    memory, matrix = measured
    return overlap_facts(config, grid, load, memory_bandwidth=memory, matrix_rate=matrix or None)


def measure(num_ranks: int) -> tuple[float, float]:
    """Return bytes/s and operations/s of the slowest rank while all measure; 0 operations where nothing is native."""
    dist.barrier()
    memory = measure_read_bandwidth(1, BANDWIDTH_BYTES // num_ranks).bytes_per_second
    rate = measure_matrix_rate(1)
    slowest = torch.tensor([memory, rate.bf16 if rate is not None else 0.0], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MIN)
    return float(slowest[0]), float(slowest[1])


def probed(name: str, prober: LinkProber, facts: OverlapFacts, args: argparse.Namespace) -> MeasuredLinks:
    """Return what all ranks find of their links, each asking the same questions."""
    probing = probe_links([name], facts, most_rows=max(args.tokens))
    probe = next(probing)
    while True:
        dist.barrier()
        begin = time.perf_counter()
        found = prober.run(probe)
        dist.barrier()
        took = time.perf_counter() - begin
        try:
            probe = probing.send(found_by(of_all_ranks(found), of_slowest(took)))
        except StopIteration as end:
            links: MeasuredLinks = end.value
            return links


def of_all_ranks(found: RankFound) -> list[RankFound]:
    """Return what every rank found; they all timed the same."""
    own = [*(s for each in found.seconds.values() for s in each), found.near_bytes, found.far_bytes,
           found.expert_bytes, found.expert_flops]  # fmt: skip
    everybody = [torch.empty(len(own), dtype=torch.float64) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, torch.tensor(own, dtype=torch.float64))
    ranks = []
    for numbers in everybody:
        left = iter(numbers.tolist())
        seconds = {name: tuple(next(left) for _ in each) for name, each in found.seconds.items()}
        near, far, num_bytes, flops = left
        ranks.append(
            RankFound(seconds=seconds, near_bytes=near, far_bytes=far, expert_bytes=num_bytes, expert_flops=flops)
        )
    return ranks


def of_slowest(seconds: float) -> float:
    """Return the seconds of the slowest rank."""
    slowest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


class Pass:
    """All layers of one rank over one exchange, one after another."""

    def __init__(self, name: str, layers: list[MoELayer], exchange: StepwiseExchange) -> None:
        self._name, self._layers, self._exchange = name, layers, exchange

    def __call__(self, x: torch.Tensor, overlap: str) -> torch.Tensor:
        rows = len(x)
        self._exchange.begin_step(self._name, -(-rows // 2) if overlap == HALVES else rows)
        for layer in self._layers:
            x = x + layer(x, overlap)
        return x

    def check(self, x: torch.Tensor) -> None:
        """Stop when what overlaps changes what comes out."""
        expected = self(x, NOTHING)
        for overlap in (SHARED, HALVES):
            found = self(x, overlap)
            error = (found.float() - expected.float()).abs().max() / expected.float().abs().max()
            if not (torch.equal(found, expected) if load() is not None else error <= ALLOWED_ERROR):
                raise SystemExit(f"{self._name} with overlap {overlap} is wrong by {float(error):.1e}")

    def times(self, x: torch.Tensor, repeats: int) -> dict[str, list[float]]:
        """Return the seconds of a layer on the slowest rank."""
        found: dict[str, list[float]] = {overlap: [] for overlap in OVERLAPS}
        for turn in range(repeats):
            for i in range(len(OVERLAPS)):
                overlap = OVERLAPS[(turn + i) % len(OVERLAPS)]
                dist.barrier()
                begin = time.perf_counter()
                self(x, overlap)
                found[overlap].append(of_slowest(time.perf_counter() - begin) / len(self._layers))
        return found


def run_rank(rank: int, num_ranks: int, folder: str, args: argparse.Namespace) -> None:
    """Measure everything as one rank; rank 0 writes what it found."""
    torch.set_num_threads(1)
    if load() is not None:
        set_threads(1)
    init_group(rank=rank, world_size=num_ranks, store_path=Path(folder) / "store", device="cpu", timeout_s=TIMEOUT_S)
    topology = parse_topology(topology_of(num_ranks, args))
    domains = RankGrid(topology, num_ranks).domains()
    placement = linear_placement(args.layers, args.experts, domains=domains)
    shape = GroupShape(
        slot_ranges=placement.slot_ranges, domain_sizes=topology.domains,
        slow=SlowRate(megabytes_per_second=args.rate, delay_us=args.delay),
    )  # fmt: skip
    members = dict.fromkeys(ranks for name in args.exchanges for ranks in link_members(name, shape))
    groups = make_subgroups(list(members), rank=rank, timeout_s=TIMEOUT_S)

    def link_of(ranks: Any) -> Link:
        return DistributedLink(groups[tuple(ranks)]) if len(ranks) > 1 else LoneLink()

    assumed = facts_of(num_ranks, measure(num_ranks), args)
    counters = RankCounters(args.layers, placement.num_local_slots(rank))
    switches = Switches(RoutingConfig(num_experts=args.experts, top_k=args.top_k, scoring="softmax", renormalize=True))
    held = [weights_of(layer, rank, placement.num_local_slots(rank), args) for layer in range(args.layers)]
    results: dict[str, Any] = {}
    for name in args.exchanges:
        exchange = StepwiseExchange([join_over_links(name, shape, rank, link_of)])
        layers = [
            MoELayer(
                switches, weights, placement=placement, moe_layer=i, rank=rank, exchange=exchange, counters=counters
            )
            for i, weights in enumerate(held)
        ]
        through = Pass(name, layers, exchange)
        prober = LinkProber(layers, exchange, placement, rank, torch.empty(0, args.width, dtype=torch.bfloat16))
        links = probed(name, prober, assumed, args)
        facts = replace(assumed, measured=links)
        if rank == 0:
            print(*links.lines(), sep="\n", flush=True)
        for num_tokens in args.tokens:
            x = torch.randn(num_tokens, args.width, generator=torch.Generator().manual_seed(rank)).to(torch.bfloat16)
            through.check(x)
            times = through.times(x, args.repeats)
            results[f"{name}/EP{num_ranks}/T{num_tokens}"] = record = summary(name, num_tokens, times, facts)
            if rank == 0:
                print(line(name, num_ranks, num_tokens, record), flush=True)
    if rank == 0:
        torch.save(results, Path(folder) / "results")
    destroy_group()


def summary(name: str, num_tokens: int, times: dict[str, list[float]], facts: OverlapFacts) -> dict[str, Any]:
    """Return times, what each round saved, and what the model says."""
    first = -(-num_tokens // 2)
    model = {SHARED: (num_tokens,), HALVES: (first, num_tokens - first)}
    saved = {
        overlap: records.summary([1 - own / none for own, none in zip(times[overlap], times[NOTHING], strict=True)])
        for overlap in (SHARED, HALVES)
    }
    medians = {overlap: statistics.median(found) for overlap, found in times.items()}
    chosen, fastest = choose_overlap(name, num_tokens, facts), min(medians, key=lambda overlap: medians[overlap])
    return {
        **{f"layer_us_{overlap}": records.summary([1e6 * s for s in found]) for overlap, found in times.items()},
        **{f"saved_share_{overlap}": found for overlap, found in saved.items()},
        **{f"model_us_{overlap}": 1e6 * layer_seconds(name, parts, facts) for overlap, parts in model.items()},
        "chosen": chosen,
        "fastest": fastest,
        "chosen_over_fastest": medians[chosen] / medians[fastest],
    }


def line(name: str, num_ranks: int, num_tokens: int, record: dict[str, Any]) -> str:
    """Return a line to read along."""
    us = {overlap: record[f"layer_us_{overlap}"]["median"] for overlap in OVERLAPS}
    model = {overlap: record[f"model_us_{overlap}"] for overlap in (SHARED, HALVES)}
    return (
        f"{name:>12} EP{num_ranks} T={num_tokens:<5} none {us[NOTHING]:8.0f} us  shared {us[SHARED]:8.0f} "
        f"(model {model[SHARED]:.0f})  halves {us[HALVES]:8.0f} (model {model[HALVES]:.0f})  auto: {record['chosen']}, "
        f"fastest: {record['fastest']} ({record['chosen_over_fastest']:.2f})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--tokens", type=int, nargs="+", default=[16, 128, 512, 2048], help="rows of each rank")
    parser.add_argument("--exchanges", nargs="+", choices=OVER_LINKS, default=["hierarchical", "all_to_all"])
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--ffn-width", type=int, default=512)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--shared", type=int, default=1, help="shared experts, as wide as a routed one each")
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=15)
    rank_processes.add_link_flags(parser)
    args = parser.parse_args()
    rank_processes.measure("overlap", run_rank, args)


if __name__ == "__main__":
    main()
