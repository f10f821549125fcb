"""The part of the table of metrics that is about a server process and its requests.

Not the values (runtime/metrics/export.py) and not the part about ranks (rank_metrics.py). Units stand in the entries.
"""

from __future__ import annotations

from .metric import Metric

REQUEST_METRICS = (
    Metric(
        "moewe_info", "gauge", ("version", "model", "topology"), "1",
        "Always 1; what runs here is in the labels.",
        "Nothing: it is there to be joined with.",
    ),
    Metric(
        "moewe_ready", "gauge", (), "1",
        "1 while requests are taken, 0 while loading, draining or failed.",
        "Nothing. Where it is 0 for long, read the log: loading, draining, or an engine that is lost.",
    ),
    Metric(
        "moewe_start_time_seconds", "gauge", (), "seconds",
        "When this server process began, since 1970.",
        "Nothing. Where it changes, the server was started again: a supervisor after a loss, or somebody.",
    ),
    Metric(
        "moewe_requests_finished_total", "counter", ("reason",), "requests",
        "Accepted prompts that ended: `stop` (end token or stop string), `length`, `abort` (client gone), `error`.",
        "`abort`: clients give up, see the latencies below. `error`: read the log. `length`: `max_tokens` or `--max-"
        "model-len` cuts answers short.",
    ),
    Metric(
        "moewe_request_errors_total", "counter", ("status",), "responses",
        "Answers of the generating routes with an error status, refused requests included.",
        "400: a client sends what is refused, its answer says why. 429 and 503: more load than is taken, add "
        "replicas. 500: read the log.",
    ),
    Metric(
        "moewe_prompt_tokens_total", "counter", (), "tokens",
        "Prompt tokens of prompts that got a first token.",
        "Long prompts are bound by matrix products: watch `moewe_compute_saturation_ratio`.",
    ),
    Metric(
        "moewe_generation_tokens_total", "counter", (), "tokens",
        "Generated tokens, end tokens included.",
        "Nothing: this is the work.",
    ),
    Metric(
        "moewe_time_to_first_token_seconds", "histogram", (), "seconds",
        "From submission to first token.",
        "Compare with the queue time: if most of it is queue, add replicas or seats (`--max-num-seqs`); if not, "
        "prompts are long, or chunks of them are small (`--max-num-batched-tokens`).",
    ),
    Metric(
        "moewe_time_per_output_token_seconds", "histogram", (), "seconds",
        "Per finished request: time from first to last token over the tokens after the first.",
        "Look at `moewe_bound`. Lower weight formats, more ranks, fewer requests at once, or less prefill beside "
        "decodes (`--max-num-batched-tokens`).",
    ),
    Metric(
        "moewe_inter_token_latency_seconds", "histogram", (), "seconds",
        "Per token after the first: time since the one before it.",
        "As above; where only its tail is high, prompts of others run in between (phase `mixed`).",
    ),
    Metric(
        "moewe_request_duration_seconds", "histogram", (), "seconds",
        "From submission to the end, however it ended.",
        "It grows with answers: compare with time to first and per output token.",
    ),
    Metric(
        "moewe_queue_time_seconds", "histogram", (), "seconds",
        "From submission to the first step.",
        "Seats or KV are full: see `moewe_requests_running`, `moewe_kv_usage_ratio`; add replicas.",
    ),
    Metric(
        "moewe_prefill_time_seconds", "histogram", (), "seconds",
        "Per accepted prompt with any output, when it ends: from its first step to its first token.",
        "Prompts are long, chunks of them small (`--max-num-batched-tokens`), or many come at once.",
    ),
    Metric(
        "moewe_decode_time_seconds", "histogram", (), "seconds",
        "Per accepted prompt with any output, when it ends: from its first to its last token.",
        "It grows with answers: see the time per output token.",
    ),
    Metric(
        "moewe_request_prompt_tokens", "histogram", (), "tokens",
        "Per accepted prompt, when it ends, however it ended: its tokens.",
        "Long prompts: steps take longer for all beside them; `--max-num-batched-tokens`, replicas for prompts apart.",
    ),
    Metric(
        "moewe_request_generation_tokens", "histogram", (), "tokens",
        "Per accepted prompt, when it ends, however it ended: tokens generated for it.",
        "Long answers hold seats and KV for long: `max_tokens` of clients, `--max-model-len`.",
    ),
    Metric(
        "moewe_peak_memory_bytes", "gauge", (), "bytes",
        "Host memory: sum of the largest resident sets of server, engines and ranks; shared pages count for each.",
        "Near the host's memory: fewer KV blocks, lower formats, fewer replicas.",
    ),
    Metric(
        "moewe_host_energy_joules_total", "counter", ("zone",), "joules",
        "What the host's packages and memory have used since start by RAPL `zone`, all programs included; nothing "
        "where Linux has no powercap or only root may read it. Its rate is watts.",
        "Divide by tokens: joules for each fall with larger batches, and with lower formats where memory binds. Near a "
        "package's limit clocks fall: compare the ceilings of another start.",
    ),
)  # fmt: skip
