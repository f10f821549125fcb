"""Recorded routing under placements: how even ranks are, and what crosses domains. Pure.

Not a recorder (runtime) and not a decision: placements by load are made from the first half of a trace and judged, like
the others, on the second, which they have not seen. Units: tokens, bytes. L MoE layers, W ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..placement import (
    above_chance,
    affinity_of,
    balanced_placement,
    coactivation,
    expert_load,
    first_placement,
    linear_placement,
    strongest_pairs,
    traffic,
)
from ..traces import RoutingTrace
from .load_file import PAIRS_PER_EXPERT, ExpertLoad


@dataclass(frozen=True, kw_only=True, eq=False)
class Replayed:
    """The second half of a phase under one placement.

    Attributes:
        phase, placement: which: `in order` (no replicas), `off` (replicas of the first experts) or `static` (by load).
        num_tokens: that were judged.
        imbalance: [L], rows of the fullest rank over the mean.
        bytes_between: a token and layer, both ways, where a row goes to each rank that has experts of it.
        bytes_between_hierarchical: where it goes once to each domain.
    """

    phase: str
    placement: str
    num_tokens: int
    imbalance: np.ndarray
    bytes_between: float
    bytes_between_hierarchical: float


def load_of(trace: RoutingTrace) -> ExpertLoad:
    """Return what each expert got, by phase, and which fire together, phases together."""
    return ExpertLoad(
        phases={phase: trace.load(phase) for phase in trace.ids},
        together=pairs_of(list(trace.ids.values()), trace.num_experts),
    )


def pairs_of(parts: Sequence[np.ndarray], num_experts: int) -> tuple[np.ndarray, ...]:
    """Return for each layer the pairs that fire together most, [n, 3]: of ids [L, T, K] each."""
    layers = []
    for layer in range(len(parts[0])):
        pairs = sum((coactivation(ids[layer], num_experts) for ids in parts), np.zeros((num_experts, num_experts)))
        layers.append(strongest_pairs(above_chance(pairs), PAIRS_PER_EXPERT * num_experts))
    return tuple(layers)


def replay(trace: RoutingTrace, *, num_redundant: int, domains: Sequence[int], row_bytes: int) -> list[Replayed]:
    """Return what each placement makes of each phase that has two tokens or more.

    Args:
        trace: what was recorded.
        num_redundant: slots of the group beside one for each expert.
        domains: the domain of each rank; its length is W.
        row_bytes: of a token on its way to an expert.

    Raises:
        ValueError: so many ranks and slots do not fit the experts.
    """
    num_layers, num_experts, num_ranks = trace.num_layers, trace.num_experts, len(domains)
    halves = {phase: (ids[:, : ids.shape[1] // 2], ids[:, ids.shape[1] // 2 :]) for phase, ids in trace.ids.items()}
    fit = np.sum([expert_load(first, num_experts) for first, _ in halves.values() if first.shape[1]], axis=0)
    if not np.ndim(fit):
        raise ValueError("the trace has less than two tokens; record more")
    affinity = None
    if len(set(domains)) > 1:
        together = pairs_of([first for first, _ in halves.values()], num_experts)
        affinity = [affinity_of(pairs, num_experts) for pairs in together]
    placements = {
        "in order": linear_placement(num_layers, num_experts, domains=domains),
        "off": first_placement(num_layers, num_experts, num_redundant=num_redundant, domains=domains),
        "static": balanced_placement(fit, num_redundant=num_redundant, domains=domains, affinity=affinity),
    }
    results = []
    for phase, (_, judged) in halves.items():
        source = np.arange(judged.shape[1]) % num_ranks
        for name, placement in placements.items():
            layers = [traffic(ids, placement, layer, source) for layer, ids in enumerate(judged)]
            far = [[each.bytes_between(row_bytes, hierarchical=both) for each in layers] for both in (False, True)]
            results.append(
                Replayed(
                    phase=phase,
                    placement=name,
                    num_tokens=judged.shape[1],
                    imbalance=np.array([each.imbalance for each in layers]),
                    bytes_between=float(np.mean(far[0])),
                    bytes_between_hierarchical=float(np.mean(far[1])),
                )
            )
    return results
