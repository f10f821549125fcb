"""How long a decode step takes on a layout of a machine, with links as they were measured, popular experts and all.

Not a measurement and not a choice: `step_cost` with what is known of exchanges in place of what is assumed of links.
Units: seconds, bytes; rows of a step over all replicas; x ranks of a group, E experts, K a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..cost import StepCost, Workload, expected_hit, step_cost
from ..exchange_choice import OVER_LINKS, choose_exchange
from ..exchange_cost import BETWEEN, WITHIN, ExchangeCost, bytes_sent
from ..footprint import ModelFootprint
from ..machine import Machine
from ..planner.routing import Popularity, distinct_share
from ..spec import Topology, TopologyError, parse_topology

# Collectives of an exchange over links: counts, rows, answers. Each waits once for the link's delay.
_COLLECTIVES = 3
# What an exchange over links costs a host's ranks beside its bytes: 3.4 ms for 24 KB with two ranks (decision 029).
_HOST_FIXED_S = 3e-3


@dataclass(frozen=True)
class LinkFigure:
    """What a layer's exchange takes, and whether anybody measured that on a link of this kind."""

    cost: ExchangeCost
    is_measured: bool


def exchange_of(machine: Machine, topology: Topology) -> str:
    """Return the name of the exchange that decode steps of a layout use."""
    return choose_exchange("decode", 1, machine.grid(topology), machine.exchange)


def link_figure(machine: Machine, topology: Topology) -> LinkFigure | None:
    """Return what exchanges of a layout take; None where rows stay, or where the ceilings say all that is known.

    What was measured of the same layout goes before the same exchange of another width on the same kind of link; the
    narrower figure of two equally near ones counts. An emulated link that nobody measured takes what its rate and delay
    say and what a host needs for its collectives.
    """
    if topology.ep == 1:
        return None
    placed, name = machine.placed(topology), exchange_of(machine, topology)
    spans = machine.grid(placed).spans_domains
    known: list[tuple[int, int, ExchangeCost]] = []
    for link in machine.links:
        try:
            other = parse_topology(link.topology)
        except TopologyError:
            continue
        alike = link.cost.name == name and machine.grid(other).spans_domains == spans
        if alike and (other.rate, other.delay) == (placed.rate, placed.delay):
            known.append((abs(other.ep - placed.ep), other.ep, link.cost))
    if known:
        nearest = min(distance for distance, _, _ in known)
        width = min(ep for distance, ep, _ in known if distance == nearest)
        return LinkFigure([cost for distance, ep, cost in known if (distance, ep) == (nearest, width)][-1], True)
    if not (spans and machine.domains):
        return None
    within, between = machine.ceilings.within, machine.ceilings.between
    emulated = 1e-6 / placed.rate if placed.rate else 0.0
    return LinkFigure(
        ExchangeCost(
            name=name,
            fixed_s=_HOST_FIXED_S + _COLLECTIVES * 1e-6 * placed.delay,
            within_s=1 / within.bandwidth,
            between_s=1 / between.bandwidth + emulated,
            assumed=(WITHIN, BETWEEN),
        ),
        False,
    )


def forecast(
    footprint: ModelFootprint,
    topology: Topology,
    load: Workload,
    machine: Machine,
    *,
    chances: Sequence[float] = (),
) -> StepCost:
    """Return the cost of a decode step, which all replicas run at the same time.

    Args:
        footprint: of the model.
        topology: the layout.
        load: rows over all replicas.
        machine: with its ceilings and links.
        chances: that a row chooses each expert [E], in any order; none: all alike.
    """
    ceilings = machine.rank_ceilings(topology.num_ranks)
    cost = step_cost(footprint, topology, load, ceilings, domain_size=machine.domain_size)
    rows = load.rows / topology.num_ranks
    if chances and footprint.num_experts:
        even = expected_hit(footprint.top_k / footprint.num_experts, rows * topology.ep)
        hit = distinct_share(np.asarray(chances), rows * topology.ep)
        experts = cost.expert_bytes * hit / even if even > 0 else 0.0
        bytes_read = cost.bytes_read - cost.expert_bytes + experts
        cost = replace(cost, expert_bytes=experts, memory_seconds=bytes_read / ceilings.memory_bandwidth)
    figure = link_figure(machine, topology)
    if figure is None or not footprint.num_moe_layers:
        return cost
    near, far = layer_bytes(footprint, machine, topology, rows)
    layers, link = footprint.num_moe_layers, figure.cost
    spans = machine.grid(machine.placed(topology)).spans_domains
    within, between = near * link.within_s, far * link.between_s
    return replace(
        cost,
        within_seconds=layers * (within + (0.0 if spans else link.fixed_s)),
        between_seconds=layers * (between + link.fixed_s) if spans else 0.0,
    )


def layer_bytes(footprint: ModelFootprint, machine: Machine, topology: Topology, rows: float) -> tuple[float, float]:
    """Return the bytes that a rank with `rows` rows sends in a MoE layer, out and back, in its domain and between."""
    name = exchange_of(machine, topology)
    row = footprint.hidden_size * footprint.activation_itemsize
    travels = name if name in OVER_LINKS else "all_to_all"
    return bytes_sent(travels, rows, machine.grid(machine.placed(topology)), footprint.top_k, row)


def chances_of(footprint: ModelFootprint, popularity: Sequence[float]) -> tuple[float, ...]:
    """Return the chance that a row chooses each expert, from the parts of all choices that experts get [E]."""
    if not popularity or len(popularity) != footprint.num_experts:
        return ()
    chances = Popularity((tuple(popularity),)).inclusion(footprint.num_experts, footprint.top_k)
    return tuple(chances[0].tolist())
