"""How long a decode step takes on a topology, as a small pure model: bytes over ceilings, FLOPs over rates, links.

Not a measurement, not a placement, not one layer under a load (layer_cost.py) and not a budget (budget.py): it ranks
layouts of one model on one machine, and its errors are much the same for all of them. Experts are taken as hit evenly,
exchanges as not overlapped.
Units: seconds, bytes, bytes/s, FLOP/s; x ranks a group, y replicas, E experts, K a token, D width, b rows a rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .footprint import ModelFootprint
from .kv_sizes import shared_groups
from .spec import Topology

# A dispatch and a combine in each layer with experts.
EXCHANGES_A_LAYER = 2


@dataclass(frozen=True, kw_only=True)
class Link:
    """What one rank can send to others: bytes a second, and seconds until the first of them is there."""

    bandwidth: float
    latency: float


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """What one rank can do at best, measured or assumed.

    Attributes:
        memory_bandwidth: bytes/s that it reads.
        flops: FLOP/s of its matrix products.
        within: to ranks of its domain.
        between: to ranks of other domains.
    """

    memory_bandwidth: float
    flops: float
    within: Link
    between: Link


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Decode steps: `rows` sequences over all replicas, each with `context` tokens in KV."""

    rows: float
    context: int


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """One decode step of the fullest rank.

    Attributes:
        shared_bytes: weights read that all ranks hold (attention, dense FFN, shared experts, head).
        expert_bytes: weights of routed experts that are hit.
        kv_bytes: of the rank's sequences.
        memory_seconds: all of these over the ceiling.
        flops_seconds: arithmetic over its rate.
        within_seconds, between_seconds: exchanges, by link.
        rows: of the machine in the step.
    """

    shared_bytes: float
    expert_bytes: float
    kv_bytes: float
    memory_seconds: float
    flops_seconds: float
    within_seconds: float
    between_seconds: float
    rows: float

    @property
    def bytes_read(self) -> float:
        """What the rank reads from its memory."""
        return self.shared_bytes + self.expert_bytes + self.kv_bytes

    @property
    def exchange_seconds(self) -> float:
        """On all links."""
        return self.within_seconds + self.between_seconds

    @property
    def seconds(self) -> float:
        """The step: what binds of memory and arithmetic, and the exchanges."""
        return max(self.memory_seconds, self.flops_seconds) + self.exchange_seconds

    @property
    def tokens_per_second(self) -> float:
        """Of the whole machine."""
        return self.rows / self.seconds


def step_cost(
    footprint: ModelFootprint, topology: Topology, workload: Workload, ceilings: Ceilings, *, domain_size: int
) -> StepCost:
    """Return the cost of a decode step.

    Args:
        footprint: of the model.
        topology: x, y and atp; redundant slots cost memory and are read like others.
        workload: rows are spread evenly over all ranks.
        ceilings: of a rank; ranks that share a memory each have their part of its ceiling.
        domain_size: ranks of a domain; a wider group sends one copy of a token to each other domain that it needs, and
            that fans out inside.
    """
    rows = workload.rows / topology.num_ranks
    hit = expected_hit(footprint.top_k / footprint.num_experts, rows * topology.ep) if footprint.num_experts else 0.0
    slots = (footprint.num_experts + topology.red) / topology.ep
    shared = (
        footprint.attention_bytes_at(topology.atp)
        + footprint.dense_bytes
        + footprint.shared_bytes
        + (footprint.head_bytes or footprint.embedding_bytes)
    )
    experts = footprint.num_moe_layers * slots * footprint.expert_bytes * hit
    # The ranks of an attention replica all attend over its rows, each with its own heads.
    kv = (
        rows
        * topology.atp
        * sum(
            min(workload.context, group.window or workload.context) * group.bytes_per_token
            for group in shared_groups(footprint.kv_groups, topology.atp)
        )
    )
    within, between = _exchange_seconds(footprint, topology, rows, ceilings, domain_size)
    return StepCost(
        shared_bytes=shared,
        expert_bytes=experts,
        kv_bytes=kv,
        memory_seconds=(shared + experts + kv) / ceilings.memory_bandwidth,
        flops_seconds=rows * footprint.flops_per_token / ceilings.flops,
        within_seconds=within,
        between_seconds=between,
        rows=workload.rows,
    )


Amounts = float | np.ndarray  # of one product, or of each of many


@dataclass(frozen=True, kw_only=True)
class ExpertSpeed:
    """Experts of one layer on one rank as they really run: the seconds of weights and of rows add up.

    Attributes:
        byte_s: for each byte of an expert that is hit.
        flop_s: for each operation of a row.
    """

    byte_s: float
    flop_s: float

    def seconds(self, num_bytes: Amounts, flops: Amounts) -> Amounts:
        """Return how long experts of so many bytes take for rows of so many operations."""
        return num_bytes * self.byte_s + flops * self.flop_s


def product_seconds(num_bytes: Amounts, flops: Amounts, ceilings: Ceilings, experts: ExpertSpeed | None) -> Amounts:
    """Return how long products take that read so many bytes of weights and do so many operations, one by one.

    Args:
        num_bytes, flops: of each product.
        ceilings: of the rank: the longer of both counts.
        experts: how fast experts really run; None: as the ceilings say.
    """
    if experts is not None:
        return experts.seconds(num_bytes, flops)
    return np.maximum(num_bytes / ceilings.memory_bandwidth, flops / ceilings.flops)


def expected_hit(share: float, rows: float) -> float:
    """Return the expected part of experts that at least one of `rows` rows goes to, each to a `share` of all.

    Example:
        >>> expected_hit(0.5, 1), expected_hit(0.5, 2)
        (0.5, 0.75)
    """
    return 1.0 - float((1.0 - min(1.0, share)) ** rows)


def _exchange_seconds(
    footprint: ModelFootprint, topology: Topology, rows: float, ceilings: Ceilings, domain_size: int
) -> tuple[float, float]:
    """Return the seconds of all exchanges of a step within domains and between them."""
    if topology.ep == 1 or not footprint.num_moe_layers:
        return 0.0, 0.0
    times = EXCHANGES_A_LAYER * footprint.num_moe_layers
    row = footprint.hidden_size * footprint.activation_itemsize
    domains = -(-topology.ep // domain_size)
    inside = min(topology.ep, domain_size)
    # A token goes once to each place that holds one or more of its experts; the place where it is costs nothing.
    copies_inside = _places(inside, footprint.top_k / domains) * (inside - 1) / inside
    inside_bytes = rows * domains * copies_inside * row
    within = times * (ceilings.within.latency + inside_bytes / ceilings.within.bandwidth) if inside > 1 else 0.0
    if domains == 1:
        return within, 0.0
    copies_between = _places(domains, footprint.top_k) * (domains - 1) / domains
    between = times * (ceilings.between.latency + rows * copies_between * row / ceilings.between.bandwidth)
    return within, between


def _places(number: int, experts: float) -> float:
    """Return the expected number of distinct ones of `number` places that `experts` experts of a token are in."""
    return number * expected_hit(1.0 / number, experts)
