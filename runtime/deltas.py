"""From what a worker computed to what a client is told: log-probabilities with texts, and seeds for those without one.

Not text of a request (runtime/text_output.py) and not sampling (runtime/ranks/sampler.py). Pure functions.
Units: natural logarithms; ranks count from 1.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from .messages import LogprobEntry
from .plan import PromptLogprobs, TokenLogprobs, unpack
from .seeds import GOLDEN, MASK, mix

TokenText = Callable[[int], str]


def logprob_entries(found: TokenLogprobs, token_text: TokenText | None) -> tuple[LogprobEntry, ...]:
    """Return the chosen token first, then the most likely ones in order, the chosen one not twice."""
    chosen = found.token_ids[0]
    entries = [(chosen, found.logprobs[0], found.rank)]
    for place, (token_id, logprob) in enumerate(zip(found.token_ids[1:], found.logprobs[1:]), start=1):
        if token_id != chosen:
            entries.append((token_id, logprob, place))
    return tuple(
        LogprobEntry(
            token_id=token_id,
            logprob=logprob,
            rank=rank,
            decoded_token=token_text(token_id) if token_text is not None else None,
        )
        for token_id, logprob, rank in entries
    )


def prompt_entries(found: PromptLogprobs, token_text: TokenText | None) -> list[tuple[LogprobEntry, ...]]:
    """Return the entries of each place, in order, as `logprob_entries` does."""
    ranks = unpack(found.ranks).tolist()
    ids = unpack(found.token_ids).reshape(len(ranks), -1).tolist()
    logprobs = unpack(found.logprobs, "<f4").reshape(len(ranks), -1).tolist()
    return [
        logprob_entries(
            TokenLogprobs(sequence_id=found.sequence_id, token_ids=tuple(own), logprobs=tuple(values), rank=rank),
            token_text,
        )
        for own, values, rank in zip(ids, logprobs, ranks, strict=True)
    ]


def seed_sequence(*key: int) -> Callable[[], int]:
    """Return a function that gives a new 63-bit seed at each call; equal keys give equal sequences."""
    base = 0
    for part in key:
        base = mix(base ^ (part & MASK))
    count = itertools.count()
    return lambda: mix((base + GOLDEN * (next(count) + 1)) & MASK) >> 1
