"""Which experts fire together: counts of pairs, and how much they are above chance.

Not a placement (spread.py uses it). Pure; units: tokens. T tokens, K top-k, E experts.
"""

from __future__ import annotations

import numpy as np

_TOKENS_AT_ONCE = 4096


def coactivation(topk_ids: np.ndarray, num_experts: int) -> np.ndarray:
    """Return how many tokens chose both of two experts: [E, E] f64, zero on the diagonal.

    Args:
        topk_ids: [T, K], -1 for a dropped choice; no id twice in a row.
        num_experts: E.

    Example:
        >>> coactivation(np.array([[0, 2], [2, 0], [1, -1]]), 3)[0].tolist()
        [0.0, 0.0, 2.0]
    """
    pairs = np.zeros((num_experts, num_experts))
    for start in range(0, len(topk_ids), _TOKENS_AT_ONCE):
        ids = topk_ids[start : start + _TOKENS_AT_ONCE]
        hit = np.zeros((len(ids), num_experts + 1), np.float32)
        hit[np.arange(len(ids))[:, None], ids] = 1  # dropped choices land in the last column
        hit = hit[:, :-1]
        pairs += hit.T @ hit
    np.fill_diagonal(pairs, 0)
    return pairs


def above_chance(pairs: np.ndarray) -> np.ndarray:
    """Return pairs minus what experts of the same frequency would share by chance: [E, E], zero on the diagonal."""
    weight = pairs.sum(1)
    total = weight.sum()
    if not total:
        return np.zeros_like(pairs)
    excess: np.ndarray = pairs - np.outer(weight, weight) / total
    np.fill_diagonal(excess, 0)
    return excess


def strongest_pairs(affinity: np.ndarray, most: int) -> np.ndarray:
    """Return the pairs that fire together most above chance: [n, 3] i64 of two experts and tokens, strongest first.

    Args:
        affinity: [E, E] as `above_chance` gives it; a pair below half a token is none.
        most: pairs.

    Example:
        >>> strongest_pairs(np.array([[0.0, 3.0, -1.0], [3.0, 0.0, 5.0], [-1.0, 5.0, 0.0]]), 2).tolist()
        [[1, 2, 5], [0, 1, 3]]
    """
    first, second = np.triu_indices(len(affinity), 1)
    tokens = np.rint(affinity[first, second]).astype(np.int64)
    order = np.argsort(-tokens, kind="stable")[:most]
    order = order[tokens[order] > 0]
    return np.stack([first[order], second[order], tokens[order]], axis=1)


def affinity_of(pairs: np.ndarray, num_experts: int) -> np.ndarray:
    """Return pairs [n, 3] as `strongest_pairs` gives them as a table: [E, E] f64, 0 for all others."""
    table = np.zeros((num_experts, num_experts))
    table[pairs[:, 0], pairs[:, 1]] = table[pairs[:, 1], pairs[:, 0]] = pairs[:, 2]
    return table


def pairs_of_groups(load: np.ndarray, num_groups: int) -> np.ndarray | None:
    """Return what `coactivation` would tell of a router that picks few groups a token, up to a factor; None for one.

    Args:
        load: [E], tokens that each expert gets.
        num_groups: equal runs of experts.
    """
    if num_groups == 1:
        return None
    group = np.arange(len(load)) // (len(load) // num_groups)
    pairs: np.ndarray = np.outer(load, load) * (group[:, None] == group)
    np.fill_diagonal(pairs, 0)
    return pairs
