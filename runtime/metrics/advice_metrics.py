"""Metrics of the advisor: a part of the table (runtime/metrics/table.py), and its values.

Not the advice (topologies/advisor/), whose layouts are in /v1/topology/advice and never labels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ...topologies.advisor.records import VERDICTS, Advice
from .metric import Metric

ADVICE_METRICS: tuple[Metric, ...] = (
    Metric(
        "moewe_advice", "gauge", ("verdict",), "1",
        f"1 for what the advisor says of the layout: {', '.join(VERDICTS)}.",
        "`change`: see /v1/topology/advice for the layout and why, and `moewe apply`.",
    ),
    Metric(
        "moewe_advice_windows_total", "counter", ("verdict",), "windows",
        "Windows after which the advisor said so.",
        "Nothing.",
    ),
    Metric(
        "moewe_advice_gain_ratio", "gauge", (), "ratio",
        "Tokens/s expected of the best layout over those of the one that runs, less 1.",
        "Above 0.1 for three windows it is advised.",
    ),
    Metric(
        "moewe_advice_model_error_ratio", "gauge", (), "ratio",
        "Step time predicted from figures of the start alone, over what was observed, less 1; advice is scaled by it.",
        "Far from 0: the machine is not as it was when it was measured, or kernels are far from its ceilings.",
    ),
    Metric(
        "moewe_topology_changes_total", "counter", ("outcome",), "changes",
        "Changes of the layout while serving: `done`, or `failed`, where the old layout went on.",
        "`failed`: the log says why.",
    ),
)  # fmt: skip
OUTCOMES = ("done", "failed")


class AdviceMetrics:
    """The latest advice, and how often which was given."""

    def __init__(self) -> None:
        self._latest: Advice | None = None
        self._verdicts: Counter[str] = Counter()
        self.changes: Counter[str] = Counter()

    def observe(self, advice: Advice) -> None:
        """Take the advice after a window."""
        self._latest = advice
        self._verdicts[advice.verdict] += 1

    def samples(self) -> Iterator[tuple[str, tuple[str, ...], float]]:
        """Yield (name, label values, value) of every metric above, once there was an advice or a change."""
        if self.changes or self._latest is not None:
            for outcome in OUTCOMES:
                yield "moewe_topology_changes_total", (outcome,), self.changes[outcome]
        if self._latest is None:
            return
        for verdict in VERDICTS:
            yield "moewe_advice", (verdict,), float(verdict == self._latest.verdict)
            yield "moewe_advice_windows_total", (verdict,), self._verdicts[verdict]
        yield "moewe_advice_gain_ratio", (), self._latest.gain
        if self._latest.calibration is not None:
            yield "moewe_advice_model_error_ratio", (), self._latest.calibration.error
