"""What a placement makes of a load: rows of each rank before any are sent. Pure arithmetic, no traffic (measures.py).

Units: tokens (rows of an expert); every rank brings an equal part of them. L MoE layers, E experts, W ranks.
"""

from __future__ import annotations

import numpy as np

from ..placement.measures import imbalance
from ..placement.record import ExpertPlacement


def expected_rows(placement: ExpertPlacement, load: np.ndarray) -> np.ndarray:
    """Return the rows of each rank: [L, W] f64 of a load [L, E].

    Example:
        >>> from ..placement import linear_placement
        >>> expected_rows(linear_placement(1, 4, 2), np.array([[4, 2, 1, 1]])).tolist()
        [[6.0, 2.0]]
    """
    num_ranks = placement.num_ranks
    rows = np.empty((placement.num_layers, num_ranks))
    for layer in range(placement.num_layers):
        ranks = placement.slot_rank[placement.slot_of[layer]]  # [W, E]
        part = np.broadcast_to(load[layer] / num_ranks, ranks.shape)
        rows[layer] = np.bincount(ranks.ravel(), part.ravel(), num_ranks)
    return rows


def expected_imbalance(placement: ExpertPlacement, load: np.ndarray) -> np.ndarray:
    """Return rows of the fullest rank over the mean: [L] of a load [L, E]."""
    return imbalance(expected_rows(placement, load))
