"""Seeded routing that never came from a model: what placements and exchanges are tested with and compared on.

Not a trace (traces.py keeps one). Pure; every generator draws K distinct experts a token without replacement, by
popularity. Shapes: ids [T, K] i32. T tokens, K top-k, E experts.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

_TOKENS_AT_ONCE = 4096


def uniform(num_tokens: int, num_experts: int, top_k: int, *, seed: int) -> np.ndarray:
    """Return ids where every expert is as popular as any other."""
    rng = np.random.default_rng(seed)
    return _draw(num_tokens, top_k, lambda first, count: np.zeros((1, num_experts)), rng)


def zipf(num_tokens: int, num_experts: int, top_k: int, *, seed: int, exponent: float = 1.2) -> np.ndarray:
    """Return ids where the n-th most popular expert has weight n ** -exponent; the seed says which is n-th."""
    rng = np.random.default_rng(seed)
    popularity = _zipf_log_weights(num_experts, exponent, rng)[None]
    return _draw(num_tokens, top_k, lambda first, count: popularity, rng)


def shifting(
    num_tokens: int, num_experts: int, top_k: int, *, seed: int, exponent: float = 1.2, period: int = 8192
) -> np.ndarray:
    """Return Zipf ids whose popular experts are others after each `period` tokens."""
    rng = np.random.default_rng(seed)
    spells = -(-max(1, num_tokens) // period)
    popularity = np.stack([_zipf_log_weights(num_experts, exponent, rng) for _ in range(spells)])
    return _draw(num_tokens, top_k, lambda first, count: popularity[np.arange(first, first + count) // period], rng)


def correlated(
    num_tokens: int,
    num_experts: int,
    top_k: int,
    *,
    seed: int,
    team_size: int = 8,
    pull: float = 4.0,
    exponent: float = 0.6,
) -> np.ndarray:
    """Return Zipf ids of tokens that each favour one team of experts by `pull` (added to log weights).

    Teams are drawn once, so their experts fire together and do not stand beside each other.
    """
    rng = np.random.default_rng(seed)
    popularity = _zipf_log_weights(num_experts, exponent, rng)
    num_teams = max(1, num_experts // team_size)
    team = rng.permutation(num_experts) % num_teams
    favoured = rng.integers(num_teams, size=max(1, num_tokens))

    def weights(first: int, count: int) -> np.ndarray:
        mine: np.ndarray = favoured[first : first + count, None] == team[None]
        return popularity[None] + pull * mine

    return _draw(num_tokens, top_k, weights, rng)


def grouped(
    num_tokens: int,
    num_experts: int,
    top_k: int,
    *,
    seed: int,
    num_groups: int = 8,
    top_groups: int = 4,
    exponent: float = 1.0,
) -> np.ndarray:
    """Return Zipf ids under group-limited routing: each token chooses only within its `top_groups` best groups."""
    rng = np.random.default_rng(seed)
    popularity = _zipf_log_weights(num_experts, exponent, rng)
    size = num_experts // num_groups
    worth = np.log(np.exp(popularity).reshape(num_groups, size).sum(1))

    def weights(first: int, count: int) -> np.ndarray:
        scores = worth + rng.gumbel(size=(count, num_groups))
        chosen = np.argsort(-scores, axis=1, kind="stable")[:, :top_groups]
        allowed = np.zeros((count, num_groups), bool)
        np.put_along_axis(allowed, chosen, True, 1)
        return np.where(np.repeat(allowed, size, axis=1), popularity, -np.inf)

    return _draw(num_tokens, top_k, weights, rng)


def _zipf_log_weights(num_experts: int, exponent: float, rng: np.random.Generator) -> np.ndarray:
    weights: np.ndarray = -exponent * np.log(rng.permutation(num_experts) + 1.0)
    return weights


def _draw(
    num_tokens: int, top_k: int, weights: Callable[[int, int], np.ndarray], rng: np.random.Generator
) -> np.ndarray:
    """Draw by adding Gumbel noise to log weights, `weights(first, count)` [count or 1, E] of some tokens."""
    ids = np.empty((num_tokens, top_k), np.int32)
    for first in range(0, num_tokens, _TOKENS_AT_ONCE):
        count = min(_TOKENS_AT_ONCE, num_tokens - first)
        scores = weights(first, count)
        scores = scores + rng.gumbel(size=(count, scores.shape[1]))
        ids[first : first + count] = np.argsort(-scores, axis=1, kind="stable")[:, :top_k]
    return ids
