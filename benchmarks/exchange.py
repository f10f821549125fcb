"""What does one exchange of a MoE layer cost: bytes by scope, time, share of the link, for EP2 to EP8 on this host?

Ways: shm (memory that all ranks map), all_to_all and hierarchical over gloo on loopback, and both again with the link
between two domains slowed down (--rate MB/s, --delay us). A layer is dispatch and combine with nothing between; experts
return what they got. The time of a layer is the median over repeats of the slowest rank's; each works on one thread.
The share is bytes that a rank sends over the farthest link it uses, over the time and what that link can carry: the
slowed rate, or what plain swaps of 4 MiB to each rank (gloo) or plain copies (shm) reach here.
On a machine with fewer cores than ranks times are those of ranks that take turns: compare bytes, not times.

    taskset -c 0-1 python benchmarks/exchange.py --ranks 2 4 8 --tokens 1 16 128 --repeats 30
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import rank_processes
import records
import torch
import torch.distributed as dist

from moewe.moe.wide_ep.exchanges import Exchange, ShmExchange, ShmShape
from moewe.moe.wide_ep.exchanges.group_shape import GroupShape, SlowRate
from moewe.moe.wide_ep.exchanges.joining import join_over_links, link_members
from moewe.moe.wide_ep.exchanges.links import DistributedLink, Link, LoneLink, swap
from moewe.moe.wide_ep.exchanges.shm import meet_at
from moewe.topologies import slot_ranges
from moewe.topologies.groups import destroy_group, init_group, make_subgroups
from moewe.topologies.hardware import host_cores

WAYS = ("shm", "all_to_all", "hierarchical", "all_to_all-slow", "hierarchical-slow", "hierarchical-slow-fp8")
WARM_UP = 3
SWAP_BYTES = 4 << 20
TIMEOUT_S = 300.0


def shape_of(num_ranks: int, args: argparse.Namespace, *, is_slow: bool) -> GroupShape:
    """Return a group of two domains."""
    slow = SlowRate(megabytes_per_second=args.rate, delay_us=args.delay) if is_slow else None
    sizes = (num_ranks - num_ranks // 2, num_ranks // 2)
    return GroupShape(slot_ranges=slot_ranges(args.experts, num_ranks), domain_sizes=sizes, slow=slow)


def inputs(rank: int, num_tokens: int, args: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return rows, ids and weights of a rank: every expert is as likely as any other."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(num_tokens, args.width, generator=generator).to(torch.bfloat16)
    ids = torch.rand(num_tokens, args.experts, generator=generator).argsort(1)[:, : args.top_k].to(torch.int32)
    return x, ids, torch.rand(num_tokens, args.top_k, generator=generator)


def layer(exchange: Exchange, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> tuple[float, float]:
    """Run one layer; return the seconds of dispatch and combine."""
    begin = time.perf_counter()
    arrived = exchange.dispatch(x, ids)
    dispatched = time.perf_counter()
    rows = arrived.rows
    begun = time.perf_counter()
    exchange.combine(rows, weights, arrived.handle)
    return dispatched - begin, time.perf_counter() - begun


def copy_rate() -> float:
    """Return the bytes per second of plain copies."""
    source = torch.zeros(64 << 20, dtype=torch.uint8)
    target = source.clone()
    seconds = []
    for _ in range(5):
        begin = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - begin)
    return source.numel() / statistics.median(seconds)


def swap_rate(link: Link) -> float:
    """Return the bytes per second that a rank sends while all swap large blocks."""
    rows = torch.zeros(link.size, SWAP_BYTES, dtype=torch.uint8)
    seconds = []
    for _ in range(5):
        dist.barrier()
        begin = time.perf_counter()
        swap(link, rows, [1] * link.size, [1] * link.size)
        seconds.append(time.perf_counter() - begin)
    return (link.size - 1) * SWAP_BYTES / statistics.median(seconds)


def run_rank(rank: int, num_ranks: int, folder: str, args: argparse.Namespace) -> None:
    """Measure everything as one rank; rank 0 writes what it found."""
    torch.set_num_threads(1)
    init_group(rank=rank, world_size=num_ranks, store_path=Path(folder) / "store", device="cpu", timeout_s=TIMEOUT_S)
    flat = shape_of(num_ranks, args, is_slow=False)
    members = dict.fromkeys((*link_members("all_to_all", flat), *link_members("hierarchical", flat)))
    groups = make_subgroups(list(members), rank=rank, timeout_s=TIMEOUT_S)

    def link_of(ranks: Any) -> Link:
        return DistributedLink(groups[tuple(ranks)]) if len(ranks) > 1 else LoneLink()

    ceilings = {"shm": copy_rate(), "gloo": swap_rate(link_of(range(num_ranks))), "slow": 1e6 * args.rate}
    results: dict[str, Any] = {}
    exchanges = {way: join(way, rank, num_ranks, folder, args, link_of) for way in args.ways}
    for way, num_tokens in itertools.product(args.ways, args.tokens):
        exchange = exchanges[way]
        x, ids, weights = inputs(rank, num_tokens, args)
        for _ in range(WARM_UP):
            layer(exchange, x, ids, weights)
        exchange.take_traffic()
        slowest = []
        for _ in range(args.repeats):
            dist.barrier()
            times = torch.tensor(layer(exchange, x, ids, weights))
            dist.all_reduce(times, dist.ReduceOp.MAX)
            slowest.append(times.tolist())
        traffic = exchange.take_traffic()
        num_bytes = [total / args.repeats for total in traffic.num_bytes]
        dispatch, combine = ([1e6 * pair[i] for pair in slowest] for i in (0, 1))
        both = [a + b for a, b in zip(dispatch, combine)]
        is_slow = "slow" in way
        link = "slow" if is_slow else "shm" if way == "shm" else "gloo"
        sent = num_bytes[2] if is_slow else num_bytes[1] + num_bytes[2]
        share = sent / (1e-6 * statistics.median(both)) / ceilings[link]
        results[f"{way}/EP{num_ranks}/T{num_tokens}"] = {
            "dispatch_us": records.summary(dispatch),
            "combine_us": records.summary(combine),
            "layer_us": records.summary(both),
            "bytes_per_layer_same_rank": round(num_bytes[0]),
            "bytes_per_layer_in_domain": round(num_bytes[1]),
            "bytes_per_layer_between_domains": round(num_bytes[2]),
            "link_bytes_per_second": round(ceilings[link]),
            "share_of_link": round(share, 4),
        }
        if rank == 0:
            print(
                f"{way:>22} EP{num_ranks} T={num_tokens:<4} {statistics.median(both):9.0f} us  "
                f"{num_bytes[1]:11.0f} B in, {num_bytes[2]:11.0f} B between domains, share {share:.2f}",
                flush=True,
            )
    if rank == 0:
        torch.save(results, Path(folder) / "results")
    destroy_group()


def join(
    way: str, rank: int, num_ranks: int, folder: str, args: argparse.Namespace, link_of: Callable[[Any], Link]
) -> Exchange:
    """Return the exchange of one way, on two domains of one host; shm knows no domains."""
    name, _, rest = way.partition("-")
    shape = shape_of(num_ranks, args, is_slow="slow" in rest)
    if name != "shm":
        return join_over_links(name, shape, rank, link_of, payload="fp8" if "fp8" in rest else "auto")
    memory = ShmShape(
        slot_ranges=shape.slot_ranges, capacity=max(args.tokens), top_k=args.top_k, width=args.width,
        dtype=torch.bfloat16,
    )  # fmt: skip
    fd = meet_at(Path(folder) / "memory", memory, rank, TIMEOUT_S)
    return ShmExchange(fd, memory, rank, has_cores=num_ranks <= host_cores())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 128], help="rows of each rank")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=30)
    rank_processes.add_link_flags(parser)
    args = parser.parse_args()
    rank_processes.measure("exchange", run_rank, args)


if __name__ == "__main__":
    main()
