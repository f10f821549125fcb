"""What the choice of overlap is made from, once the ranks of a group have measured themselves.

Not the choice (topologies/overlap_choice.py). Units: bytes/s and FLOP/s of one rank, seconds.
"""

from __future__ import annotations

import logging
import math

from ..topologies import RankGrid, Topology
from ..topologies.cost import Link
from ..topologies.exchange_choice import OVER_LINKS, ExchangeRule
from ..topologies.exchange_cost import MeasuredLinks
from ..topologies.machine import rank_ceilings
from ..topologies.overlap_choice import HALVES, MoELoad, OverlapFacts, choose_overlap
from .config import EngineConfig

log = logging.getLogger(__name__)

# Orders of magnitude: some forty calls and three collectives, over loopback on a host, enqueued on a GPU.
_HOST_PART_SECONDS, _GPU_PART_SECONDS = 5e-4, 1.5e-4


def overlap_facts(
    config: EngineConfig,
    grid: RankGrid,
    load: MoELoad | None,
    *,
    memory_bandwidth: float | None = None,
    matrix_rate: float | None = None,
    links: MeasuredLinks | None = None,
) -> OverlapFacts:
    """Return what a group's choice depends on.

    Args:
        config: resolved.
        grid: of the group.
        load: of a MoE layer of the model.
        memory_bandwidth, matrix_rate: of the slowest rank; None where nobody measured, and round numbers do.
        links: as ranks have measured them; None before.
    """
    on_host = config.parallel.device == "cpu"
    ceilings = rank_ceilings(
        on_host=on_host,
        num_ranks=grid.topology.num_ranks,
        memory_bandwidth=memory_bandwidth,
        matrix_rate=matrix_rate,
    )
    far = ceilings.between if grid.spans_domains else ceilings.within
    return OverlapFacts(
        asked=config.parallel.overlap,
        grid=grid,
        load=load,
        ceilings=ceilings,
        link=_emulated(grid.topology) if on_host else far,
        part_seconds=_HOST_PART_SECONDS if on_host else _GPU_PART_SECONDS,
        measured=links or MeasuredLinks(),
    )


def log_overlap(rule: ExchangeRule, facts: OverlapFacts, most_rows: int) -> None:
    """Say from how many rows on the choice is two halves, where rows travel at all."""
    exchange = rule.name("prefill", most_rows)
    if exchange not in OVER_LINKS or facts.asked != "auto":
        return
    sizes = [1 << i for i in range(1, max(2, most_rows).bit_length())]
    first = next((rows for rows in sizes if choose_overlap(exchange, rows, facts) == HALVES), None)
    if first is None:
        log.info("overlap: shared experts run while rows travel; no step gains by two halves")
    else:
        log.info("overlap: two halves in steps of some %d rows a rank and more; below, shared experts only", first)


def _emulated(topology: Topology) -> Link | None:
    """Return the link between domains of one host, which sleeps; where it is not slowed down, cores carry the rows."""
    if not (topology.domains and (topology.rate or topology.delay)):
        return None
    return Link(bandwidth=1e6 * topology.rate if topology.rate else math.inf, latency=1e-6 * topology.delay)
