"""What share of a rank's time each part of its steps takes, from the file of a step trace.

Not the recording. The file comes from a server that is not trusted: what is no trace is an error.
Units: milliseconds a step; shares are of a rank's steps and its waiting for plans together.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table

from ...runtime.step_recorder import ENGINE_PARTS
from .chrome import CATEGORIES, ENGINE, PART_NAMES, STEP, WAIT_FOR_PLAN

ROWS = (*PART_NAMES.values(), WAIT_FOR_PLAN)
MOST_COLUMNS = 4  # ranks that have a column of their own
MOST_ENGINES = 16  # that have a line

Thread = tuple[int, int]


@dataclass
class RankShares:
    """One rank: how many steps, and milliseconds of all of them together, by part."""

    name: str
    num_steps: int = 0
    step_ms: float = 0.0
    parts: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    @property
    def total_ms(self) -> float:
        """Steps, and waiting for plans between them."""
        return self.step_ms + self.parts.get(WAIT_FOR_PLAN, 0.0)

    def per_step(self, part: str) -> float:
        """Return the milliseconds of `part` in a step, on average."""
        return self.parts.get(part, 0.0) / max(1, self.num_steps)

    def share(self, part: str) -> float:
        """Return what of the whole `part` takes, from 0 to 1."""
        return self.parts.get(part, 0.0) / self.total_ms if self.total_ms else 0.0


@dataclass(frozen=True, kw_only=True)
class Shares:
    """All that is read from a file.

    Attributes:
        ranks: by replica and rank, those that recorded a step.
        engines: milliseconds a step by part, of each replica.
        steps_asked: how many each replica should record.
        steps: how many each did.
        ended_early: why that is less; empty when it is not.
    """

    ranks: Sequence[RankShares]
    engines: Mapping[int, Mapping[str, float]]
    steps_asked: int
    steps: Sequence[int]
    ended_early: str


def read_shares(data: bytes) -> Shares:
    """Return what the file of a trace says.

    Raises:
        ValueError: it is no trace of ours.
    """
    try:
        document = json.loads(data)
        about, events = document["otherData"], document["traceEvents"]
        asked, steps, ended = about["steps_asked"], about["steps"], about["ended_early"]
        fine = isinstance(events, list) and _is_count(asked) and all(map(_is_count, steps)) and isinstance(ended, str)
        ranks: dict[Thread, RankShares] = {}
        engines: dict[int, dict[str, float]] = {}
        for event in events if fine else ():
            if event["ph"] == "X":
                _book(event, ranks, engines)
    except (ValueError, KeyError, TypeError, ArithmeticError, RecursionError) as error:
        raise ValueError(
            f"the answer is no step trace ({type(error).__name__}: {printable(str(error))[:80]})"
        ) from None
    if not fine:
        raise ValueError("the answer is no step trace: its facts are not as they should be")
    for replica, own in engines.items():
        count = steps[replica] if replica < len(steps) else 0
        engines[replica] = {part: total / max(1, count) for part, total in own.items()}
    return Shares(
        ranks=[ranks[thread] for thread in sorted(ranks)],
        engines=dict(sorted(engines.items())),
        steps_asked=asked,
        steps=tuple(steps),
        ended_early=printable(ended),
    )


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _book(event: Mapping[str, Any], ranks: dict[Thread, RankShares], engines: dict[int, dict[str, float]]) -> None:
    """Add one event to what it belongs to."""
    thread, category, name = (event["pid"], event["tid"]), event["cat"], event["name"]
    if not all(map(_is_count, thread)) or category not in CATEGORIES:
        raise ValueError("an event of no rank, or of no category")
    ms = float(event["dur"]) / 1000
    if not 0 <= ms < math.inf:
        raise ValueError(f"an event of {ms} ms")
    if name not in (*ENGINE_PARTS, *ROWS) and category != STEP:
        raise ValueError("an event of no part")
    if category == ENGINE:
        own = engines.setdefault(thread[0], {})
        own[name] = own.get(name, 0.0) + ms
        return
    rank = ranks.setdefault(thread, RankShares(f"{thread[0]}.{thread[1] - 1}"))
    if category == STEP:
        rank.num_steps += 1
        rank.step_ms += ms
    else:
        rank.parts[name] += ms


def shares_table(shares: Shares) -> Table:
    """Return the table: a row a part, a column a rank; of many ranks the mean, the least and the most."""
    ranks = shares.ranks
    table = Table(box=None)
    table.add_column("ms a step, share")
    few = len(ranks) <= MOST_COLUMNS
    for head in [f"rank {rank.name}" for rank in ranks] if few else ["mean", "least", "most"]:
        table.add_column(head, justify="right")
    for part in ROWS:
        if not any(rank.parts.get(part) for rank in ranks):
            continue
        cells = [_cell(rank.per_step(part), rank.share(part)) for rank in ranks]
        table.add_row(part, *(cells if few else _of_many(part, ranks)))
    whole = [rank.total_ms / max(1, rank.num_steps) for rank in ranks]
    if not few:
        whole = [sum(whole) / len(whole), min(whole), max(whole)]
    table.add_row("all", *(_cell(ms, 1.0) for ms in whole))
    return table


def _cell(ms: float, share: float) -> str:
    return f"{ms:.3f} {share:4.0%}"


def _of_many(part: str, ranks: Sequence[RankShares]) -> list[str]:
    """Return mean, least and most of a part over ranks, the last two with their rank."""
    mean = _cell(
        sum(rank.per_step(part) for rank in ranks) / len(ranks), sum(rank.share(part) for rank in ranks) / len(ranks)
    )
    ends = [pick(ranks, key=lambda rank: rank.per_step(part)) for pick in (min, max)]
    return [mean, *(f"{_cell(rank.per_step(part), rank.share(part))} ({rank.name})" for rank in ends)]


def engine_lines(shares: Shares) -> list[str]:
    """Return a line for each engine: what it does in a step, on average."""
    return [
        f"engine {replica}: " + ", ".join(f"{part} {ms:.3f}" for part, ms in parts.items()) + " ms a step"
        for replica, parts in list(shares.engines.items())[:MOST_ENGINES]
    ]


def printable(text: str) -> str:
    """Return what a stranger wrote in one line, cut, and without what a terminal might obey."""
    return "".join(char if char.isprintable() else "?" for char in " ".join(text.split()))[:300]
