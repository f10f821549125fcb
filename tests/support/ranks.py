"""Runs the ranks of one group as threads of the test, and ends all of them when one fails.

Not the runtime's launcher: no processes, no plans. Ranks are numbered from 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from moewe.moe.wide_ep import Exchange, LocalExchange, ThreadHub
from tests.support.rank_calls import call_ranks

Result = TypeVar("Result")


def run_ranks(slot_ranges: Sequence[tuple[int, int]], work: Callable[[int, Exchange], Result]) -> list[Result]:
    """Call `work(rank, exchange)` for all ranks at once; return the results, or raise the first failure.

    One rank gets a `LocalExchange`, several meet in a `ThreadHub`.
    """
    if len(slot_ranges) == 1:
        return [work(0, LocalExchange(slot_ranges[0][1]))]
    return run_threads(ThreadHub(slot_ranges, timeout_s=60), work)


def run_threads(hub: ThreadHub, work: Callable[[int, Exchange], Result]) -> list[Result]:
    """As `run_ranks`, always through `hub`."""
    return call_ranks(hub.num_ranks, lambda rank: work(rank, hub.rank(rank)), hub.abort)
