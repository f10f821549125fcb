"""The sampler again, slow and plain: one row at a time in float64, with loops.

Not used by a worker: the specification with which tests compare.
Shapes: logits [V]; distributions [V] f64 that sum to 1.
"""

from __future__ import annotations

import math

import numpy as np

_MASK = 0xFFFF_FFFF


def distribution(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """Return the probabilities from which a token is drawn: temperature, then top_k, then top_p of what is left."""
    scaled = (logits.astype(np.float64) - logits.max()) / temperature
    weights = np.exp(scaled)
    order = sorted(range(len(weights)), key=lambda token: (-weights[token], token))
    if top_k > 0:
        order = order[:top_k]
    total = sum(weights[token] for token in order)
    kept: list[int] = []
    cumulative = 0.0
    for token in order:
        if kept and cumulative >= top_p * total and top_p < 1:
            break
        kept.append(token)
        cumulative += weights[token]
    probabilities = np.zeros(len(weights))
    for token in kept:
        probabilities[token] = weights[token] / cumulative
    return probabilities


def choose(probabilities: np.ndarray, chance: float) -> int:
    """Return the token at which the distribution function, in id order, passes `chance`."""
    cumulative, last = 0.0, 0
    for token, probability in enumerate(probabilities):
        if probability > 0:
            last = token
            cumulative += probability
            if cumulative > chance:
                return token
    return last


def logprobs(logits: np.ndarray, token: int, num_top: int) -> tuple[float, int, list[tuple[int, float]]]:
    """Return the chosen token's log-probability and rank, and the `num_top` most likely tokens with theirs."""
    values = logits.astype(np.float64)
    shifted = values - values.max()
    result = shifted - math.log(np.exp(shifted).sum())
    order = sorted(range(len(result)), key=lambda other: (-result[other], other))
    rank = sum(1 for value in values if value >= values[token])
    return float(result[token]), rank, [(other, float(result[other])) for other in order[:num_top]]


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Return Philox 4x32-10 of one counter and key, in plain integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        first, second = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (second >> 32) ^ c1 ^ k0, second & _MASK, (first >> 32) ^ c3 ^ k1, first & _MASK
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3
