"""One reading of a server: its /metrics as numbers by name and labels, and its /v1/topology.

Not figures (server/top/figures.py). What a server answers is not trusted: too much, or what is no metrics, is an error
of that server only. Units: bytes, seconds of the monotonic clock.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from ...text.one_line import one_line
from ..client.asking import NoAnswerError, ask

TIMEOUT_S = 5.0
MOST_BYTES = 16 << 20

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What a server said at one moment.

    Attributes:
        taken: when, in seconds of the monotonic clock.
        samples: metric -> labels, sorted by name -> value.
        topology: the answer of /v1/topology; empty where there is none.
        advice: the same of /v1/topology/advice.
    """

    taken: float
    samples: Mapping[str, Mapping[Labels, float]]
    topology: Mapping[str, Any] = field(default_factory=dict)
    advice: Mapping[str, Any] = field(default_factory=dict)

    def value(self, name: str, **labels: str) -> float | None:
        """Return the sum of the samples of `name` that have these labels, or None where there are none."""
        wanted = labels.items()
        found = [value for have, value in self.samples.get(name, {}).items() if wanted <= dict(have).items()]
        return sum(found) if found else None

    def by(self, name: str, *labels: str) -> dict[tuple[str, ...], float]:
        """Return the sums of `name` for each combination of the values of `labels`."""
        sums: dict[tuple[str, ...], float] = {}
        for have, value in self.samples.get(name, {}).items():
            key = tuple(dict(have).get(label, "") for label in labels)
            sums[key] = sums.get(key, 0.0) + value
        return sums


def parse_metrics(text: str) -> dict[str, dict[Labels, float]]:
    """Return the samples of a text in Prometheus' format.

    Raises:
        ValueError: it is no such text.
    """
    samples: dict[str, dict[Labels, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return samples


def read_server(root: str, headers: Mapping[str, str]) -> Reading:
    """Return a reading of the server at `root` (without /v1).

    Raises:
        NoAnswerError: it did not answer, or not like a server of ours.
    """
    taken = time.monotonic()
    try:
        samples = parse_metrics(_get(f"{root}/metrics", headers).decode())
    except ValueError as error:
        raise NoAnswerError(f"{root}/metrics is no metrics: {_line(error)}") from None
    if "moewe_info" not in samples:
        raise NoAnswerError(f"{root}/metrics has no moewe_info: is that a moewe server?")
    return Reading(
        taken=taken,
        samples=samples,
        topology=_object(f"{root}/v1/topology", headers),
        advice=_object(f"{root}/v1/topology/advice", headers),
    )


def _object(url: str, headers: Mapping[str, str]) -> Mapping[str, Any]:
    """Return the JSON object at `url`; an empty one where there is none: the view does without."""
    try:
        answer = json.loads(_get(url, headers))
    except (NoAnswerError, ValueError, RecursionError):
        return {}
    return answer if isinstance(answer, dict) else {}


def _get(url: str, headers: Mapping[str, str]) -> bytes:
    return ask(url, headers, timeout=TIMEOUT_S, most_bytes=MOST_BYTES, line=_line)


def _line(error: object) -> str:
    return one_line(error)[:200]
