"""Ranks as a grid that one can print: replicas, attention axes, and the domains (NVLink or host) they sit in.

Not a process group (groups.py) and not a placement of experts (moe.wide_ep): numbers of ranks only.
Units: ranks, counted from 0 over all replicas: rank = replica * ep + position, position = adp part * atp + atp share.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

from .spec import Topology, TopologyError

AXES = ("ep", "dp", "adp", "atp")


@dataclass(frozen=True, kw_only=True)
class Coords:
    """Where one rank stands.

    Attributes:
        replica: which group.
        position: which rank of the group (the rank number that collectives and expert slots use).
        attention_dp / attention_tp: which attention replica inside the group, and which share of it.
        domain: which NVLink domain or host.
    """

    replica: int
    position: int
    attention_dp: int
    attention_tp: int
    domain: int


@dataclass(frozen=True)
class RankGrid:
    """The ranks of `topology` on domains that hold `domain_size` ranks each.

    A group that fits sits inside one domain; a wider one starts on a fresh domain and spans as many as it needs.
    """

    topology: Topology
    domain_size: int

    def __post_init__(self) -> None:
        if self.domain_size < 1:
            raise TopologyError(f"domain_size={self.domain_size} is not allowed; use at least 1 rank a domain")

    @property
    def spans_domains(self) -> bool:
        """True when a group is wider than a domain, so that its exchange crosses domains."""
        return len(self.group_domains) > 1

    @property
    def group_domains(self) -> tuple[int, ...]:
        """How many ranks of a group sit in each of its domains: as the topology names them, else as they fit."""
        whole, rest = divmod(self.topology.ep, self.domain_size)
        return self.topology.domains or (self.domain_size,) * whole + ((rest,) if rest else ())

    @property
    def num_domains(self) -> int:
        """Domains in use."""
        return self._domain(self.topology.num_ranks - 1) + 1

    @property
    def num_idle(self) -> int:
        """Places of used domains that no rank takes."""
        return 0 if self.topology.domains else self.num_domains * self.domain_size - self.topology.num_ranks

    def _domain(self, rank: int) -> int:
        replica, position = divmod(rank, self.topology.ep)
        if self.topology.domains or self.spans_domains:
            ends = accumulate(self.group_domains)
            return replica * len(self.group_domains) + sum(position >= end for end in ends)
        return replica // (self.domain_size // self.topology.ep)

    def domains(self, replica: int = 0) -> tuple[int, ...]:
        """Return the domain of each rank of a group, in order of position."""
        first = replica * self.topology.ep
        return tuple(self._domain(first + position) for position in range(self.topology.ep))

    def coords(self, rank: int) -> Coords:
        """Return where `rank` stands."""
        if not 0 <= rank < self.topology.num_ranks:
            raise TopologyError(
                f"rank {rank} is not in {self.topology.short()}; it has 0 to {self.topology.num_ranks - 1}"
            )
        replica, position = divmod(rank, self.topology.ep)
        attention_dp, attention_tp = divmod(position, self.topology.atp)
        return Coords(
            replica=replica,
            position=position,
            attention_dp=attention_dp,
            attention_tp=attention_tp,
            domain=self._domain(rank),
        )

    def group(self, axis: str, rank: int) -> tuple[int, ...]:
        """Return the ranks that differ from `rank` along `axis` only, `rank` included, ascending.

        Args:
            axis: `ep` (its expert-parallel group), `dp` (same position in every replica), `adp` (same share of every
                attention replica of the group), `atp` (its attention replica).
            rank: any rank.

        Example:
            >>> from moewe.topologies import RankGrid, parse_topology
            >>> RankGrid(parse_topology("EP4DP2[adp=2]"), 8).group("atp", 6)
            (6, 7)
        """
        here = self.coords(rank)
        topology, first = self.topology, here.replica * self.topology.ep
        if axis == "ep":
            return tuple(range(first, first + topology.ep))
        if axis == "dp":
            return tuple(replica * topology.ep + here.position for replica in range(topology.dp))
        if axis == "adp":
            return tuple(first + part * topology.atp + here.attention_tp for part in range(topology.adp))
        if axis == "atp":
            start = first + here.attention_dp * topology.atp
            return tuple(range(start, start + topology.atp))
        raise TopologyError(f"axis {axis!r} is not one of {', '.join(AXES)}")

    def __str__(self) -> str:
        sizes = "as it names them" if self.topology.domains else f"of {self.domain_size}"
        lines = [f"{self.topology.long()} on domains {sizes}"]
        domains: dict[int, dict[int, list[int]]] = {}
        for rank in range(self.topology.num_ranks):
            domains.setdefault(self._domain(rank), {}).setdefault(rank // self.topology.ep, []).append(rank)
        for domain, replicas in domains.items():
            drawn = "  ".join(f"replica {replica} [{_ranges(ranks)}]" for replica, ranks in replicas.items())
            taken = sum(len(ranks) for ranks in replicas.values())
            idle = 0 if self.topology.domains else self.domain_size - taken
            lines.append(f"  domain {domain}: {drawn}" + (f"  ({idle} idle)" if idle else ""))
        return "\n".join(lines)


def _ranges(numbers: list[int]) -> str:
    """Return ascending consecutive numbers short: up to eight in full, more as `first..last`."""
    return " ".join(map(str, numbers)) if len(numbers) <= 8 else f"{numbers[0]}..{numbers[-1]}"


def slot_ranges(num_slots: int, num_ranks: int) -> tuple[tuple[int, int], ...]:
    """Return the [start, stop) of expert slots of each rank: contiguous, the first ranks take one more when uneven.

    Example:
        >>> slot_ranges(10, 4)
        ((0, 3), (3, 6), (6, 8), (8, 10))
    """
    base, extra = divmod(num_slots, num_ranks)
    starts = [rank * base + min(rank, extra) for rank in range(num_ranks + 1)]
    return tuple(pairwise(starts))


def placement_summary(topology: Topology, num_experts: int) -> str:
    """Return which expert slots each rank of a group holds, ranks with equal counts on one line."""
    ranges = slot_ranges(num_experts + topology.red, topology.ep)
    lines, first = [], 0
    for rank in range(1, len(ranges) + 1):
        size = ranges[first][1] - ranges[first][0]
        if rank < len(ranges) and ranges[rank][1] - ranges[rank][0] == size:
            continue
        who = f"rank {first}" if rank - first == 1 else f"ranks {first}..{rank - 1}"
        lines.append(f"{who}: slots {ranges[first][0]}..{ranges[rank - 1][1] - 1}, {size} each")
        first = rank
    return "\n".join(lines)
