"""Metrics of links as they were measured at the start: a part of the table (runtime/metrics/table.py), and its values.

Not the measuring (runtime/link_measuring.py) and not what travels (`moewe_exchange_bytes_total` counts that).
Units: seconds, bytes/s; ratios are fractions.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...topologies.exchange_cost import BETWEEN, WITHIN, MeasuredLinks
from .metric import Metric

_EXCHANGE = ("replica", "exchange")

LINK_METRICS: tuple[Metric, ...] = (
    Metric(
        "moewe_exchange_fixed_seconds", "gauge", _EXCHANGE, "seconds",
        "What dispatch and combine of a MoE layer together take however few rows there are, by `exchange`: its "
        "collectives, waiting and work of the host, as all ranks measured at start.",
        "Decode steps pay it in every layer: fewer ranks in a group, `shm` on one host, a faster network.",
    ),
    Metric(
        "moewe_exchange_bandwidth_bytes_per_second", "gauge", (*_EXCHANGE, "scope"), "bytes/second",
        "Bytes that a rank sends, over the time that they add to that, inside its `domain` or `between` domains.",
        "Nothing. Far below what the network is made for: the host's work beside it binds, give ranks more cores.",
    ),
    Metric(
        "moewe_exchange_hidden_ratio", "gauge", _EXCHANGE, "ratio",
        "Part of an exchange in which the rank can compute, by what halves in turns gained at start; 0 where nobody "
        "tried (no rows on links, `--overlap` on or off).",
        "Nothing: near 1 the link does the work, and `--overlap auto` takes halves from fewer rows on.",
    ),
)  # fmt: skip


def link_samples(replica: str, links: MeasuredLinks) -> Iterator[tuple[str, tuple[str, ...], float]]:
    """Yield (name, label values, value) of every metric above."""
    for cost in links.exchanges:
        yield "moewe_exchange_fixed_seconds", (replica, cost.name), cost.fixed_s
        yield "moewe_exchange_hidden_ratio", (replica, cost.name), cost.hidden
        for scope, kind in (("domain", WITHIN), ("between", BETWEEN)):
            if (bandwidth := cost.bandwidth(kind)) is not None:
                yield "moewe_exchange_bandwidth_bytes_per_second", (replica, cost.name, scope), bandwidth
