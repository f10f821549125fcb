"""Calls a function for all ranks at once, each on a thread, and ends all of them when one fails.

Not a group (ranks.py): what joins the ranks is the caller's affair.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


def call_ranks(num_ranks: int, work: Callable[[int], Result], abort: Callable[[str], None]) -> list[Result]:
    """Call `work(rank)` for all ranks; return the results, or raise the first failure after `abort(reason)`."""
    results: dict[int, Result] = {}
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except BaseException as failure:
            failures.append(failure)
            abort(f"rank {rank}: {failure}")

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return [results[rank] for rank in range(num_ranks)]
