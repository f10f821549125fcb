"""Where the experts of a replica stand: the one answer for its ranks, its engine and whoever shows it.

Not a policy (moe.wide_ep.placement) and not live balancing (runtime/rebalancing/): this is where experts stand at the
start, and with `eplb` off or static until the end.
Units: tokens. L MoE layers, E experts.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import msgspec
import numpy as np

from ..models.config import ModelConfig
from ..moe.wide_ep.balancing import expected_imbalance, read_load
from ..moe.wide_ep.placement import (
    ExpertPlacement,
    affinity_of,
    balanced_placement,
    first_placement,
    linear_placement,
    placement_of,
)
from ..topologies import RankGrid, Topology, parse_topology, slot_ranges
from .config import EngineConfig
from .plan import pack, unpack
from .ranges import eplb_file


def with_load(config: EngineConfig, model: ModelConfig, topology: Topology) -> EngineConfig:
    """Return `config` with the load that `eplb` names in it, so that all ranks see the same one.

    Where the file says which experts fire together, and ranks of `topology` are in several domains, the placement
    itself is in it: pairs would be many bytes for every rank.

    Raises:
        ValueError: there is no such file, or it does not fit the model.
    """
    eplb, load, slots = config.parallel.eplb.strip(), b"", b""
    if eplb == "auto" and model.moe is None:
        raise ValueError("eplb='auto' moves experts, but the model is dense; use off")
    if file := eplb_file(eplb):
        if model.moe is None:
            raise ValueError(f"eplb={eplb!r} places experts, but the model is dense; use off")
        path = Path(file).expanduser().absolute()
        try:
            read = read_load(path, num_layers=len(model.moe_layers), num_experts=model.moe.routing.num_experts)
        except ValueError as error:
            raise ValueError(f"eplb={eplb!r}: {error}") from None
        eplb, load = f"static {path}", pack(read.total, "<i8")
        domains = RankGrid(topology, topology.num_ranks).domains()
        if read.together and len(set(domains)) > 1:
            num_experts = model.moe.routing.num_experts
            affinity = [affinity_of(pairs, num_experts) for pairs in read.together]
            placed = balanced_placement(read.total, num_redundant=topology.red, domains=domains, affinity=affinity)
            slots = pack(placed.physical_to_logical, "<i4")
    parallel = msgspec.structs.replace(config.parallel, eplb=eplb, eplb_load=load, eplb_slots=slots)
    return msgspec.structs.replace(config, parallel=parallel)


def expert_placement(config: EngineConfig, model: ModelConfig) -> ExpertPlacement:
    """Return where experts stand when a resolved `config` starts: by the load in it, else as `first_placement`."""
    num_experts = model.moe.routing.num_experts if model.moe is not None else 0
    parallel = config.parallel
    groups = max(1, model.moe.routing.num_groups) if model.moe is not None else 1
    shape = (len(model.moe_layers), num_experts)
    return _placement(parallel.topology, shape, groups, parallel.eplb_load, parallel.eplb_slots)


def placement_note(config: EngineConfig, model: ModelConfig) -> str:
    """Return a line about a placement by load, empty without one: what makes it, and what it is to give."""
    parallel, topology = config.parallel, parse_topology(config.parallel.topology)
    if parallel.eplb == "auto":
        if topology.ep == 1:
            return "  placement  eplb auto: one rank holds all experts, so nothing moves"
        return "  placement  evenly at first, then by the load that comes (eplb auto)"
    if not parallel.eplb_load or model.moe is None:
        return ""
    load = np.reshape(unpack(parallel.eplb_load, "<i8"), (len(model.moe_layers), -1))
    placed = float(expected_imbalance(expert_placement(config, model), load).mean())
    plain = float(expected_imbalance(linear_placement(load.shape[0], load.shape[1], topology.ep), load).mean())
    return (
        f"  placement  by load of {eplb_file(parallel.eplb)}: fullest rank {placed:.2f} of the mean, "
        f"{plain:.2f} with experts in order"
    )


@lru_cache(maxsize=8)
def _placement(
    topology_text: str, shape: tuple[int, int], num_groups: int, load: bytes, slots: bytes
) -> ExpertPlacement:
    topology = parse_topology(topology_text)
    domains = RankGrid(topology, topology.num_ranks).domains()
    if not load:
        return first_placement(*shape, num_redundant=topology.red, domains=domains)
    table = np.reshape(unpack(load, "<i8"), shape)
    if slots:
        experts = np.reshape(unpack(slots, "<i4"), (shape[0], -1))
        ranges = slot_ranges(experts.shape[1], len(domains))
        return placement_of(experts, shape[1], ranges, domains=tuple(domains), load=table)
    return balanced_placement(table, num_redundant=topology.red, domains=domains, num_groups=num_groups)
