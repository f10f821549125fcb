"""Our placement: loads in, slots out, near links before far ones; also the one before any load is known.

Not the record (record.py) and not when to use a new one (a balancer decides). Pure.
Units: load in tokens per expert. L MoE layers, E experts, P slots, W ranks, N domains.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ....topologies import slot_ranges
from .affinity import above_chance, pairs_of_groups
from .baselines import linear_placement
from .packing import pack_ranks
from .record import ExpertPlacement, placement_of
from .replication import count_replicas
from .spread import served_by, spread_over_domains

# How hot an expert must be, in means of a rank, to be cut before others get a replica in every domain. Smaller pieces
# are easier to pack where ranks have few slots, but leave fewer slots that keep rows in their domain.
_HOT = (0.5, 0.25)
_EVEN_ENOUGH = 1.05
_WORTH_IT = 0.02


def balanced_placement(
    load: np.ndarray,
    *,
    num_redundant: int,
    domains: Sequence[int],
    coactivation: np.ndarray | None = None,
    affinity: Sequence[np.ndarray] | None = None,
    num_groups: int = 1,
) -> ExpertPlacement:
    """Place experts so that ranks get even loads and few rows cross domains.

    Args:
        load: [L, E], tokens that each expert gets, in any unit.
        num_redundant: slots of the group beside the E that hold every expert once.
        domains: the domain of each rank; its length is W.
        coactivation: [L, E, E], how many tokens chose both of two experts; None: not known.
        affinity: L tables [E, E] of how much more often than by chance two experts fire together, where pairs are known
            in this form.
        num_groups: equal runs of experts of which the router picks few a token, so that those of one fire together;
            used where neither `coactivation` nor `affinity`, which know it better, are given.

    Raises:
        ValueError: names what does not fit.

    Example:
        >>> load = np.array([[6.0, 1.0, 1.0]])
        >>> balanced_placement(load, num_redundant=1, domains=(0, 0)).physical_to_logical.tolist()
        [[0, 1, 0, 2]]
    """
    load = _checked(load, num_redundant, len(domains), num_groups)
    num_layers, num_experts = load.shape
    if coactivation is not None and coactivation.shape != (num_layers, num_experts, num_experts):
        raise ValueError(f"coactivation must be {(num_layers, num_experts, num_experts)}, got {coactivation.shape}")
    ranges = slot_ranges(num_experts + num_redundant, len(domains))
    counts = np.array([stop - start for start, stop in ranges])
    rank_domain = np.unique(np.asarray(domains), return_inverse=True)[1]
    slots = np.empty((num_layers, num_experts + num_redundant), np.int32)
    for layer in range(num_layers):
        pairs = coactivation[layer] if coactivation is not None else pairs_of_groups(load[layer], num_groups)
        if affinity is not None:
            together: np.ndarray | None = affinity[layer]
        else:
            together = None if pairs is None else above_chance(pairs)
        slots[layer] = _fill_slots(load[layer], counts, rank_domain, together)
    return placement_of(slots, num_experts, ranges, domains=tuple(domains), load=load)


def first_placement(
    num_layers: int, num_experts: int, *, num_redundant: int = 0, domains: Sequence[int]
) -> ExpertPlacement:
    """Return the placement to start with, when nothing is known of the load.

    Without redundant slots experts stand in order. With them all experts count the same, so the lowest ids get the
    replicas; a balancer moves them to where they help.

    Args:
        num_layers, num_experts: of the model; 0 for a dense one.
        num_redundant, domains: as `balanced_placement` takes them.
    """
    if not num_redundant or not num_experts:
        return linear_placement(num_layers, num_experts, domains=domains)
    one = balanced_placement(np.ones((1, num_experts)), num_redundant=num_redundant, domains=domains)
    slots = np.tile(one.physical_to_logical, (num_layers, 1))
    return placement_of(slots, num_experts, one.slot_ranges, domains=tuple(domains))


def _fill_slots(
    load: np.ndarray, counts: np.ndarray, rank_domain: np.ndarray, affinity: np.ndarray | None
) -> np.ndarray:
    """Return the expert of each slot of one layer: [P]."""
    num_domains = int(rank_domain.max()) + 1
    domain_ranks = np.bincount(rank_domain, minlength=num_domains)
    capacity = np.bincount(rank_domain, counts, num_domains).astype(np.int64)
    best, least = None, np.inf
    for hot in _HOT:
        replicas = count_replicas(load, int(counts.sum()), len(counts), num_domains, hot=hot)
        copies = spread_over_domains(load, replicas, capacity, domain_ranks, affinity=affinity)
        served = load[:, None] * served_by(copies, domain_ranks / domain_ranks.sum())  # [E, N]
        packed = pack_ranks(served / np.maximum(copies, 1), copies, rank_domain, counts)
        if best is None or packed.imbalance < least - _WORTH_IT:
            best, least = packed.experts, packed.imbalance
        if num_domains == 1 or least <= _EVEN_ENOUGH:
            break
    assert best is not None
    return np.array([expert for held in best for expert in held], np.int32)


def _checked(load: np.ndarray, num_redundant: int, num_ranks: int, num_groups: int) -> np.ndarray:
    """Return the load as f64, a layer without any as all ones, or say what is wrong."""
    load = np.array(load, np.float64)
    if load.ndim != 2 or not load.shape[1]:
        raise ValueError(f"load must be [MoE layers, experts], got shape {load.shape}")
    if not np.isfinite(load).all() or (load < 0).any():
        raise ValueError("load must hold finite numbers of at least 0")
    num_experts = load.shape[1]
    if num_redundant < 0:
        raise ValueError(f"num_redundant must be at least 0, got {num_redundant}")
    if not 1 <= num_ranks <= num_experts + num_redundant:
        raise ValueError(
            f"{num_ranks} ranks cannot share {num_experts} experts and {num_redundant} redundant slots; "
            f"use 1 to {num_experts + num_redundant} ranks"
        )
    if num_groups < 1 or num_experts % num_groups:
        raise ValueError(f"num_groups must divide the {num_experts} experts, got {num_groups}")
    load[load.sum(1) == 0] = 1.0
    return load
