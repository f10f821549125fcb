"""The table of all metrics: what each is called, what it counts and in which unit. docs/metrics.md is made from it.

Not the values (runtime/metrics/export.py). Names follow Prometheus: base units, `moewe_` in front, counters with
`_total` at the end.
`phase` is the kind of a step over all ranks of its group, so a rank without rows counts the step too.
Labels are bounded: replicas, ranks, phases, components, scopes, kinds and formats; never layers or experts.
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
    """

    name: str
    kind: str
    labels: tuple[str, ...]
    unit: str
    meaning: str


_RANK = ("replica", "rank")
_PHASE = ("replica", "rank", "phase")

METRICS: tuple[Metric, ...] = (
    Metric("moewe_info", "gauge", ("version", "model", "topology"), "1", "Always 1; what runs here is in the labels."),
    Metric("moewe_ready", "gauge", (), "1", "1 while requests are taken, 0 while loading, draining or failed."),
    Metric(
        "moewe_requests_finished_total",
        "counter",
        ("reason",),
        "requests",
        "Accepted prompts that ended: `stop` (end token or stop string), `length`, `abort` (client gone), `error`.",
    ),
    Metric(
        "moewe_request_errors_total",
        "counter",
        ("status",),
        "responses",
        "Answers of the generating routes with an error status, refused requests included.",
    ),
    Metric("moewe_prompt_tokens_total", "counter", (), "tokens", "Prompt tokens of prompts that got a first token."),
    Metric("moewe_generation_tokens_total", "counter", (), "tokens", "Generated tokens, end tokens included."),
    Metric("moewe_time_to_first_token_seconds", "histogram", (), "seconds", "From submission to first token."),
    Metric(
        "moewe_time_per_output_token_seconds",
        "histogram",
        (),
        "seconds",
        "Per finished request: time from first to last token over the tokens after the first.",
    ),
    Metric(
        "moewe_inter_token_latency_seconds",
        "histogram",
        (),
        "seconds",
        "Per token after the first: time since the one before it.",
    ),
    Metric(
        "moewe_request_duration_seconds", "histogram", (), "seconds", "From submission to the end, however it ended."
    ),
    Metric("moewe_queue_time_seconds", "histogram", (), "seconds", "From submission to the first step."),
    Metric("moewe_requests_running", "gauge", ("replica",), "requests", "Requests that hold a slot and KV blocks."),
    Metric("moewe_requests_waiting", "gauge", ("replica",), "requests", "Requests in the queue."),
    Metric(
        "moewe_rank_requests_running",
        "gauge",
        _RANK,
        "requests",
        "Running requests of the rank, or of its attention replica.",
    ),
    Metric("moewe_preemptions_total", "counter", ("replica",), "preemptions", "Requests put back for lack of blocks."),
    Metric("moewe_kv_blocks_used", "gauge", _RANK, "blocks", "KV blocks that running requests hold."),
    Metric("moewe_kv_blocks", "gauge", _RANK, "blocks", "KV blocks there are."),
    Metric("moewe_kv_usage_ratio", "gauge", _RANK, "ratio", "Used over existing KV blocks."),
    Metric(
        "moewe_kv_bytes",
        "gauge",
        (*_RANK, "format"),
        "bytes",
        "The pool of KV blocks by number format, with its scales.",
    ),
    Metric("moewe_steps_total", "counter", _PHASE, "steps", "Steps by the kind of step."),
    Metric(
        "moewe_batch_tokens_total",
        "counter",
        _PHASE,
        "tokens",
        "Rows of such steps that were the rank's own; over `moewe_steps_total` it is the mean batch.",
    ),
    Metric(
        "moewe_busy_seconds_total",
        "counter",
        _PHASE,
        "seconds",
        "Time from first to last operation of steps, waiting for other ranks within them included.",
    ),
    Metric(
        "moewe_memory_bytes_total",
        "counter",
        (*_PHASE, "component"),
        "bytes",
        "Bytes touched: expert slots really hit, other weights, KV, activations; `exchange` is put on a link.",
    ),
    Metric(
        "moewe_memory_bandwidth_ceiling_bytes_per_second",
        "gauge",
        _RANK,
        "bytes/second",
        "Reading speed that all ranks of the replica reached together at start, over their number: the same for each.",
    ),
    Metric(
        "moewe_matrix_rate_ceiling_operations_per_second",
        "gauge",
        (*_RANK, "format"),
        "operations/second",
        "The same of matrix products in cache, by number `format`; a multiplication and an addition are two. Native "
        "kernels only.",
    ),
    Metric(
        "moewe_memory_saturation_ratio",
        "gauge",
        _PHASE,
        "ratio",
        "Bytes of weights and KV over busy time x ceiling, in the last one to two minutes; 0 when no such step ran.",
    ),
    Metric(
        "moewe_cache_resident",
        "gauge",
        _RANK,
        "1",
        "1 when the weights of all ranks of the replica together fit the host's last-level cache, or the ceiling was "
        "measured in a cache: the saturation ratio then says nothing about memory.",
    ),
    Metric("moewe_weight_bytes", "gauge", _RANK, "bytes", "Weights that the rank holds."),
    Metric(
        "moewe_weight_kind_bytes",
        "gauge",
        (*_RANK, "kind", "format"),
        "bytes",
        "The same by `kind` (attention, routed, shared, dense, embedding, head) and number `format`, scales included.",
    ),
    Metric(
        "moewe_peak_memory_bytes",
        "gauge",
        (),
        "bytes",
        "Host memory: sum of the largest resident sets of server, engines and ranks; shared pages count for each.",
    ),
    Metric(
        "moewe_exchange_bytes_total",
        "counter",
        (*_RANK, "scope"),
        "bytes",
        "Rows and answers that the rank sent by `scope`: `rank` (to itself), inside its `domain`, `between` domains.",
    ),
    Metric(
        "moewe_exchange_seconds_total",
        "counter",
        (*_RANK, "scope"),
        "seconds",
        "Time in collectives by the farthest scope they reach, waiting included; `rank`: work beside them. CPU only.",
    ),
    Metric("moewe_expert_tokens_total", "counter", _RANK, "tokens", "Rows that routed experts of the rank computed."),
    Metric(
        "moewe_expert_imbalance_ratio",
        "gauge",
        ("replica", "scope"),
        "ratio",
        "Busiest over mean `rank` or expert `slot`, averaged over MoE layers, in the last one to two minutes.",
    ),
    Metric(
        "moewe_unowned_expert_ids_total", "counter", _RANK, "ids", "Routed ids that no slot holds: always 0, or a bug."
    ),
)

BY_NAME = {metric.name: metric for metric in METRICS}


def markdown_table() -> str:
    """Return the table of docs/metrics.md."""
    rows = ["| name | type | labels | unit | meaning |", "| --- | --- | --- | --- | --- |"]
    for metric in METRICS:
        labels = ", ".join(f"`{label}`" for label in metric.labels) or "-"
        rows.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.unit} | {metric.meaning} |")
    return "\n".join(rows) + "\n"
