"""What a metric is: the record of which the table is made (runtime/metrics/table.py).

Not a value.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """One metric family.

    Attributes:
        name: as Prometheus shows it.
        kind: counter, gauge or histogram.
        labels: label names.
        unit: of its values.
        meaning: one sentence.
        when_high: what to do when it is high, or grows fast.
    """

    name: str
    kind: str
    labels: tuple[str, ...]
    unit: str
    meaning: str
    when_high: str
