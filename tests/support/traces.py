"""What holds for every file of a step trace: its form, and that parts fill their steps and nothing overlaps.

Not figures. Units: microseconds in files, nanoseconds here.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from moewe.server.trace.chrome import CATEGORIES, PART_NAMES, WAIT_FOR_PLAN

Span = tuple[int, int]


def check_trace(document: dict[str, Any], num_ranks: Sequence[int], num_steps: Sequence[int]) -> None:
    """Raise AssertionError unless `document` is a sound trace.

    Args:
        document: the file.
        num_ranks, num_steps: of each replica.
    """
    events = document["traceEvents"]
    assert all(type(event["pid"]) is int and type(event["tid"]) is int for event in events)
    assert {event["ph"] for event in events} <= {"X", "M"}
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["cat"] for event in spans} <= set(CATEGORIES)
    for replica, (ranks, steps) in enumerate(zip(num_ranks, num_steps, strict=True)):
        numbers = set()
        for rank in range(ranks):
            own = [event for event in spans if (event["pid"], event["tid"]) == (replica, 1 + rank)]
            numbers.add(tuple(_check_rank(own)))
        assert len(numbers) == 1, "ranks recorded other steps"
        (recorded,) = numbers
        assert len(recorded) == steps and list(recorded) == list(range(recorded[0], recorded[0] + steps))
        engine = sorted(_span(event) for event in spans if (event["pid"], event["tid"]) == (replica, 0))
        assert all(before[1] <= after[0] for before, after in pairwise(engine))
    known = {(replica, thread) for replica, ranks in enumerate(num_ranks) for thread in range(1 + ranks)}
    assert {(event["pid"], event["tid"]) for event in spans} <= known


def _check_rank(events: list[dict[str, Any]]) -> list[int]:
    """Check one rank and return its steps, in order."""
    steps = [event for event in events if event["cat"] == "step"]
    apart = sorted(_span(event) for event in events if event["cat"] == "step" or event["name"] == WAIT_FOR_PLAN)
    assert all(before[1] <= after[0] for before, after in pairwise(apart)), "steps overlap"
    for step in steps:
        number = step["args"]["step"]
        parts = [one for one in events if one["name"] in PART_NAMES.values() and one["args"]["step"] == number]
        spans = [_span(part) for part in parts]
        begin, end = _span(step)
        assert spans[0][0] == begin and spans[-1][1] == end
        assert all(before[1] == after[0] for before, after in pairwise(spans)), "parts leave gaps or overlap"
        assert sum(last - first for first, last in spans) == end - begin
        assert step["args"]["rows"] >= 0 and step["args"]["phase"]
    return [step["args"]["step"] for step in steps]


def _span(event: dict[str, Any]) -> Span:
    begin, length = round(event["ts"] * 1000), round(event["dur"] * 1000)
    assert begin >= 0 and length >= 0
    return begin, begin + length
