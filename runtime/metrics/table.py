"""The table of all metrics: what each is called, what it counts and in which unit. docs/metrics.md is made from it.

Not the values (runtime/metrics/export.py). Names follow Prometheus: base units, `moewe_` in front, counters with
`_total` at the end.
Labels are bounded: replicas, ranks, phases, components, scopes, exchanges, kinds, formats and verdicts; never layers,
experts or layouts.
"""

from __future__ import annotations

from .advice_metrics import ADVICE_METRICS
from .balance_metrics import BALANCE_METRICS
from .cost import COST_METRICS
from .link_metrics import LINK_METRICS
from .metric import Metric
from .rank_metrics import RANK_METRICS
from .request_metrics import REQUEST_METRICS

METRICS: tuple[Metric, ...] = (
    *REQUEST_METRICS, *COST_METRICS, *RANK_METRICS, *LINK_METRICS, *BALANCE_METRICS, *ADVICE_METRICS,
)  # fmt: skip
BY_NAME = {metric.name: metric for metric in METRICS}


def markdown_table() -> str:
    """Return the table of docs/metrics.md."""
    rows = [
        "| name | type | labels | unit | meaning | when it is high |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for metric in METRICS:
        labels = ", ".join(f"`{label}`" for label in metric.labels) or "-"
        cells = (f"`{metric.name}`", metric.kind, labels, metric.unit, metric.meaning, metric.when_high)
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"
