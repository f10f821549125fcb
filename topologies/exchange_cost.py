"""What exchanges and experts of a MoE layer take where somebody measured them, and how many rows travel how far.

Not a measurement (link_probes.py asks for them and fits) and not a choice: records of plain numbers, and expectations.
Units: seconds, bytes, FLOP; rows of one rank, one way; W ranks, C domains, K experts a token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .cost import EXCHANGES_A_LAYER, ExpertSpeed, Link, expected_hit
from .grid import RankGrid

WITHIN, BETWEEN = "within", "between"


@dataclass(frozen=True, kw_only=True)
class ExchangeCost:
    """Dispatch and combine of one MoE layer together, with the work of the host and the waiting for others in them.

    Attributes:
        name: of the exchange.
        fixed_s: what it takes however few rows there are.
        within_s, between_s: for each byte that a rank sends to others of its domain, and to other domains; 0 where none
            goes there.
        hidden: part of all that, from 0 to 1, in which the rank could compute: bytes are under way and nobody works.
        assumed: WITHIN, BETWEEN, where the seconds of a byte are as assumed, because no probe told.
    """

    name: str
    fixed_s: float
    within_s: float
    between_s: float
    hidden: float = 0.0
    assumed: tuple[str, ...] = ()

    def seconds(self, near_bytes: float, far_bytes: float) -> float:
        """Return how long a layer's exchange takes in which a rank sends so many bytes."""
        return self.fixed_s + near_bytes * self.within_s + far_bytes * self.between_s

    def bandwidth(self, kind: str) -> float | None:
        """Return bytes a second over links of a kind, as measured; None where none was."""
        link = self.link(kind)
        return None if link is None or kind in self.assumed else link.bandwidth

    def link(self, kind: str) -> Link | None:
        """Return a dispatch or a combine as the link of a model that knows no more; None where nothing goes there."""
        byte_s = self.between_s if kind == BETWEEN else self.within_s
        return Link(bandwidth=1 / byte_s, latency=self.fixed_s / EXCHANGES_A_LAYER) if byte_s > 0 else None

    def __str__(self) -> str:
        rates = [
            f"{1e-6 * bandwidth:.0f} MB/s {where}"
            for kind, where in ((WITHIN, "within a domain"), (BETWEEN, "between domains"))
            if (bandwidth := self.bandwidth(kind)) is not None
        ]
        said = [f"{self.name} takes {1e3 * self.fixed_s:.2f} ms a layer"]
        said += [f"rows go at {' and '.join(rates)}"] * bool(rates)
        said += [f"{self.hidden:.0%} of it can run under experts"] * (self.hidden > 0)
        return ", ".join(said)


@dataclass(frozen=True, kw_only=True)
class LayoutLink:
    """What the exchange of one layout took: `topology` in its long form, as in `Topology.long`."""

    topology: str
    cost: ExchangeCost


@dataclass(frozen=True, kw_only=True)
class MeasuredLinks:
    """What the ranks of a group found when they measured together.

    Attributes:
        exchanges: those that they joined.
        experts: None where too little was measured.
        took_s: how long measuring took.
    """

    exchanges: tuple[ExchangeCost, ...] = ()
    experts: ExpertSpeed | None = None
    took_s: float = 0.0

    def of(self, name: str) -> ExchangeCost | None:
        """Return the cost of the exchange `name`, if it was measured."""
        return next((cost for cost in self.exchanges if cost.name == name), None)

    def lines(self) -> list[str]:
        """Return a line for each exchange: what a MoE layer pays for it."""
        return [f"links: {cost} (measured in {self.took_s:.2f} s)" for cost in self.exchanges]


@dataclass(frozen=True, kw_only=True)
class RowsSent:
    """Expected rows that a rank sends: to others of its domain and to other domains, out and back."""

    near_out: float
    far_out: float
    near_back: float
    far_back: float


def rows_sent(exchange: str, rows: int, grid: RankGrid, top_k: int) -> RowsSent:
    """Return what a rank with `rows` rows sends in a dispatch and a combine, where rows hit all experts evenly.

    Example:
        >>> from moewe.topologies import parse_topology
        >>> sent = rows_sent("all_to_all", 8, RankGrid(parse_topology("EP2DP1[domains=1+1]"), 2), 1)
        >>> sent.far_out, sent.far_back, sent.near_out
        (4.0, 4.0, 0)
    """
    num_ranks, near = grid.topology.ep, min(grid.group_domains)
    others, far = near - 1, num_ranks - near
    if exchange == "padded":
        room = capacity_of(rows)
        return RowsSent(
            near_out=others * room, far_out=far * room, near_back=others * room * top_k, far_back=far * room * top_k
        )
    hit = expected_hit(1.0 / num_ranks, top_k)  # a row goes once to a rank that has experts of it
    if exchange == "hierarchical":
        domains = len(grid.group_domains)
        crossing = rows * (domains - 1) * expected_hit(1.0 / domains, top_k)
        # Rows enter a domain at one of its ranks, whoever needs them there.
        return RowsSent(
            near_out=rows * num_ranks * hit * others / near,
            far_out=crossing,
            near_back=rows * top_k * others / near,
            far_back=crossing,
        )
    return RowsSent(
        near_out=rows * others * hit,
        far_out=rows * far * hit,
        near_back=rows * top_k * others / num_ranks,
        far_back=rows * top_k * far / num_ranks,
    )


def bytes_sent(exchange: str, rows: float, grid: RankGrid, top_k: int, row_bytes: float) -> tuple[float, float]:
    """Return the expected bytes that a rank with `rows` rows sends out and back in a MoE layer: in its domain, between.

    A part of a row is as much of what a whole one sends, but for `padded`, whose room is for whole ones.
    """
    whole = max(1, math.ceil(rows))
    sent = rows_sent(exchange, whole, grid, top_k)
    each = row_bytes if exchange == "padded" else row_bytes * rows / whole
    return each * (sent.near_out + sent.near_back), each * (sent.far_out + sent.far_back)


def capacity_of(rows: int) -> int:
    """Return the room that `padded` makes for `rows` rows: the next power of two."""
    return 1 << max(0, rows - 1).bit_length()
