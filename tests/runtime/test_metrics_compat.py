"""`--metrics-compat`: our figures under the names that dashboards of other servers ask for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from moewe.runtime.messages import Delta
from moewe.runtime.metrics import export
from moewe.runtime.metrics.compat import STYLES
from moewe.runtime.metrics.export import Metrics
from moewe.runtime.metrics.table import BY_NAME
from moewe.server.commands.serve import server_options
from tests.runtime.test_metrics import ready, scrape, stats


def observed(compat: str | None) -> Metrics:
    metrics = Metrics(version="1", model="m", topology="EP2DP2", compat=compat)
    for replica in range(2):
        metrics.set_ready(replica, ready())
        metrics.observe_stats(replica, stats(4))
    times = metrics.submitted(7)
    metrics.observe(times, Delta(request_id="a", token_ids=(1,), first_scheduled=times.submitted))
    metrics.observe(times, Delta(request_id="a", token_ids=(2, 3), finish_reason="stop"))
    metrics.finished(metrics.submitted(9), "abort")
    return metrics


def test_vllm_names_have_our_figures() -> None:
    values = scrape(observed("vllm"))

    def labels(engine: int, **more: str) -> tuple[tuple[str, str], ...]:
        return tuple(sorted({"model_name": "m", "engine": str(engine), **more}.items()))

    assert values["vllm:num_requests_running", labels(0)] == values["vllm:num_requests_running", labels(1)] == 2
    assert values["vllm:num_requests_waiting", labels(1)] == 1
    assert values["vllm:kv_cache_usage_perc", labels(1)] == 0.25  # 3 of 12 blocks on each of two ranks
    assert values["vllm:num_preemptions_total", labels(0)] == 4
    assert values["vllm:prompt_tokens_total", labels(0)] == 7
    assert values["vllm:generation_tokens_total", labels(0)] == 3
    finished = {reason: values["vllm:request_success_total", labels(0, finished_reason=reason)]
                for reason in ("stop", "length", "abort", "error")}  # fmt: skip
    assert finished == {"stop": 1, "length": 0, "abort": 1, "error": 0}
    assert values["vllm:time_to_first_token_seconds_count", labels(0)] == 1
    assert values["vllm:inter_token_latency_seconds_bucket", labels(0, le="+Inf")] == 2
    assert values["vllm:e2e_request_latency_seconds_count", labels(0)] == 2
    assert values["vllm:request_prompt_tokens_sum", labels(0)] == 7 + 9
    assert values["vllm:request_generation_tokens_bucket", labels(0, le="4.0")] == 2
    assert values["vllm:iteration_tokens_total_sum", labels(1)] == 4 * 6
    assert values["vllm:iteration_tokens_total_bucket", labels(0, le="8.0")] == 4


def test_the_time_of_a_request_is_told_in_three_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queue, prefill and decode, as vLLM's own dashboard asks for them; who left before a token has no such parts."""
    metrics = Metrics(version="1", model="m", topology="EP1DP1", compat="vllm")
    clock = iter((100.0, 103.0, 108.0, 200.0, 201.0, 202.0))
    monkeypatch.setattr(export, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    times = metrics.submitted(7)
    metrics.observe(times, Delta(request_id="a", token_ids=(1,), first_scheduled=101.0))
    metrics.observe(times, Delta(request_id="a", token_ids=(2, 3), first_scheduled=101.0, finish_reason="stop"))
    left = metrics.submitted(9)
    metrics.observe(left, Delta(request_id="b", first_scheduled=200.5))
    metrics.finished(left, "abort")
    monkeypatch.undo()
    values, labels = scrape(metrics), (("engine", "0"), ("model_name", "m"))
    for part, seconds, count in (("queue", 1.5, 2), ("prefill", 2.0, 1), ("decode", 5.0, 1)):
        found = [values[f"{name}_time_seconds_sum", have] for name, have in (
            (f"vllm:request_{part}", labels), (f"moewe_{part}", ()))]  # fmt: skip
        assert found == [seconds] * 2 and values[f"moewe_{part}_time_seconds_count", ()] == count


def test_sglang_names_have_our_figures() -> None:
    values = scrape(observed("sglang"))
    labels = (("dp_rank", "1"), ("engine_type", "unified"), ("model_name", "m"))
    assert values["sglang:num_running_reqs", labels] == 2 and values["sglang:token_usage", labels] == 0.25
    labels = (("dp_rank", "0"), *labels[1:])
    assert values["sglang:num_requests_total", labels] == 2 and values["sglang:num_aborted_requests_total", labels] == 1
    assert values["sglang:queue_time_seconds_count", labels] == 1
    assert values["sglang:prompt_tokens_histogram_sum", labels] == 7 + 9
    assert values["sglang:generation_tokens_histogram_sum", labels] == 3


@pytest.mark.parametrize("style", STYLES)
def test_ours_stay_as_they_are(style: str) -> None:
    plain, both = scrape(observed(None)), scrape(observed(style))
    foreign = {name for name, _ in both} - {name for name, _ in plain}
    assert {name for name, _ in plain} <= {name for name, _ in both}
    assert foreign and all(name.startswith(f"{style}:") for name in foreign)
    shown = {name.removesuffix(end) for name in foreign for end in ("_bucket", "_count", "_sum", "")}
    assert {alias.name for alias in STYLES[style].aliases} <= shown
    assert all(alias.ours in BY_NAME and (not alias.over or alias.over in BY_NAME) for alias in STYLES[style].aliases)


def test_no_requests_and_no_blocks_are_zero_not_an_error() -> None:
    metrics = Metrics(version="1", model="m", topology="EP1DP1", compat="vllm")
    assert scrape(metrics)["vllm:prompt_tokens_total", (("engine", "0"), ("model_name", "m"))] == 0


def test_a_server_that_is_not_known_is_refused() -> None:
    assert server_options({"metrics_compat": "vllm"}).metrics_compat == "vllm"
    with pytest.raises(ValueError, match="--metrics-compat 'dynamo' is not known; use vllm or sglang"):
        server_options({"metrics_compat": "dynamo"})
