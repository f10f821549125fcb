"""DeepSeek's expert parallelism load balancer (EPLB), from its published description: a baseline.

Not ours (balanced.py): it needs equal numbers of slots and knows links only as nodes that groups of experts stay in.
Pure; units: load in tokens per expert. L MoE layers, E experts, P slots, W ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ....topologies import slot_ranges
from .record import ExpertPlacement, placement_of


def eplb_placement(
    load: np.ndarray, *, num_redundant: int, domains: Sequence[int], num_groups: int = 1
) -> ExpertPlacement:
    """Place experts as EPLB does.

    Hierarchical where nodes divide groups: groups are packed onto nodes, experts are replicated within their node, and
    replicas are packed onto the ranks of the node. Else global: the same without nodes.

    Args:
        load: [L, E], tokens that each expert gets.
        num_redundant: redundant slots of the group.
        domains: the node of each rank, ascending, equally many ranks each.
        num_groups: equal runs of experts of which the router picks few a token.

    Raises:
        ValueError: slots do not divide by ranks; EPLB has no answer then.
    """
    num_layers, num_experts = load.shape
    num_ranks, num_nodes = len(domains), len(set(domains))
    num_slots = num_experts + num_redundant
    if num_slots % num_ranks:
        raise ValueError(f"EPLB needs equal slots on every rank, got {num_slots} slots for {num_ranks} ranks")
    nodes = num_nodes if num_groups % num_nodes == 0 and num_ranks % num_nodes == 0 else 1
    groups = num_groups if nodes > 1 else 1
    slots = np.empty((num_layers, num_slots), np.int32)
    for layer in range(num_layers):
        slots[layer] = _place(load[layer], num_slots, num_ranks, nodes, groups)
    return placement_of(
        slots, num_experts, slot_ranges(num_slots, num_ranks), domains=tuple(domains), load=np.asarray(load, float)
    )


def _place(load: np.ndarray, num_slots: int, num_ranks: int, num_nodes: int, num_groups: int) -> np.ndarray:
    """Return the expert of each slot of one layer: [P], node by node, rank by rank."""
    size = len(load) // num_groups
    groups = pack(load.reshape(num_groups, size).sum(1), num_nodes)
    placed = []
    for node in groups:
        experts = (np.array(node)[:, None] * size + np.arange(size)).ravel()
        copies = replicate(load[experts], num_slots // num_nodes)
        number = np.bincount(copies, minlength=len(experts))
        weights = load[experts][copies] / number[copies]
        placed += [experts[copies[held]] for held in pack(weights, num_ranks // num_nodes)]
    return np.concatenate(placed)


def pack(weights: np.ndarray, num_packs: int) -> list[list[int]]:
    """Put items into packs of equal counts: heaviest first, each into the lightest pack that is not full.

    Example:
        >>> pack(np.array([5.0, 1.0, 4.0, 2.0]), 2)
        [[0, 1], [2, 3]]
    """
    room = len(weights) // num_packs
    packs: list[list[int]] = [[] for _ in range(num_packs)]
    totals = [0.0] * num_packs
    for item in np.argsort(-weights, kind="stable").tolist():
        lightest = min((pack for pack in range(num_packs) if len(packs[pack]) < room), key=totals.__getitem__)
        packs[lightest].append(item)
        totals[lightest] += float(weights[item])
    return packs


def replicate(weights: np.ndarray, num_slots: int) -> np.ndarray:
    """Return the expert of each of `num_slots` replicas: each expert once, then again and again the heaviest replica's.

    Example:
        >>> replicate(np.array([9.0, 2.0]), 4).tolist()
        [0, 1, 0, 0]
    """
    copies, count = list(range(len(weights))), np.ones(len(weights))
    while len(copies) < num_slots:
        heaviest = int((weights / count).argmax())
        copies.append(heaviest)
        count[heaviest] += 1
    return np.array(copies)
