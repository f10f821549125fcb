"""What of a MoE layer runs while rows travel: a pure function of the step, the model, the grid and ceilings.

Not an exchange (moe.wide_ep.exchanges) and no look at the machine: the engine chooses, the plan says what was chosen,
and so every rank begins the same collectives. No choice changes a token.

The model of a layer: the link carries one transfer after another, and each arrives a latency later; the rank computes
one thing after another, and works for its exchange, too. Halves hide transfers under experts; they make that work
twice, and read experts twice that both of them hit.
Units: rows of one rank, bytes, seconds, FLOP; W ranks, C domains, K experts a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from .cost import Ceilings, Link, expected_hit, product_seconds
from .exchange_choice import OVER_LINKS, ExchangeFacts, exchanges_to_join
from .exchange_cost import MeasuredLinks, rows_sent
from .footprint import ModelFootprint
from .grid import RankGrid
from .spec import TopologyError

OVERLAPS = ("auto", "on", "off")
# One after another; shared experts while rows travel; that, and two halves of the rows in turns.
NOTHING, SHARED, HALVES = "none", "shared", "halves"
NOTHING_MEASURED = MeasuredLinks()
MARGIN = 0.05  # of the time of a layer: a smaller gain counts as none


@dataclass(frozen=True, kw_only=True)
class MoELoad:
    """What one MoE layer asks of a rank.

    Attributes:
        num_experts, top_k: E and K.
        expert_bytes: one routed expert.
        expert_flops: of one row in it.
        shared_bytes: the shared experts.
        row_bytes: one row of activations.
    """

    num_experts: int
    top_k: int
    expert_bytes: int
    expert_flops: int
    shared_bytes: int
    row_bytes: int


@dataclass(frozen=True, kw_only=True)
class OverlapFacts:
    """What a choice depends on, beside the step.

    Attributes:
        asked: one of OVERLAPS.
        grid: where ranks sit.
        load: of a MoE layer; None where nobody knows it.
        ceilings: of a rank.
        link: the slowest that rows cross, as it is assumed; None where the cores that compute carry them, so that
            nothing is to be won.
        part_seconds: what a part of a batch costs beside its rows, as it is assumed: calls, sorting, collectives.
        measured: what exchanges and experts really take; what is in there goes before all that is assumed.
    """

    asked: str
    grid: RankGrid
    load: MoELoad | None
    ceilings: Ceilings
    link: Link | None
    part_seconds: float
    measured: MeasuredLinks = NOTHING_MEASURED


def moe_load(footprint: ModelFootprint) -> MoELoad | None:
    """Return what a MoE layer of the model asks of a rank; None for a dense model."""
    if not footprint.num_moe_layers:
        return None
    return MoELoad(
        num_experts=footprint.num_experts,
        top_k=footprint.top_k,
        expert_bytes=footprint.expert_bytes,
        expert_flops=footprint.expert_flops,
        shared_bytes=footprint.shared_bytes // footprint.num_moe_layers,
        row_bytes=footprint.hidden_size * footprint.activation_itemsize,
    )


def check_overlap(asked: str, grid: RankGrid, facts: ExchangeFacts) -> None:
    """Refuse to overlap where rows do not travel.

    Raises:
        TopologyError: one line with the field, the value and the fix.
    """
    if asked != "on" or grid.topology.ep == 1:
        return
    names = exchanges_to_join(grid, facts)
    if not set(names) <= set(OVER_LINKS):
        raise TopologyError(
            f"overlap='on' is for rows on links, and here they are read in place ({names[0]}); use overlap=auto, or "
            "exchange=all_to_all"
        )


@lru_cache(maxsize=4096)
def choose_overlap(exchange: str, bucket: int, facts: OverlapFacts) -> str:
    """Return NOTHING, SHARED or HALVES for a step.

    Args:
        exchange: name of the one that the step uses.
        bucket: rows of the fullest attention replica.
        facts: see there.

    Example:
        NOTHING where rows do not travel (`shm`, `threads`, `local`) or with `off`; HALVES with `on`; else HALVES where
        they make a layer faster by MARGIN at least, and SHARED everywhere else: that costs nothing.
    """
    if facts.asked == "off" or exchange not in OVER_LINKS:
        return NOTHING
    if facts.asked == "on":
        return HALVES
    rows = -(-bucket // facts.grid.topology.atp)
    is_known = facts.link is not None or facts.measured.of(exchange) is not None
    if facts.load is None or not is_known or rows < 2:
        return SHARED
    first = -(-rows // 2)
    whole, halves = (layer_seconds(exchange, parts, facts) for parts in ((rows,), (first, rows - first)))
    return HALVES if halves < (1 - MARGIN) * whole else SHARED


def layer_seconds(exchange: str, parts: Sequence[int], facts: OverlapFacts) -> float:
    """Return how long a MoE layer takes in which each rank has `parts` rows, one part in turn with the next.

    Shared experts run while rows travel. All ranks have as many rows, and rows hit experts evenly.
    """
    load, way = facts.load, _way(exchange, facts)
    assert load is not None
    slots = (load.num_experts + facts.grid.topology.red) / facts.grid.topology.ep

    def products(num_bytes: float, flops: float) -> float:
        return float(product_seconds(num_bytes, flops, facts.ceilings, facts.measured.experts))

    def experts(rows: int) -> float:
        hit = expected_hit(load.top_k / load.num_experts, rows * facts.grid.topology.ep)
        return products(slots * hit * load.expert_bytes, rows * load.top_k * load.expert_flops)

    # A room of fixed size needs no counts; else they cross first, those of all parts at a time.
    counted = 0.0 if exchange == "padded" else way.latency
    sent = [rows_sent(exchange, rows, facts.grid, load.top_k) for rows in parts]
    computed, link_free, arrivals = 0.0, counted, []
    for part in sent:
        working, travelling = way.seconds(part.near_out * load.row_bytes, part.far_out * load.row_bytes)
        computed += working
        link_free = max(link_free, computed) + travelling
        arrivals.append(link_free + way.latency)
    shared_flops = sum(parts) * load.shared_bytes / load.expert_bytes * load.expert_flops
    computed = max(computed, counted) + products(load.shared_bytes, shared_flops)
    for rows, part, arrival in zip(parts, sent, arrivals, strict=True):
        working, travelling = way.seconds(part.near_back * load.row_bytes, part.far_back * load.row_bytes)
        computed = max(computed, arrival) + experts(rows) + way.part_s + working
        link_free = max(link_free, computed) + travelling
    return link_free + way.latency


@dataclass(frozen=True, kw_only=True)
class _Way:
    """How rows go.

    Attributes:
        part_s: work for a part of a batch, however few rows it has.
        latency: from the last byte that left to the last that arrived.
        near_s, far_s: for each byte to the own and to other domains, of which the rank works all but the part `hidden`.
    """

    part_s: float
    latency: float
    near_s: float
    far_s: float
    hidden: float

    def seconds(self, near_bytes: float, far_bytes: float) -> tuple[float, float]:
        """Return for how long the rank works to send so many bytes, and for how long they travel."""
        both = near_bytes * self.near_s + far_bytes * self.far_s
        return (1 - self.hidden) * both, self.hidden * both


def _way(exchange: str, facts: OverlapFacts) -> _Way:
    cost = facts.measured.of(exchange)
    if cost is not None:
        collectives = 2 if exchange == "padded" else 3
        return _Way(
            part_s=(1 - cost.hidden) * cost.fixed_s,
            latency=cost.hidden * cost.fixed_s / collectives,
            near_s=cost.within_s,
            far_s=cost.between_s,
            hidden=cost.hidden,
        )
    link = facts.link
    assert link is not None
    byte_s = 1 / link.bandwidth
    near_s = 0.0 if facts.grid.spans_domains else byte_s
    return _Way(part_s=facts.part_seconds, latency=link.latency, near_s=near_s, far_s=byte_s, hidden=1.0)
