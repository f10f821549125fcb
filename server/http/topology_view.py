"""The live map of /v1/topology: replicas, ranks, their processes, expert slots and load, as JSON or as a drawing.

Not a placement (moe.wide_ep) and not a grid (topologies): it only shows them.
Units: bytes, KV blocks; ranks are numbered over all replicas in the drawing, within their replica in the JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...moe.wide_ep.placement import ExpertPlacement, draw_placement, placement_of
from ...runtime.placements import expert_placement
from ...runtime.plan import unpack
from ...runtime.ranges import moves_experts
from ...topologies import RankGrid, parse_topology, placement_summary
from ...topologies.exchange_cost import BETWEEN, WITHIN
from ..state import ServerState

HOTTEST = 5  # experts that the map names


def topology_map(state: ServerState) -> dict[str, Any]:
    """Return the map.

    `expert_ranks[e]` is the rank that holds routed expert e (the first of several); `expert_replicas` names the ranks
    of each expert that stands on several. Experts are those of the first MoE layer, of replica 0 where they move; each
    replica shows its own beside its ranks. `hottest_experts` are of all MoE layers, in the last one to two minutes.
    """
    topology = parse_topology(state.config.parallel.topology)
    model = state.model_config
    placements = [_placement(state, replica) for replica in range(topology.dp)]
    num_experts = placements[0].num_experts
    replicas = [
        {
            "replica": replica,
            **_balance(state, replica),
            "links": _links(state, replica),
            "ranks": [{**rank, **_live(state, replica, rank["rank"])} for rank in _ranks(placement)],
        }
        for replica, placement in enumerate(placements)
    ]
    holders = _holders(placements[0])
    hottest = hottest_experts(*_loads(state, placements)) if num_experts else []
    return {
        "topology": topology.long(),
        "ep": topology.ep,
        "dp": topology.dp,
        "adp": topology.adp,
        "atp": topology.atp,
        "red": topology.red,
        "eplb": state.config.parallel.eplb,
        "num_ranks": topology.num_ranks,
        "model": state.names[0],
        "num_experts": num_experts,
        "expert_ranks": [held_by[0] for held_by in holders],
        "expert_replicas": {str(expert): held_by for expert, held_by in enumerate(holders) if len(held_by) > 1},
        "hottest_experts": hottest,
        "num_moe_layers": len(model.moe_layers),
        "device": state.config.parallel.device,
        "phase": state.phase.value,
        "replicas": replicas,
    }


def topology_drawing(state: ServerState) -> str:
    """Return the grid of ranks, the map of expert slots, and a line a rank."""
    view = topology_map(state)
    topology = parse_topology(view["topology"])
    lines = [view["topology"], "", str(RankGrid(topology, topology.num_ranks)), ""]
    if view["num_experts"]:
        lines += [f"experts of a replica: {placement_summary(topology, view['num_experts'])}"]
        for replica in range(topology.dp if moves_experts(state.config) else 1):
            lines += [f"replica {replica}"] * (topology.dp > 1 and moves_experts(state.config))
            lines += [draw_placement(_placement(state, replica)), ""]
    for replica in view["replicas"]:
        ready = state.ready[replica["replica"]] if replica["replica"] < len(state.ready) else None
        if ready is not None and ready.links is not None:
            lines += ready.links.lines()
        for rank in replica["ranks"]:
            start, stop = rank["slots"]
            slots = f"slots {start}-{stop - 1}" if stop > start else "no expert slots"
            parts = [f"replica {replica['replica']} rank {rank['rank']}", slots]
            parts += [
                f"{name} {rank[name]}" for name in ("pid", "running", "used_blocks", "num_blocks") if name in rank
            ]
            lines.append("  ".join(parts))
    return "\n".join(lines) + "\n"


def _ranks(placement: ExpertPlacement) -> list[dict[str, Any]]:
    """What stands where on each rank."""
    ranks: list[dict[str, Any]] = []
    for rank, (start, stop) in enumerate(placement.slot_ranges):
        experts = placement.local_experts(rank).tolist() if placement.num_experts else []
        domain = int(placement.rank_domain[rank])
        ranks.append(
            {"rank": rank, "domain": domain, "slots": [start, stop], "experts": experts, "num_experts": len(experts)}
        )
    return ranks


def _balance(state: ServerState, replica: int) -> dict[str, Any]:
    """How often experts of a replica have moved; nothing where they stay."""
    balance = state.stats[replica].balance if replica < len(state.stats) else None
    if balance is None:
        return {}
    return {"placement": balance.placement, "moves": balance.moves, "failed_rounds": balance.failures}


def _links(state: ServerState, replica: int) -> dict[str, Any] | None:
    """What rows of a MoE layer pay on their way, as it was measured at the start; nothing where none travel."""
    links = state.ready[replica].links if replica < len(state.ready) else None
    if links is None:
        return None

    def rounded(bandwidth: float | None) -> int | None:
        return None if bandwidth is None else round(bandwidth)

    exchanges = [
        {
            "exchange": cost.name,
            "fixed_us": round(1e6 * cost.fixed_s, 1),
            "domain_bytes_per_second": rounded(cost.bandwidth(WITHIN)),
            "between_bytes_per_second": rounded(cost.bandwidth(BETWEEN)),
            "hidden": round(cost.hidden, 2),
        }
        for cost in links.exchanges
    ]
    return {"exchanges": exchanges, "measured_in_seconds": round(links.took_s, 3)}


def _placement(state: ServerState, replica: int) -> ExpertPlacement:
    """Where the experts of a replica stand in the first MoE layer now; other layers are shown as they began."""
    start = expert_placement(state.config, state.model_config)
    balance = state.stats[replica].balance if replica < len(state.stats) else None
    if balance is None or not _has_moved(state, replica):
        return start
    slots = start.physical_to_logical.copy()
    slots[0] = unpack(balance.slots)
    return placement_of(slots, start.num_experts, start.slot_ranges, domains=start.domains)


def hottest_experts(loads: np.ndarray, layers: int, count: int = HOTTEST) -> list[dict[str, Any]]:
    """Return the experts with the most tokens of their layer, as multiples of the mean expert there, hottest first.

    Args:
        loads: [L, E] tokens of each expert.
        layers: how many of the layers, from the first on, `loads` can be trusted for.
        count: of experts.
    """
    loads = loads[:layers]
    means = loads.mean(axis=1, keepdims=True) if loads.size else loads
    times = np.divide(loads, means, out=np.zeros(loads.shape), where=means > 0)
    order = np.argsort(-times, axis=None, kind="stable")[:count]
    places = zip(*np.unravel_index(order, times.shape), strict=True)
    return [
        {"layer": int(layer), "expert": int(expert), "times_mean": round(float(times[layer, expert]), 2)}
        for layer, expert in places
        if times[layer, expert] > 0
    ]


def expert_loads(state: ServerState) -> np.ndarray:
    """Return the tokens of each expert lately [L, E], of those layers of which it is known where experts stand."""
    topology = parse_topology(state.config.parallel.topology)
    placements = [_placement(state, replica) for replica in range(topology.dp)]
    if not placements[0].num_experts:
        return np.zeros((0, 0))
    loads, layers = _loads(state, placements)
    return loads[:layers]


def _loads(state: ServerState, placements: Sequence[ExpertPlacement]) -> tuple[np.ndarray, int]:
    """Return the tokens of each expert in the last while, of all replicas, and for how many layers they are known.

    Slots are counted. Which expert stands in one is known of all layers only where none has moved.
    """
    loads = np.zeros((placements[0].num_layers, placements[0].num_experts))
    layers = placements[0].num_layers
    for replica, placement in enumerate(placements):
        metrics = state.metrics.replicas.get(replica)
        tokens = metrics.slots.tokens() if metrics is not None else np.zeros((0, 0))
        slots = placement.physical_to_logical
        if tokens.shape != slots.shape:
            continue  # nothing has run yet
        if _has_moved(state, replica):
            layers = 1
        layer, slot = np.nonzero(slots >= 0)
        np.add.at(loads, (layer, slots[layer, slot]), tokens[layer, slot])
    return loads, layers


def _has_moved(state: ServerState, replica: int) -> bool:
    balance = state.stats[replica].balance if replica < len(state.stats) else None
    return balance is not None and balance.placement > 0


def _holders(placement: ExpertPlacement) -> list[list[int]]:
    """Return the ranks that hold each expert in the first MoE layer."""
    if not placement.num_layers:
        return []
    return [np.unique(placement.slot_rank[slots[slots >= 0]]).tolist() for slots in placement.logical_to_physical[0]]


def _live(state: ServerState, replica: int, rank: int) -> dict[str, Any]:
    """What is known of a rank only once it runs."""
    live: dict[str, Any] = {}
    if replica < len(state.ready):
        ready = state.ready[replica]
        live |= {"pid": ready.pids[rank], "weight_bytes": ready.weight_bytes[rank], "num_blocks": ready.num_blocks}
    if replica < len(state.stats):
        stats = state.stats[replica]
        if rank < len(stats.running_per_rank):
            live["running"] = stats.running_per_rank[rank]
        used = [each.used_blocks for each in stats.ranks if each.rank == rank]
        live |= {"used_blocks": used[0]} if used else {}
    return live
