"""Quality from log-probabilities: perplexity, how often two runs agree on the likeliest token, how far apart they are.

Not a model and no text: pure arithmetic over what a run said of each place. Units: nats a token; shares are fractions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ...runtime.messages import LogprobEntry


@dataclass(frozen=True)
class Place:
    """What a run said before one token of a text.

    Attributes:
        logprob: of the token that stands there.
        likely: token -> log-probability of the likeliest ones, the likeliest first.
    """

    logprob: float
    likely: dict[int, float]


@dataclass(frozen=True)
class Agreement:
    """How near one run is to a reference over the same places.

    Attributes:
        top1: share of places where both find the same token likeliest.
        kl: mean of a lower bound of KL(reference || other), nats a token; see `divergence`.
        num_places: how many.
    """

    top1: float
    kl: float
    num_places: int


def place_of(candidates: Sequence[LogprobEntry]) -> Place | None:
    """Return what `candidates`, the token itself first, say of a place; None for the first of a text."""
    if not candidates:
        return None
    by_rank = sorted(candidates, key=lambda entry: (entry.rank, entry.token_id))
    return Place(candidates[0].logprob, {entry.token_id: entry.logprob for entry in by_rank})


def perplexity(places: Sequence[Place]) -> float:
    """Return exp of the mean negative log-probability of the tokens; `inf` where one cannot be at all."""
    loss = -math.fsum(place.logprob for place in places) / len(places)
    return math.exp(loss) if loss < 700 else math.inf  # exp of more is no double


def agreement(reference: Sequence[Place], other: Sequence[Place]) -> Agreement:
    """Return how near `other` is to `reference`, place by place."""
    pairs = list(zip(reference, other, strict=True))
    same = sum(next(iter(one.likely)) == next(iter(two.likely)) for one, two in pairs)
    kl = math.fsum(divergence(one.likely, two.likely) for one, two in pairs)
    return Agreement(top1=same / len(pairs), kl=kl / len(pairs), num_places=len(pairs))


def divergence(reference: dict[int, float], other: dict[int, float]) -> float:
    """Return a lower bound of KL(reference || other) from the likeliest tokens of both, in nats.

    Tokens that both name count one by one, all others as one: taking events together never makes the divergence of two
    distributions greater (data processing inequality; Cover and Thomas, Elements of Information Theory, 2.8).

    Args:
        reference, other: token -> log-probability of the likeliest tokens.
    """
    named = reference.keys() & other.keys()
    p_rest = max(0.0, 1 - math.fsum(math.exp(reference[token]) for token in named))
    q_rest = max(0.0, 1 - math.fsum(math.exp(other[token]) for token in named))
    total = math.fsum(math.exp(reference[token]) * (reference[token] - other[token]) for token in named)
    if p_rest > 0:
        total += p_rest * (math.log(p_rest) - math.log(max(q_rest, 1e-12)))
    return max(0.0, total)  # rounding may leave the least bit below 0
