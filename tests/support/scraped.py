"""The figures of /metrics as tests compare them: summed over replicas and ranks.

Not the metrics (runtime/metrics/export.py). Units: as each metric says.
"""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families


def sums(text: str, *kept: str) -> dict[str, float]:
    """Return the values of a page, summed over all labels but those `kept`, whose values stand after the name.

    Example:
        >>> sums('a_total{reason="stop",rank="0"} 1.0\\na_total{reason="stop",rank="1"} 2.0\\n', "reason")
        {'a_total|stop': 3.0}
    """
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = "|".join([sample.name, *(sample.labels[label] for label in kept if label in sample.labels)])
            values[name] = values.get(name, 0.0) + sample.value
    return values
