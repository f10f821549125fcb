"""Decisions about experts that nothing but chance makes: for tests that move experts under whatever else happens.

Not a policy (moe/wide_ep/balancing/policy.py).
"""

from __future__ import annotations

import numpy as np

from moewe.moe.wide_ep.balancing import Decision, Move
from moewe.moe.wide_ep.placement import ExpertPlacement


def random_decision(
    placement: ExpertPlacement, rng: np.random.Generator, *, most: int = 6, within_domains: bool = False
) -> Decision:
    """Return some swaps of slots, and replicas that others replace; every expert keeps a slot, or even its domain."""
    slots = placement.physical_to_logical.copy()
    for _ in range(int(rng.integers(1, most))):
        layer, (a, b) = int(rng.integers(len(slots))), rng.choice(slots.shape[1], 2, replace=False).tolist()
        domain = placement.rank_domain[placement.slot_rank]
        if within_domains and domain[a] != domain[b]:
            continue
        if rng.random() < 0.5 and (slots[layer] == slots[layer, b]).sum() > 1:
            slots[layer, b] = slots[layer, a]
        else:
            slots[layer, [a, b]] = slots[layer, [b, a]]
    changed = np.argwhere(slots != placement.physical_to_logical).tolist()
    load = rng.integers(1, 100, (placement.num_layers, placement.num_experts)).astype(float)
    return Decision(
        moves=tuple(Move(layer=layer, slot=slot, expert=int(slots[layer, slot])) for layer, slot in changed),
        placement=placement.with_layers(slots, load, sorted({layer for layer, _ in changed})),
        transfer_s=0.0,
        saved_s=0.0,
    )
