"""Metrics of experts that move while serving: a part of the table (runtime/metrics/table.py).

Not the values (runtime/metrics/ranks.py exports them, runtime/rebalancing/balancer.py counts). Units: seconds, experts.
"""

from __future__ import annotations

from .metric import Metric

BALANCE_METRICS: tuple[Metric, ...] = (
    Metric(
        "moewe_balance_rounds_total", "counter", ("replica", "outcome"), "rounds",
        "Rounds of `--eplb auto` by `outcome`: `moved`, `taken_back` (undid others), `failed` (nobody switched).",
        "`failed`: read the log; the checkpoint cannot be read, or was written to. `taken_back`: load that does not "
        "stay; `--eplb off` loses nothing.",
    ),
    Metric(
        "moewe_balance_moves_total", "counter", ("replica",), "experts",
        "Experts of a layer that were moved.",
        "Compare with the gain.",
    ),
    Metric(
        "moewe_balance_move_seconds_total", "counter", ("replica",), "seconds",
        "Time of reading experts that are to move, beside steps, of the slowest rank of each round.",
        "A slow disk: keep the checkpoint in memory or on a faster one.",
    ),
    Metric(
        "moewe_balance_gain_seconds", "gauge", ("replica", "kind"), "seconds",
        "Step time saved by moves so far (negative: they did harm): by the model of step time, `predicted` when "
        "deciding and `realised` on the rows that came; `clocked`, steps against like ones before the first move.",
        "`predicted` far above `realised`: the load changes faster than it is followed. `clocked` far below "
        "`realised`: the model is wrong here, or steps got longer for other reasons (contexts, neighbours).",
    ),
)  # fmt: skip
