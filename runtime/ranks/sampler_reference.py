"""The sampler again, slow and plain: one row at a time in float64, with loops.

Not used by a worker: the specification with which tests compare.
Shapes: logits [V]; distributions [V] f64 that sum to 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

_MASK = 0xFFFF_FFFF


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What one sequence does to its logits.

    Attributes:
        prompt, output: its tokens so far.
        logit_bias, presence_penalty, frequency_penalty, repetition_penalty: as in `SamplingParams`.
        bad_words: token sequences that are not output.
        ends, min_tokens: tokens that do not come before so many were output.
        allowed: tokens that a mask leaves; None for all.
    """

    prompt: Sequence[int] = ()
    output: Sequence[int] = ()
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    bad_words: Sequence[Sequence[int]] = ()
    ends: Sequence[int] = ()
    min_tokens: int = 0
    allowed: frozenset[int] | None = None


def scores(logits: np.ndarray, wishes: Wishes) -> np.ndarray:
    """Return what a token is chosen from, [V] f64: bias, penalties, then -inf for what may not come."""
    result = [float(value) for value in logits]
    output = list(wishes.output)
    for token, value in wishes.logit_bias.items():
        result[token] += value
    for token in {*wishes.prompt, *output}:
        result[token] *= wishes.repetition_penalty if result[token] < 0 else 1 / wishes.repetition_penalty
    for token in set(output):
        result[token] -= wishes.frequency_penalty * output.count(token) + wishes.presence_penalty
    if wishes.allowed is not None:
        result = [value if token in wishes.allowed else -math.inf for token, value in enumerate(result)]
    banned = set(wishes.ends) if len(output) < wishes.min_tokens else set()
    for word in wishes.bad_words:
        begin = list(word[:-1])
        if len(begin) <= len(output) and output[len(output) - len(begin) :] == begin:
            banned.add(word[-1])
    left = [-math.inf if token in banned else value for token, value in enumerate(result)]
    return np.array(left if max(left) > -math.inf else result)


def keep(tokens: Sequence[int], length: int, max_length: int, ends: Sequence[int]) -> tuple[int, str]:
    """Return how many of the tokens of a step a sequence keeps, and `stop`, `length` or nothing for why it ends."""
    for number, token in enumerate(tokens):
        if length + number >= max_length:
            return number, "length"
        if token in ends:
            return number + 1, "stop"
    return len(tokens), "length" if length + len(tokens) >= max_length else ""


def distribution(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float = 0.0) -> np.ndarray:
    """Return the probabilities from which a token is drawn: temperature, min_p, top_k, then top_p of what is left."""
    scaled = (logits.astype(np.float64) - logits.max()) / temperature
    weights = np.exp(scaled)
    order = sorted(range(len(weights)), key=lambda token: (-weights[token], token))
    order = [token for token in order if weights[token] >= min_p]
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
