"""Our figures under the names that dashboards of vLLM and SGLang ask for: `--metrics-compat vllm|sglang`.

Not all of their metrics: those whose meaning we have exactly. vLLM's label `engine` is our replica; where we do not
count by replica it is 0. Nothing is invented. Units: seconds, tokens, requests; usage is a fraction.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from .table import BY_NAME

Samples = Mapping[str, Sequence[tuple[tuple[str, ...], float]]]  # our metric -> (label values, value)
Distribution = tuple[tuple[str, ...], list[tuple[str, float]], float]  # label values, buckets, sum
Histograms = Mapping[str, Sequence[Distribution]]  # by our metric


@dataclass(frozen=True)
class Alias:
    """One metric under a foreign name.

    Attributes:
        name: as dashboards know it.
        ours: our metric; of several ranks the values are added.
        over: our metric that it is divided by, if any.
        only: label values that count; all where empty.
        relabel: our label -> theirs, for labels that they have, too.
    """

    name: str
    ours: str
    over: str = ""
    only: Mapping[str, str] = field(default_factory=dict)
    relabel: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Style:
    """What one server calls its metrics.

    Attributes:
        aliases: its metrics that we have.
        replica_label: which of its labels is our replica.
        labels: further labels that it always has.
    """

    aliases: tuple[Alias, ...]
    replica_label: str
    labels: Mapping[str, str] = field(default_factory=dict)


STYLES: dict[str, Style] = {
    "vllm": Style(
        (
            Alias("vllm:num_requests_running", "moewe_requests_running"),
            Alias("vllm:num_requests_waiting", "moewe_requests_waiting"),
            Alias("vllm:kv_cache_usage_perc", "moewe_kv_blocks_used", over="moewe_kv_blocks"),
            Alias("vllm:num_preemptions_total", "moewe_preemptions_total"),
            Alias("vllm:prompt_tokens_total", "moewe_prompt_tokens_total"),
            Alias("vllm:generation_tokens_total", "moewe_generation_tokens_total"),
            Alias("vllm:request_success_total", "moewe_requests_finished_total", relabel={"reason": "finished_reason"}),
            Alias("vllm:time_to_first_token_seconds", "moewe_time_to_first_token_seconds"),
            Alias("vllm:inter_token_latency_seconds", "moewe_inter_token_latency_seconds"),
            Alias("vllm:request_time_per_output_token_seconds", "moewe_time_per_output_token_seconds"),
            Alias("vllm:e2e_request_latency_seconds", "moewe_request_duration_seconds"),
            Alias("vllm:request_queue_time_seconds", "moewe_queue_time_seconds"),
            Alias("vllm:request_prefill_time_seconds", "moewe_prefill_time_seconds"),
            Alias("vllm:request_decode_time_seconds", "moewe_decode_time_seconds"),
            Alias("vllm:request_prompt_tokens", "moewe_request_prompt_tokens"),
            Alias("vllm:request_generation_tokens", "moewe_request_generation_tokens"),
            Alias("vllm:iteration_tokens_total", "moewe_step_tokens"),
        ),
        replica_label="engine",
    ),
    "sglang": Style(
        (
            Alias("sglang:num_running_reqs", "moewe_requests_running"),
            Alias("sglang:num_queue_reqs", "moewe_requests_waiting"),
            Alias("sglang:token_usage", "moewe_kv_blocks_used", over="moewe_kv_blocks"),
            Alias("sglang:num_retracted_requests_total", "moewe_preemptions_total"),
            Alias("sglang:prompt_tokens_total", "moewe_prompt_tokens_total"),
            Alias("sglang:generation_tokens_total", "moewe_generation_tokens_total"),
            Alias("sglang:num_requests_total", "moewe_requests_finished_total"),
            Alias("sglang:num_aborted_requests_total", "moewe_requests_finished_total", only={"reason": "abort"}),
            Alias("sglang:time_to_first_token_seconds", "moewe_time_to_first_token_seconds"),
            Alias("sglang:inter_token_latency_seconds", "moewe_inter_token_latency_seconds"),
            Alias("sglang:e2e_request_latency_seconds", "moewe_request_duration_seconds"),
            Alias("sglang:queue_time_seconds", "moewe_queue_time_seconds"),
            Alias("sglang:prompt_tokens_histogram", "moewe_request_prompt_tokens"),
            Alias("sglang:generation_tokens_histogram", "moewe_request_generation_tokens"),
        ),
        replica_label="dp_rank",
        labels={"engine_type": "unified"},
    ),
}  # fmt: skip


def foreign_families(style: str, model: str, samples: Samples, histograms: Histograms) -> Iterator[Metric]:
    """Yield the metrics of `style` that have values.

    Args:
        style: a key of `STYLES`.
        model: the value of the label `model_name`.
        samples: of our counters and gauges; label values in the order of the table.
        histograms: of ours; label values as in `samples`.
    """
    names = STYLES[style]
    fixed = {"model_name": model, **names.labels}
    for alias in names.aliases:
        ours = BY_NAME[alias.ours]
        labels = [*fixed, names.replica_label, *alias.relabel.values()]
        help_text = f"As {alias.ours}" + (f" / {alias.over}" if alias.over else "")
        if ours.kind == "histogram":
            histogram = HistogramMetricFamily(alias.name, help_text, labels=labels)
            for have, buckets, total in histograms.get(alias.ours, ()):
                replica = dict(zip(ours.labels, have, strict=True)).get("replica", "0")
                histogram.add_metric([*fixed.values(), replica], buckets, total)
            if histogram.samples:
                yield histogram
            continue
        make = CounterMetricFamily if ours.kind == "counter" else GaugeMetricFamily
        family = make(alias.name, help_text, labels=labels)
        values = _sums(alias.ours, alias, samples)
        divisors = _sums(alias.over, alias, samples) if alias.over else None
        for key, value in sorted(values.items()):
            if divisors is not None:
                value = value / divisors[key] if divisors.get(key) else 0.0
            family.add_metric([*fixed.values(), *key], value)
        if values:
            yield family


def _sums(name: str, alias: Alias, samples: Samples) -> dict[tuple[str, ...], float]:
    """Return the values of our metric `name` added up by (replica, labels that are kept)."""
    labels = BY_NAME[name].labels
    sums: dict[tuple[str, ...], float] = {}
    for values, value in samples.get(name, ()):
        have = dict(zip(labels, values, strict=True))
        if alias.only.items() <= have.items():
            key = (have.get("replica", "0"), *(have[label] for label in alias.relabel))
            sums[key] = sums.get(key, 0.0) + value
    return sums
