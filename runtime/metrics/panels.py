"""What a dashboard shows of a server and when it should call somebody: panels and alert rules, as tables.

Not a file format (runtime/metrics/monitoring.py writes those) and not the metrics (runtime/metrics/table.py).
Expressions are PromQL; `$instance` and `$interval` are filled in by the dashboard.
"""

from __future__ import annotations

from dataclasses import dataclass

_ONE = 'instance=~"$instance"'
_RATE = "[$__rate_interval]"


@dataclass(frozen=True)
class Panel:
    """One picture.

    Attributes:
        title: above it.
        unit: of Grafana: `s`, `percentunit`, `bytes`, `Bps`, `short`.
        lines: (PromQL, legend) of each line. What they mean, and what to do when they are high, is in the table.
        goes_below_zero: its axis does not begin at 0.
    """

    title: str
    unit: str
    lines: tuple[tuple[str, str], ...]
    goes_below_zero: bool = False


@dataclass(frozen=True)
class Alert:
    """One rule.

    Attributes:
        name: in CamelCase.
        expression: PromQL that has a result while something is wrong.
        lasting: how long that must last, as Prometheus writes it.
        severity: `critical` (people are not served) or `warning`.
        summary: one line; labels as {{ $labels.x }}.
        advice: what to do.
    """

    name: str
    expression: str
    lasting: str
    severity: str
    summary: str
    advice: str


def _quantiles(metric: str) -> tuple[tuple[str, str], ...]:
    return tuple(
        (f"histogram_quantile({share}, sum by (le, instance) (rate({metric}_bucket{{{_ONE}}}{_RATE})))", f"p{name}")
        for share, name in ((0.5, 50), (0.95, 95), (0.99, 99))
    )


def _rate(metric: str, *by: str, **only: str) -> str:
    labels = ",".join([_ONE, *(f'{name}="{value}"' for name, value in only.items())])
    return f"sum by ({', '.join(('instance', *by))}) (rate({metric}{{{labels}}}{_RATE}))"


ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "Requests",
        (
            Panel("Requests", "short", (
                (f"moewe_requests_running{{{_ONE}}}", "running {{replica}}"),
                (f"moewe_requests_waiting{{{_ONE}}}", "waiting {{replica}}"),
            )),
            Panel("Time to first token", "s", _quantiles("moewe_time_to_first_token_seconds")),
            Panel("Inter-token latency", "s", _quantiles("moewe_inter_token_latency_seconds")),
            Panel("Time per output token, whole requests", "s", _quantiles("moewe_time_per_output_token_seconds")),
            Panel("Request duration", "s", _quantiles("moewe_request_duration_seconds")),
            Panel("Queue time", "s", _quantiles("moewe_queue_time_seconds")),
            Panel("From first step to first token", "s", _quantiles("moewe_prefill_time_seconds")),
            Panel("From first to last token", "s", _quantiles("moewe_decode_time_seconds")),
            Panel("Prompts that ended", "short", (
                (_rate("moewe_requests_finished_total", "reason"), "{{reason}}"),
                (_rate("moewe_request_errors_total", "status"), "refused {{status}}"),
            )),
        ),
    ),
    (
        "Throughput",
        (
            Panel("Tokens a second", "short", (
                (_rate("moewe_generation_tokens_total"), "generated"),
                (_rate("moewe_prompt_tokens_total"), "prompt"),
            )),
            Panel("Cost of a million tokens, of the whole price", "short", (
                (f"1e6 * {_rate('moewe_cost_total')} / {_rate('moewe_generation_tokens_total')}", "output"),
                (f"1e6 * {_rate('moewe_cost_total')} / {_rate('moewe_prompt_tokens_total')}", "prompt"),
                (f"moewe_cost_per_million_tokens{{{_ONE}}}", "{{tokens}} since start"),
                (f"moewe_price_per_hour{{{_ONE}}}", "an hour"),
            )),
            Panel("Rows of a step", "short", (
                (f"{_rate('moewe_batch_tokens_total', 'replica', 'rank', 'phase')} / "
                 f"{_rate('moewe_steps_total', 'replica', 'rank', 'phase')}", "{{replica}}.{{rank}} {{phase}}"),
            )),
            Panel("Rows of a step, all ranks of a replica", "short", _quantiles("moewe_step_tokens")),
            Panel("Prompt tokens of a request", "short", _quantiles("moewe_request_prompt_tokens")),
            Panel("Generated tokens of a request", "short", _quantiles("moewe_request_generation_tokens")),
            Panel("Running requests of a rank", "short", (
                (f"moewe_rank_requests_running{{{_ONE}}}", "{{replica}}.{{rank}}"),
            )),
        ),
    ),
    (
        "What binds",
        (
            Panel("Shares", "percentunit", (
                (f"avg by (instance, by) (moewe_bound_share_ratio{{{_ONE}}})", "{{by}}"),
            )),
            Panel("Verdict of a rank", "short", (
                (f"moewe_bound{{{_ONE}}}", "{{replica}}.{{rank}} {{by}}"),
            )),
            Panel("The host's part of busy time", "percentunit", (
                (f"{_rate('moewe_host_seconds_total', 'replica', 'rank')} / "
                 f"{_rate('moewe_busy_seconds_total', 'replica', 'rank')}", "{{replica}}.{{rank}}"),
            )),
            Panel("Starved: waiting for a plan", "percentunit", (
                (f"{_rate('moewe_starved_seconds_total', 'replica', 'rank')} / on (instance, replica) group_left "
                 f"{_rate('moewe_wall_seconds_total', 'replica')}", "{{replica}}.{{rank}}"),
            )),
            Panel("Arithmetic intensity", "short", (
                (f"moewe_arithmetic_intensity_operations_per_byte{{{_ONE}}}", "{{phase}} {{replica}}"),
                (f"moewe_ridge_point_operations_per_byte{{{_ONE}}}", "ridge point {{replica}}"),
            )),
            Panel("S-MFU while busy", "percentunit", (
                (f"moewe_compute_saturation_ratio{{{_ONE}}}", "{{phase}} {{replica}}.{{rank}}"),
            )),
            Panel("Matrix operations a second", "short", (
                (_rate("moewe_matrix_operations_total", "component"), "{{component}}"),
            )),
        ),
    ),
    (
        "Memory bandwidth",
        (
            Panel("Saturation while busy", "percentunit", (
                (f"moewe_memory_saturation_ratio{{{_ONE},phase=\"decode\"}}", "decode {{replica}}.{{rank}}"),
                (f"moewe_memory_saturation_ratio{{{_ONE},phase=\"mixed\"}}", "mixed {{replica}}.{{rank}}"),
            )),
            Panel("Bytes a second by component", "Bps", (
                (_rate("moewe_memory_bytes_total", "component"), "{{component}}"),
            )),
            Panel("Ceilings", "Bps", (
                (f"moewe_memory_bandwidth_ceiling_bytes_per_second{{{_ONE}}}", "{{replica}}"),
            )),
            Panel("Matrix rate in cache", "short", (
                (f"moewe_matrix_rate_ceiling_operations_per_second{{{_ONE}}}", "{{replica}} {{format}}"),
            )),
            Panel("Counted beside measured by the GPU", "Bps", (
                (_rate("moewe_measured_memory_bytes_total", "replica", "rank"), "measured {{replica}}.{{rank}}"),
            )),
            Panel("Error of counted bytes", "percentunit", (
                (f"moewe_model_error_ratio{{{_ONE}}}", "{{replica}}.{{rank}}"),
            ), goes_below_zero=True),
            Panel("Busy", "percentunit", (
                (_rate("moewe_busy_seconds_total", "replica", "rank"), "{{replica}}.{{rank}}"),
            )),
            Panel("Weights fit the cache", "short", (
                (f"moewe_cache_resident{{{_ONE}}}", "{{replica}}"),
            )),
        ),
    ),
    (
        "Memory",
        (
            Panel("KV usage", "percentunit", (
                (f"moewe_kv_usage_ratio{{{_ONE}}}", "{{replica}}.{{rank}}"),
            )),
            Panel("KV blocks", "short", (
                (f"moewe_kv_blocks_used{{{_ONE}}}", "used {{replica}}.{{rank}}"),
                (f"moewe_kv_blocks{{{_ONE}}}", "all {{replica}}.{{rank}}"),
            )),
            Panel("Preemptions", "short", (
                (_rate("moewe_preemptions_total", "replica"), "{{replica}}"),
            )),
            Panel("What is held", "bytes", (
                (f"sum by (instance, kind, format) (moewe_weight_kind_bytes{{{_ONE}}})", "{{kind}} {{format}}"),
                (f"sum by (instance, format) (moewe_kv_bytes{{{_ONE}}})", "KV {{format}}"),
            )),
            Panel("Memory of ranks by part", "bytes", (
                (f"sum by (instance, part) (moewe_rank_memory_bytes{{{_ONE}}})", "{{part}}"),
            )),
            Panel("KV of a rank with tokens in it", "bytes", (
                (f"moewe_rank_memory_bytes{{{_ONE},part=\"kv_used\"}}", "{{replica}}.{{rank}}"),
            )),
            Panel("Peak host memory", "bytes", (
                (f"moewe_peak_memory_bytes{{{_ONE}}}", "all processes"),
            )),
        ),
    ),
    (
        "Energy",
        (
            Panel("Power of GPUs", "watt", (
                (_rate("moewe_gpu_energy_joules_total", "replica", "rank"), "{{replica}}.{{rank}}"),
            )),
            Panel("Power of the host, all programs", "watt", (
                (_rate("moewe_host_energy_joules_total", "zone"), "{{zone}}"),
            )),
            Panel("Joules of GPUs for a generated token", "joule", (
                (f"{_rate('moewe_gpu_energy_joules_total')} / {_rate('moewe_generation_tokens_total')}", "GPUs"),
            )),
        ),
    ),
    (
        "Experts and links",
        (
            Panel("Imbalance", "short", (
                (f"moewe_expert_imbalance_ratio{{{_ONE}}}", "{{scope}} {{replica}}"),
            )),
            Panel("Expert slots of a rank", "short", (
                (f"moewe_expert_slots{{{_ONE}}}", "{{replica}}.{{rank}}"),
            )),
            Panel("Rows of experts", "short", (
                (_rate("moewe_expert_tokens_total", "replica", "rank"), "{{replica}}.{{rank}}"),
            )),
            Panel("Bytes on links", "Bps", (
                (_rate("moewe_exchange_bytes_total", "scope"), "{{scope}}"),
            )),
            Panel("Time in collectives", "percentunit", (
                (_rate("moewe_exchange_seconds_total", "replica", "rank", "scope"), "{{replica}}.{{rank}} {{scope}}"),
            )),
            Panel("Exchange of a layer at start, fixed", "s", (
                (f"moewe_exchange_fixed_seconds{{{_ONE}}}", "{{replica}} {{exchange}}"),
            )),
            Panel("Exchange at start, bytes", "Bps", (
                (f"moewe_exchange_bandwidth_bytes_per_second{{{_ONE}}}", "{{replica}} {{exchange}} {{scope}}"),
            )),
            Panel("Exchange that experts can hide", "percentunit", (
                (f"moewe_exchange_hidden_ratio{{{_ONE}}}", "{{replica}} {{exchange}}"),
            )),
            Panel("Choices that no slot holds", "short", (
                (_rate("moewe_unowned_expert_ids_total", "replica", "rank"), "{{replica}}.{{rank}}"),
            )),
        ),
    ),
    (
        "Experts that move (--eplb auto)",
        (
            Panel("Rounds", "short", (
                (_rate("moewe_balance_rounds_total", "replica", "outcome"), "{{outcome}} {{replica}}"),
            )),
            Panel("Experts moved", "short", (
                (_rate("moewe_balance_moves_total", "replica"), "{{replica}}"),
            )),
            Panel("Time of reading them", "percentunit", (
                (_rate("moewe_balance_move_seconds_total", "replica"), "{{replica}}"),
            )),
            Panel("Step time saved", "s", (
                (f"moewe_balance_gain_seconds{{{_ONE}}}", "{{kind}} {{replica}}"),
            ), goes_below_zero=True),
        ),
    ),
    (
        "Advice about the layout",
        (
            Panel("Verdict", "short", ((f"moewe_advice{{{_ONE}}} == 1", "{{verdict}}"),)),
            Panel("Windows by verdict", "short", ((_rate("moewe_advice_windows_total", "verdict"), "{{verdict}}"),)),
            Panel("Gain expected of the best layout", "percentunit", (
                (f"moewe_advice_gain_ratio{{{_ONE}}}", "gain"),
            )),
            Panel("Predicted step time over observed, less 1", "percentunit", (
                (f"moewe_advice_model_error_ratio{{{_ONE}}}", "error"),
            ), goes_below_zero=True),
            Panel("Changes of the layout", "short", (
                (_rate("moewe_topology_changes_total", "outcome"), "{{outcome}}"),
            )),
        ),
    ),
)  # fmt: skip

ALERTS = (
    Alert("MoeweNotReady", "moewe_ready == 0", "5m", "critical", "{{ $labels.instance }} takes no requests",
          "It loads, drains or has failed: `/v1/topology` says which, the log says why."),
    # A server that lost a rank ends: none of its own metrics can say so.
    Alert("MoeweGone", "up == 0 and on (job, instance) last_over_time(moewe_info[1d])", "1m", "critical",
          "{{ $labels.instance }} is gone",
          "It was there within a day and cannot be scraped. Exit code 3 is a lost rank or engine, which the log names; "
          "a supervisor should have started it again."),
    Alert("MoeweRestarts", "changes(moewe_start_time_seconds[30m]) > 2", "0m", "critical",
          "{{ $labels.instance }} was started again and again",
          "Each time its log ends with what was lost: a rank, an engine, or memory that the system took back."),
    Alert("MoeweErrors",
          'sum by (instance) (rate(moewe_requests_finished_total{reason="error"}[5m])) > '
          "0.01 * sum by (instance) (rate(moewe_requests_finished_total[5m]))", "5m", "critical",
          "{{ $labels.instance }}: more than 1 % of prompts end in an error",
          "Each has a line in the log with the request's id; a rank that was lost is named there."),
    Alert("MoeweUnownedExperts", "increase(moewe_unowned_expert_ids_total[10m]) > 0", "0m", "critical",
          "{{ $labels.instance }}: rank {{ $labels.rank }} met choices that no expert slot holds",
          "Answers may be wrong: restart, and report it."),
    Alert("MoeweQueueGrows", "sum by (instance) (moewe_requests_waiting) > sum by (instance) (moewe_requests_running)",
          "10m", "warning", "{{ $labels.instance }}: more requests wait than run",
          "More replicas (DP), more KV, or a limit in front (--max-queued-requests answers 429 sooner)."),
    Alert("MoeweSlowFirstToken",
          "histogram_quantile(0.95, sum by (le, instance) (rate(moewe_time_to_first_token_seconds_bucket[10m]))) > 10",
          "10m", "warning", "{{ $labels.instance }}: one first token in twenty takes over 10 s",
          "Compare with queue time; choose the limit to your own promise."),
    Alert("MoeweKVFull", "moewe_kv_usage_ratio > 0.95", "10m", "warning",
          "{{ $labels.instance }}: KV of rank {{ $labels.rank }} is full",
          "--kv-cache-dtype fp8 or int8 doubles the blocks; fewer --max-num-seqs preempt less."),
    Alert("MoewePreempting", "rate(moewe_preemptions_total[10m]) > 0.1", "10m", "warning",
          "{{ $labels.instance }} preempts requests all the time", "As MoeweKVFull: work is done twice."),
    Alert("MoeweExpertsUneven",
          'moewe_expert_imbalance_ratio{scope="rank"} > 1.5 and on (instance, replica) moewe_requests_running > 0',
          "15m", "warning", "{{ $labels.instance }}: a rank of replica {{ $labels.replica }} has 1.5 times the mean",
          "Redundant slots (red=) and --eplb; docs/balancing.md."),
    Alert("MoeweStarvedByHost",
          "sum by (instance, replica, rank) (rate(moewe_busy_seconds_total[10m])) < 0.5 and "
          "on (instance, replica, rank) moewe_rank_requests_running > 0", "15m", "warning",
          "{{ $labels.instance }}: rank {{ $labels.rank }} has requests and stands still half of the time",
          "The host is too slow: more cores for the server, or fewer processes beside it."),
    Alert("MoeweMemorySaturated",
          'moewe_memory_saturation_ratio{phase="decode"} > 0.9 '
          "unless on (instance, replica) moewe_cache_resident == 1",
          "15m", "warning", "{{ $labels.instance }}: decode of rank {{ $labels.rank }} is at the ceiling of memory",
          "Nothing is wrong; more tokens/s need fewer bytes (int8, int4, fp8 KV) or more ranks and replicas."),
)  # fmt: skip
