"""What binds ranks: the shares of their time, and one word for the largest. Pure functions over the sums of a window.

Not counters (telemetry) and not measurements of ceilings (native/). Units: seconds, bytes, operations; shares are
fractions of the window's wall time, but for `queue`, which is of the requests' time.

How time is divided, for each rank: what is neither in steps nor waiting for a plan is `idle`. Waiting for a plan with
sequences at hand, and the host's part of steps, is `host`. What even the rank that waits least spends in collectives is
`link`; what others wait longer, they wait for slower ranks: `imbalance`; so is waiting in which nothing travels, where
that is known (rows in shared memory). The rest is kernels: of it, `memory` is the
time that good kernels take for the bytes, and `compute` for the operations; what they leave unexplained is launches and
small operations, which are the host's again. Good kernels reach 0.8 of the bandwidth (the constant of NVIDIA's
aiconfigurator) and 0.6 of the matrix rate (FlashAttention-2 reports 0.5 to 0.73 of an A100's), but of the rate of AMX,
which multiplies faster than caches bring operands, 0.2 (measured for experts of a prompt, docs/performance.md, "Where a
step goes"); both are of ceilings measured at start. Where weights lie in the cache, bytes explain nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MEMORY, COMPUTE, LINK, HOST, IMBALANCE, QUEUE, IDLE = BOUNDS = (
    "memory", "compute", "link", "host", "imbalance", "queue", "idle",
)  # fmt: skip
MEMORY_EFFICIENCY, MATRIX_EFFICIENCY = 0.8, 0.6
EFFICIENCY_BY_ISA = {"amx": 0.2}  # of the matrix rate, where it is another
MARGIN = 0.05  # by which another share must lead before the word changes


@dataclass(frozen=True, kw_only=True)
class RankSums:
    """What one rank did in a window.

    Attributes:
        busy_seconds: in steps, of which `host_seconds` were the host's and `collective_seconds` in collectives.
        waited_seconds: of those in collectives, known to be waiting for other ranks alone.
        starved_seconds: waiting for a plan with sequences at hand.
        memory_bytes: of weights and KV.
        flops: of matrix products.
    """

    busy_seconds: float = 0.0
    host_seconds: float = 0.0
    collective_seconds: float = 0.0
    waited_seconds: float = 0.0
    starved_seconds: float = 0.0
    memory_bytes: float = 0.0
    flops: float = 0.0


@dataclass(frozen=True, kw_only=True)
class GroupSums:
    """What the ranks of a replica did in a window, and its requests.

    Attributes:
        wall_seconds: of the window.
        ranks: an entry a rank.
        waiting_seconds, running_seconds: of all requests together, in the queue and after it.
    """

    wall_seconds: float
    ranks: tuple[RankSums, ...]
    waiting_seconds: float = 0.0
    running_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class RankCeilings:
    """What one rank can do at best: bytes/s, operations/s. Both are above 0.

    `matrix_efficiency` is the part of the matrix rate that good kernels reach; `cache_resident` says that weights are
    read from a cache.
    """

    memory_bandwidth: float
    matrix_rate: float
    matrix_efficiency: float = MATRIX_EFFICIENCY
    cache_resident: bool = False

    @property
    def ridge_point(self) -> float:
        """Operations for each byte above which arithmetic binds and not memory (Williams et al., 2009)."""
        return self.matrix_rate / self.memory_bandwidth


@dataclass(frozen=True)
class Verdict:
    """What binds, one of BOUNDS, and the shares that say so, by BOUNDS, each in [0, 1]."""

    bound: str
    shares: Mapping[str, float]


def judge(sums: GroupSums, ceilings: RankCeilings, previous: Sequence[str | None] = ()) -> list[Verdict]:
    """Return what binds each rank of a replica.

    Args:
        sums: of the window.
        ceilings: of each of its ranks.
        previous: the words of the window before, by rank; one stays unless another leads by `MARGIN`.
    """
    verdicts = []
    for rank, shares in enumerate(_rank_shares(sums, ceilings)):
        verdicts.append(Verdict(_word(shares, previous[rank] if rank < len(previous) else None), shares))
    return verdicts


def judge_all(verdicts: Sequence[Verdict], previous: str | None = None) -> Verdict:
    """Return what binds a replica: the word for the mean shares of its ranks."""
    number = max(1, len(verdicts))
    shares = {name: sum(verdict.shares[name] for verdict in verdicts) / number for name in BOUNDS}
    if not verdicts:
        shares[IDLE] = 1.0
    return Verdict(_word(shares, previous), shares)


def _rank_shares(sums: GroupSums, ceilings: RankCeilings) -> list[dict[str, float]]:
    # No clock is trusted to agree with another: a part is never more than what it is a part of.
    waits = [_within(rank.collective_seconds, rank.busy_seconds) for rank in sums.ranks]
    link = min((_within(spent - rank.waited_seconds, spent) for rank, spent in zip(sums.ranks, waits)), default=0.0)
    asked = max(0.0, sums.waiting_seconds) + max(0.0, sums.running_seconds)
    queue = max(0.0, sums.waiting_seconds) / asked if asked > 0 else 0.0
    found = []
    for rank, waited in zip(sums.ranks, waits):
        busy, starved = max(0.0, rank.busy_seconds), max(0.0, rank.starved_seconds)
        wall = max(sums.wall_seconds, busy + starved)
        if wall <= 0:
            found.append(dict.fromkeys(BOUNDS, 0.0) | {IDLE: 1.0, QUEUE: queue})
            continue
        host = _within(rank.host_seconds, busy - waited)
        kernels = busy - waited - host
        memory = 0.0 if ceilings.cache_resident else rank.memory_bytes
        memory /= MEMORY_EFFICIENCY * ceilings.memory_bandwidth
        compute = rank.flops / (ceilings.matrix_efficiency * ceilings.matrix_rate)
        if (explained := memory + compute) > kernels:  # they overlapped, or kernels are better than good
            memory, compute = memory * kernels / explained, compute * kernels / explained
        seconds = {
            MEMORY: memory,
            COMPUTE: compute,
            LINK: link,
            HOST: starved + host + max(0.0, kernels - memory - compute),
            IMBALANCE: waited - link,
            IDLE: wall - busy - starved,
        }
        shares = {name: _within(spent / wall, 1.0) for name, spent in seconds.items()} | {QUEUE: queue}
        found.append({name: shares[name] for name in BOUNDS})
    return found


def _within(value: float, most: float) -> float:
    return min(max(value, 0.0), max(most, 0.0))


def _word(shares: Mapping[str, float], previous: str | None) -> str:
    best = max(BOUNDS, key=lambda name: shares[name])  # the first of equals
    return previous if previous is not None and shares[best] - shares[previous] <= MARGIN else best
