"""What an exchange over links does, cut where it would wait for others: there somebody else can go on.

Not a thread and not a clock: a stage begins what travels and says what that is, the next one waits for it. How many
stages there are, and of which kind, is the same on every rank whatever rows it has, so ranks that take the stages of
several exchanges in the same turns begin the collectives of a link in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

COUNTS, ROWS, ANSWERS = "counts", "rows", "answers"

Result = TypeVar("Result")
# Says what travels after each stage.
Stages = Generator[str, None, Result]


def finish(stages: Stages[Result]) -> Result:
    """Take all stages one after another, waiting at the end of each, and return the result."""
    while True:
        try:
            next(stages)
        except StopIteration as end:
            result: Result = end.value
            return result


def in_turns(flows: Sequence[Stages[Result]], meanwhile: Callable[[str], None]) -> list[Result]:
    """Take a stage of each flow, then the next of each, up to the last; return their results.

    While the rows of one flow travel, the stages of the others run.

    Args:
        flows: with the same stages each.
        meanwhile: called after each turn, with what all of them wait for.
    """
    results: list[Result] = []
    while True:
        travelling = ""
        for flow in flows:
            try:
                travelling = next(flow)
            except StopIteration as end:
                results.append(end.value)
        if results:
            assert len(results) == len(flows), "flows with different stages"
            return results
        meanwhile(travelling)
