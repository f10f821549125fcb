"""What the advisor has to know of a server that runs: its layout, model, machine and what ranks measured at the start.

Not the advisor (topologies/advisor/). Units: bytes/s and FLOP/s that good kernels reach, seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..topologies.advisor.records import Facts
from ..topologies.exchange_cost import LayoutLink
from ..topologies.hardware import host_cores, host_memory_bytes
from ..topologies.machine import Machine
from .auto_topology import machine_of
from .kv_layout import step_limits
from .messages import Ready
from .metrics.bound import MEMORY_EFFICIENCY, RankCeilings
from .resolve import CPU_KV_DIVISOR, Resolved


def advisor_facts(
    resolved: Resolved, ready: Sequence[Ready], ceilings: RankCeilings | None, *, start_s: float
) -> Facts:
    """Return what stays as it is while this layout runs.

    Args:
        resolved: what runs.
        ready: what each replica said when it was.
        ceilings: of a rank, as measured; None where nobody measured.
        start_s: how long the start took.
    """
    topology, parallel = resolved.topology, resolved.config.parallel
    gpus = (resolved.budget.rank_memory_bytes,) * topology.num_ranks if parallel.device == "cuda" else None
    machine = machine_of(
        resolved.config,
        gpus=gpus,
        cores=max(host_cores(), topology.num_ranks),
        host_bytes=resolved.budget.rank_memory_bytes * topology.num_ranks,
    )
    if gpus is not None:
        machine = replace(machine, memory_bytes=resolved.budget.rank_memory_bytes)  # the user's share of it already
    found = [one.links for one in ready if one.links is not None and one.links.exchanges]
    # Replicas measure at much the same time, and what else runs only adds.
    measured = min(found, key=lambda links: links.exchanges[0].fixed_s, default=None)
    links = [LayoutLink(topology=topology.long(), cost=cost) for cost in measured.exchanges] if measured else []
    known = tuple(link for link in machine.links if link not in links)
    return Facts(
        topology=topology.long(),
        footprint=resolved.footprint,
        limits=step_limits(resolved.config),
        machine=replace(_with_ceilings(machine, ceilings, topology.num_ranks), links=(*known, *links)),
        experts=measured.experts if measured else None,
        start_s=start_s,
        kv_bytes=_asked_kv(resolved),
        most_kv_bytes=host_memory_bytes() // CPU_KV_DIVISOR if gpus is None else None,
        weight_bytes=sum(sum(one.weight_bytes) for one in ready),
    )


def _asked_kv(resolved: Resolved) -> int | None:
    """Return the KV of a rank that the user asked for, in bytes or in blocks."""
    cache = resolved.asked.cache
    return cache.kv_cache_memory_bytes if cache.num_blocks is None else resolved.budget.kv_bytes


def _with_ceilings(machine: Machine, ceilings: RankCeilings | None, num_ranks: int) -> Machine:
    """Return `machine` with what good kernels reach of measured ceilings; ranks that share a host share these, too."""
    if ceilings is None:
        return machine
    together = num_ranks if machine.is_shared else 1
    rates = replace(
        machine.ceilings,
        memory_bandwidth=together * MEMORY_EFFICIENCY * ceilings.memory_bandwidth,
        flops=together * ceilings.matrix_efficiency * ceilings.matrix_rate,
    )
    return replace(machine, ceilings=rates)
