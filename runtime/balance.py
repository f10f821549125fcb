"""Which replica takes the next request: the one with the least outstanding token work. Pure.

Not a scheduler (that plans within a replica). Units: tokens still to be run, prompt and expected output alike.
"""

from __future__ import annotations

from collections.abc import Sequence

from .params import EXPECTED_OUTPUT_TOKENS, SamplingParams


def token_work(num_prompt_tokens: int, params: SamplingParams) -> int:
    """Return the tokens that a new request is expected to run."""
    expected = EXPECTED_OUTPUT_TOKENS if params.max_tokens is None else params.max_tokens
    if not params.ignore_eos:
        expected = min(expected, EXPECTED_OUTPUT_TOKENS)
    return num_prompt_tokens + expected


def least_loaded(outstanding: Sequence[int], alive: Sequence[bool]) -> int:
    """Return the living replica with the least outstanding work, the first of equals; -1 when none lives.

    Example:
        >>> least_loaded([30, 10, 10], [True, True, True])
        1
    """
    living = [replica for replica, lives in enumerate(alive) if lives]
    return min(living, key=lambda replica: outstanding[replica], default=-1)
