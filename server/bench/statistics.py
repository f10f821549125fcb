"""From records to figures: latencies, rates, goodput, concurrency, reasons of failure.

Not measuring and not printing (server/bench/report.py). Key names are those of vLLM's result files where they mean
the same. Units: records in seconds; results in ms, tokens/s and requests/s, as the key says.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from .records import RequestRecord

LATENCIES = {"ttft": "time to first token", "tpot": "time per output token", "itl": "inter-token latency",
             "e2el": "end to end"}  # fmt: skip
POINTS = (("mean", None), ("median", 50.0), ("p95", 95.0), ("p99", 99.0))
GOALS = ("ttft", "tpot", "e2el")


def summary(values: Iterable[float]) -> dict[str, float]:
    """Return mean, median, p95 and p99, interpolated between neighbours; nothing when there are no values."""
    data = np.fromiter(values, dtype=np.float64)
    if not data.size:
        return {}
    return {name: float(data.mean() if q is None else np.percentile(data, q)) for name, q in POINTS}


def latencies(records: Sequence[RequestRecord]) -> dict[str, list[float]]:
    """Return every measured value of the requests that succeeded, in seconds, by name of LATENCIES."""
    good = [record for record in records if record.error is None]
    return {
        "ttft": [record.ttft for record in good if record.ttft is not None],
        "tpot": [record.tpot for record in good if record.tpot is not None],
        "itl": [gap for record in good for gap in record.gaps],
        "e2el": [record.e2el for record in good],
    }


def parse_goals(words: Iterable[str]) -> dict[str, float]:
    """Return the limits in ms that words such as `ttft:200` name.

    Raises:
        ValueError: a word that names no latency, or no time.
    """
    goals: dict[str, float] = {}
    for word in (part for text in words for part in text.replace(",", " ").split()):
        name, _, limit = word.partition(":")
        try:
            value = float(limit)
        except ValueError:
            value = math.nan
        if name not in GOALS or not value > 0:
            raise ValueError(f"--goodput {word!r} is not a target; write {', '.join(f'{g}:MS' for g in GOALS)}")
        if name in goals:
            raise ValueError(f"--goodput names {name} twice; leave one out")
        goals[name] = value
    return goals


def meets(record: RequestRecord, goals: Mapping[str, float]) -> bool:
    """Return whether a request succeeded within all limits; an answer of one token has no TPOT to exceed."""
    if record.error is not None:
        return False
    for name, limit in goals.items():
        value = getattr(record, name)
        if value is None and (name != "tpot" or record.first is None):
            return False
        if value is not None and value * 1000 > limit:
            return False
    return True


def peak_concurrency(records: Sequence[RequestRecord]) -> int:
    """Return how many requests ran at one time at most; one that ends as another starts does not overlap it."""
    events = sorted([(r.started, 1) for r in records] + [(r.ended, -1) for r in records])
    peak = running = 0
    for _, change in events:
        running += change
        peak = max(peak, running)
    return peak


def results(records: Sequence[RequestRecord], duration: float, goals: Mapping[str, float]) -> dict[str, Any]:
    """Return all figures of a run.

    Args:
        records: of every request that ended.
        duration: seconds from the first request to the end of the last.
        goals: limits in ms, see `parse_goals`; empty leaves goodput out.
    """
    good = [record for record in records if record.error is None]
    prompt, output = sum(r.prompt_tokens for r in good), sum(r.output_tokens for r in good)
    pieces = sum(record.pieces for record in good)

    def rate(count: float) -> float:
        return count / duration if duration > 0 else 0.0

    made: dict[str, Any] = {
        "duration": duration,
        "completed": len(good),
        "failed": len(records) - len(good),
        "total_input_tokens": prompt,
        "total_output_tokens": output,
        "request_throughput": rate(len(good)),
        "output_throughput": rate(output),
        "total_token_throughput": rate(prompt + output),
        "max_concurrent_requests": peak_concurrency(records),
        "tokens_per_piece": output / pieces if pieces else None,
        "tokens_counted_by_server": all(record.counted for record in good),
    }
    if goals:
        made["request_goodput"] = rate(sum(meets(record, goals) for record in good))
    for name, values in latencies(records).items():
        made |= {f"{point}_{name}_ms": 1000 * value for point, value in summary(values).items()}
    return made


def reasons(records: Sequence[RequestRecord]) -> dict[str, int]:
    """Return why requests failed and how many for each reason, commonest first."""
    return dict(Counter(record.error for record in records if record.error is not None).most_common())
