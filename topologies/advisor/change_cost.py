"""What a change to another layout would cost: the way in which it can be made, how long it takes, what is lost.

Not the change (runtime/new_layout.py looks at the memory that is free when it begins). Pure. Units: seconds, bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .. import kv_sizes
from ..budget import ByteBudget, byte_budget
from ..spec import Topology, TopologyError, parse_topology
from .records import Facts, Observation
from .turns import BESIDE, IN_TURNS, RESTART, in_turns, work_lost


@dataclass(frozen=True, kw_only=True)
class ChangeCost:
    """The cost of a change; fields as those of a `Candidate`."""

    way: str
    change_s: float
    lost_s: float


def budget_of(facts: Facts, topology: Topology, *, kept_bytes: int = 0) -> ByteBudget:
    """Return the budget of a layout on the machine, where others keep `kept_bytes` of a host's memory."""
    memory = max(0, facts.machine.rank_memory(topology.num_ranks) - kept_bytes // topology.num_ranks)

    def budget(kv_bytes: int | None) -> ByteBudget:
        return byte_budget(facts.footprint, topology, facts.limits, rank_memory_bytes=memory, kv_bytes=kv_bytes)

    found = budget(facts.kv_bytes)
    if facts.kv_bytes is not None or facts.most_kv_bytes is None:
        return found
    most = kv_sizes.modest_kv_bytes(found.kv_groups, facts.limits, facts.most_kv_bytes // topology.num_ranks)
    return budget(most) if found.kv_bytes > most else found


def context_of(facts: Facts, seen: Observation) -> int:
    """Return the tokens that KV of a sequence holds, as observed."""
    return max(2, min(math.ceil(seen.context), facts.limits.max_model_len))


def change_cost(facts: Facts, seen: Observation, topology: Topology, restart_s: float) -> ChangeCost:
    """Return what it takes to change to `topology`, of which a replica is ready `restart_s` after its start."""
    here, is_host = parse_topology(facts.topology), facts.machine.exchange.device == "cpu"
    if is_host:
        kept = here.num_ranks * budget_of(facts, here).total
        then = budget_of(facts, topology, kept_bytes=kept)
        has_room = then.total <= then.rank_memory_bytes and then.longest_sequence >= 2
        if has_room and then.max_concurrency(context_of(facts, seen)) >= seen.running:
            return ChangeCost(way=BESIDE, change_s=restart_s, lost_s=0.0)
    try:
        turns = in_turns(here, topology, is_shared=is_host)
    except TopologyError:
        return ChangeCost(way=RESTART, change_s=restart_s, lost_s=restart_s)
    starts = sum(1 for turn in turns if turn.new)
    lost = restart_s * work_lost(turns, here, topology)
    return ChangeCost(way=IN_TURNS, change_s=starts * restart_s, lost_s=lost)
