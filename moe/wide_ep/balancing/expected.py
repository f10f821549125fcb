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
    rows = np.empty((placement.num_layers, placement.num_ranks))
    for layer, by_slot in enumerate(expected_slot_rows(placement, load)):
        rows[layer] = np.bincount(placement.slot_rank, by_slot, placement.num_ranks)
    return rows


def expected_slot_rows(placement: ExpertPlacement, load: np.ndarray) -> np.ndarray:
    """Return the rows of each slot: [L, P] f64 of a load [L, E]."""
    rows = np.empty((placement.num_layers, placement.num_slots))
    for layer, slots in enumerate(placement.slot_of):  # [W, E]
        part = rows_by_origin(load[layer], placement.num_ranks)
        rows[layer] = np.bincount(slots.ravel(), part.ravel(), placement.num_slots)
    return rows


def rows_by_origin(load: np.ndarray, num_ranks: int, origin: np.ndarray | None = None) -> np.ndarray:
    """Return the rows that each rank brings for each expert: [W, E] f64 of a load [E]; not to be written to.

    Args:
        load: [E].
        num_ranks: W.
        origin: [W], the part of all tokens that each rank brings; None: as many as any other.
    """
    if origin is not None:
        return np.outer(origin, load)
    return np.broadcast_to(load / num_ranks, (num_ranks, len(load)))


def expected_imbalance(placement: ExpertPlacement, load: np.ndarray) -> np.ndarray:
    """Return rows of the fullest rank over the mean: [L] of a load [L, E]."""
    return imbalance(expected_rows(placement, load))
