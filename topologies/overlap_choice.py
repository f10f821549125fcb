"""What of a MoE layer runs while rows travel: a pure function of the step, the model, the grid and ceilings.

Not an exchange (moe.wide_ep.exchanges) and no look at the machine: the engine chooses, the plan says what was chosen,
and so every rank begins the same collectives. No choice changes a token.

The model of a layer: the link carries one transfer after another, and each arrives a latency later; the rank computes
one thing after another. Halves hide transfers under experts, and read experts twice that both of them hit.
Units: rows of one rank, bytes, seconds, FLOP; W ranks, C domains, K experts a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from .cost import Ceilings, Link, expected_hit
from .exchange_choice import OVER_LINKS, ExchangeFacts, exchanges_to_join
from .footprint import ModelFootprint
from .grid import RankGrid
from .spec import TopologyError

OVERLAPS = ("auto", "on", "off")
# One after another; shared experts while rows travel; that, and two halves of the rows in turns.
NOTHING, SHARED, HALVES = "none", "shared", "halves"
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
        link: the slowest that rows cross; None where the cores that compute carry them, so that nothing is to be won.
        part_seconds: what a part of a batch costs beside its rows: calls, sorting, collectives.
    """

    asked: str
    grid: RankGrid
    load: MoELoad | None
    ceilings: Ceilings
    link: Link | None
    part_seconds: float


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
    if facts.load is None or facts.link is None or rows < 2:
        return SHARED
    first = -(-rows // 2)
    whole, halves = (layer_seconds(exchange, parts, facts) for parts in ((rows,), (first, rows - first)))
    return HALVES if halves < (1 - MARGIN) * whole else SHARED


def layer_seconds(exchange: str, parts: Sequence[int], facts: OverlapFacts) -> float:
    """Return how long a MoE layer takes in which each rank has `parts` rows, one part in turn with the next.

    Shared experts run while rows travel. All ranks have as many rows, and rows hit experts evenly.
    """
    load, link, ceilings = facts.load, facts.link, facts.ceilings
    assert load is not None and link is not None
    topology = facts.grid.topology
    slots = (load.num_experts + topology.red) / topology.ep

    def experts(rows: int) -> float:
        read = slots * load.expert_bytes * expected_hit(load.top_k / load.num_experts, rows * topology.ep)
        return max(read / ceilings.memory_bandwidth, rows * load.top_k * load.expert_flops / ceilings.flops)

    # A room of fixed size needs no counts; else they cross first, those of all parts at a time.
    counted = 0.0 if exchange == "padded" else link.latency
    link_free, arrivals = counted, []
    for rows in parts:
        link_free += _copies_out(exchange, rows, facts) * load.row_bytes / link.bandwidth
        arrivals.append(link_free + link.latency)
    shared_rows = sum(parts) * load.shared_bytes / load.expert_bytes
    shared = max(load.shared_bytes / ceilings.memory_bandwidth, shared_rows * load.expert_flops / ceilings.flops)
    computed, end = counted + shared, 0.0
    for rows, arrival in zip(parts, arrivals, strict=True):
        computed = max(computed, arrival) + experts(rows) + facts.part_seconds
        link_free = max(link_free, computed)
        link_free += _copies_back(exchange, rows, facts) * load.row_bytes / link.bandwidth
        end = link_free + link.latency
    return end


def _copies_out(exchange: str, rows: int, facts: OverlapFacts) -> float:
    """Return how many rows a rank with `rows` rows sends over the slowest link in a dispatch."""
    num_ranks, near, top_k = facts.grid.topology.ep, _near(facts.grid), _top_k(facts)
    if exchange == "padded":
        return float((num_ranks - near) * _capacity(rows))
    if exchange == "hierarchical":
        return rows * _crossings(facts)
    # A row goes once to a rank that has experts of it.
    return rows * (num_ranks - near) * expected_hit(1.0 / num_ranks, top_k)


def _copies_back(exchange: str, rows: int, facts: OverlapFacts) -> float:
    """Return how many answers it sends over that link in a combine."""
    num_ranks, near, top_k = facts.grid.topology.ep, _near(facts.grid), _top_k(facts)
    if exchange == "padded":
        return float((num_ranks - near) * _capacity(rows) * top_k)
    if exchange == "hierarchical":
        return rows * _crossings(facts)
    return rows * top_k * (num_ranks - near) / num_ranks


def _crossings(facts: OverlapFacts) -> float:
    """Return the expected number of other domains in which a row has experts."""
    domains = len(facts.grid.group_domains)
    return (domains - 1) * expected_hit(1.0 / domains, _top_k(facts))


def _near(grid: RankGrid) -> int:
    """Return the ranks that are not behind the slowest link: those of the smallest domain, or a rank itself."""
    return min(grid.group_domains) if grid.spans_domains else 1


def _top_k(facts: OverlapFacts) -> int:
    assert facts.load is not None
    return facts.load.top_k


def _capacity(rows: int) -> int:
    """Return the room that `padded` makes for `rows` rows: the next power of two."""
    return 1 << max(0, rows - 1).bit_length()
