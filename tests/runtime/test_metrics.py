"""Metrics: the arithmetic of saturation and imbalance, exact counters, and a document that tells the truth."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from moewe.runtime.messages import Delta, Ready, Stats
from moewe.runtime.metrics.bound import BOUNDS
from moewe.runtime.metrics.export import Metrics
from moewe.runtime.metrics.histogram import TOKEN_BOUNDS, Histogram
from moewe.runtime.metrics.ranks import WINDOW_S, ReplicaMetrics
from moewe.runtime.metrics.saturation import expert_imbalance, imbalance, memory_bytes
from moewe.runtime.metrics.stats import encode_counters, rank_stats
from moewe.runtime.metrics.table import BY_NAME, METRICS, markdown_table
from moewe.runtime.rank_stats import BalanceStats, RankStats
from moewe.telemetry import COMPONENTS, MEMORY_PARTS, PHASES, HostEnergy, RankCounters
from moewe.topologies.advisor.records import Advice, Calibration
from moewe.topologies.exchange_cost import ExchangeCost, MeasuredLinks

DECODE = 1
LINKS = MeasuredLinks(
    exchanges=(ExchangeCost(name="all_to_all", fixed_s=0.003, within_s=0.0, between_s=1e-8, hidden=0.25),)
)


def counted(rank: int, steps: int) -> RankStats:
    counters = RankCounters(num_moe_layers=2, num_local_slots=2)
    for _ in range(steps):
        counters.begin_step("decode", 3)
        counters.add_bytes("routed", 1_000)
        counters.add_bytes("kv", 500)
        counters.add_flops("routed", 6_000.0)
        counters.add_flops("kv", 1_500.0)
        counters.add_exchange((5, 4, 3), (0.25, 0.5, 1.0))
        counters.add_expert_tokens(np.array([[1 + rank, 1 + rank], [0, 0]]))
        counters.end_step(0.5, 0.125, 0.0625)
    held = (10 * (rank + 1), 3, 2, 4, 5, 7, 6)
    return rank_stats(rank, encode_counters(counters, held), used_blocks=3, total_blocks=12)


def ready() -> Ready:
    return Ready(
        num_blocks=12, block_size=16, max_model_len=64, max_num_seqs=4, memory_bandwidth=(6_000.0, 3_000.0),
        weight_bytes=(10, 20), weight_bytes_read=(10, 20), pids=(1, 2), expert_slots=(3, 2),
        weight_kinds=({"routed/int4": 10}, {"routed/int4": 5, "head/int8": 15}), kv_bytes=({"fp8": 7}, {"fp8": 8}),
        matrix_rates=({"bfloat16": 5e12, "int8": 9e12}, {"bfloat16": 6e12, "int8": 8e12}),
    )  # fmt: skip


def stats(steps: int) -> Stats:
    ranks = (counted(0, steps), counted(1, steps))
    of_six = tuple(steps * (bound == 8) for bound in (*TOKEN_BOUNDS, 0))  # steps of 6 rows
    return Stats(
        num_running=2, num_waiting=1, num_preemptions=4, num_steps=steps, ranks=ranks, running_per_rank=(1, 1),
        step_tokens=of_six, num_step_tokens=6 * steps,
    )  # fmt: skip


def scrape(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families(metrics.render().decode())
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def test_measured_links_are_told_where_rows_travel() -> None:
    metrics = Metrics(version="1", model="m", topology="EP2DP1")
    metrics.set_ready(0, ready())
    assert not any(name.startswith("moewe_exchange_fixed") for name, _ in scrape(metrics))
    metrics.set_ready(0, msgspec.structs.replace(ready(), links=LINKS))
    found, own = scrape(metrics), (("exchange", "all_to_all"), ("replica", "0"))
    assert found["moewe_exchange_fixed_seconds", own] == 0.003
    assert found["moewe_exchange_hidden_ratio", own] == 0.25
    rates = {labels: value for (name, labels), value in found.items() if name.startswith("moewe_exchange_bandwidth")}
    assert rates == {(*own, ("scope", "between")): pytest.approx(1e8)}


def test_memory_bytes_leave_out_links_and_activations() -> None:
    moved = np.arange(28).reshape(4, 7)
    assert memory_bytes(moved).tolist() == [10, 45, 80, 115]


def test_imbalance_is_the_mean_over_layers_of_busiest_over_mean() -> None:
    assert imbalance(np.array([[4, 0], [2, 2]])) == 1.5
    assert imbalance(np.array([[4, 0], [0, 0]])) == 2.0
    assert imbalance(np.zeros((2, 2))) == imbalance(np.zeros((0, 2))) == 0.0
    by_rank, by_slot = expert_imbalance([np.array([[3, 1]]), np.array([[0, 0]])])
    assert (by_rank, by_slot) == (2.0, 3.0)
    assert expert_imbalance([]) == expert_imbalance([np.zeros((0, 0))]) == (0.0, 0.0)


def test_ranks_are_exported_without_layers_or_experts() -> None:
    metrics = Metrics(version="1", model="m", topology="EP2DP1")
    metrics.set_ready(0, ready())
    metrics.observe_stats(0, stats(4))
    values = scrape(metrics)
    rank1 = (("rank", "1"), ("replica", "0"))
    decode = (("phase", "decode"), *rank1)
    assert values["moewe_memory_saturation_ratio", decode] == pytest.approx(4 * 1_500 / (4 * 0.5 * 4_500))
    ceiling = "moewe_memory_bandwidth_ceiling_bytes_per_second"
    assert values[ceiling, (("replica", "0"),)] == 4_500
    rate = "moewe_matrix_rate_ceiling_operations_per_second"
    assert values[rate, (("format", "bfloat16"), ("replica", "0"))] == 5.5e12
    assert values[rate, (("format", "int8"), ("replica", "0"))] == 8.5e12
    assert values["moewe_steps_total", decode] == 4
    assert values["moewe_batch_tokens_total", decode] == 12
    assert values["moewe_busy_seconds_total", decode] == 2.0
    assert values["moewe_memory_bytes_total", (("component", "routed"), *decode)] == 4_000
    assert ("moewe_memory_bytes_total", (("component", "exchange"), *decode)) not in values, "it has metrics of its own"
    assert values["moewe_matrix_operations_total", (("component", "routed"), *rank1)] == 24_000
    assert values["moewe_host_seconds_total", rank1] == 0.5 and values["moewe_starved_seconds_total", rank1] == 0.25
    for scope, num_bytes, seconds in (("rank", 20, 1), ("domain", 16, 2), ("between", 12, 4)):
        assert values["moewe_exchange_bytes_total", (*rank1, ("scope", scope))] == num_bytes
        assert values["moewe_exchange_seconds_total", (*rank1, ("scope", scope))] == seconds
    assert values["moewe_expert_tokens_total", rank1] == 16
    assert values["moewe_kv_usage_ratio", rank1] == 0.25
    assert values["moewe_expert_imbalance_ratio", (("replica", "0"), ("scope", "rank"))] == pytest.approx(4 / 3)
    assert values["moewe_requests_running", (("replica", "0"),)] == 2
    assert values["moewe_preemptions_total", (("replica", "0"),)] == 4
    memory = {"weights": 20, "kv_used": 3, "kv_reserved": 2, "kv_free": 4, "exchange": 5, "graphs": 7, "other": 6}
    for part, held in memory.items():
        assert values["moewe_rank_memory_bytes", (("part", part), *rank1)] == held
    assert [values["moewe_expert_slots", (("rank", rank), ("replica", "0"))] for rank in "01"] == [3, 2]
    for kind, held in (("head", "int8"), 15), (("routed", "int4"), 15):
        labels = (("format", kind[1]), ("kind", kind[0]), ("replica", "0"))
        assert values["moewe_weight_kind_bytes", labels] == held
    assert values["moewe_kv_bytes", (("format", "fp8"), ("replica", "0"))] == 15
    assert not any(label in ("layer", "expert") for _, labels in values for label, _ in labels)


def test_moves_of_experts_are_exported_in_seven_series_a_replica() -> None:
    metrics = Metrics(version="1", model="m", topology="EP2DP1")
    metrics.observe_stats(0, stats(4))
    assert not any("balance" in name for name, _ in scrape(metrics) if not name.startswith("moewe_expert"))
    balance = BalanceStats(
        placement=5, slots=b"", moves=30, rounds=5, failures=2, taken_back=1, move_seconds=1.5,
        predicted_seconds=4.0, realised_seconds=-0.5,
        clocked_seconds=0.75,
    )  # fmt: skip
    metrics.observe_stats(0, msgspec.structs.replace(stats(4), balance=balance))
    found = {key: value for key, value in scrape(metrics).items() if key[0].startswith("moewe_balance")}
    replica = ("replica", "0")
    assert found == {
        ("moewe_balance_rounds_total", (("outcome", "moved"), replica)): 4,
        ("moewe_balance_rounds_total", (("outcome", "taken_back"), replica)): 1,
        ("moewe_balance_rounds_total", (("outcome", "failed"), replica)): 2,
        ("moewe_balance_moves_total", (replica,)): 30,
        ("moewe_balance_move_seconds_total", (replica,)): 1.5,
        ("moewe_balance_gain_seconds", (("kind", "predicted"), replica)): 4.0,
        ("moewe_balance_gain_seconds", (("kind", "realised"), replica)): -0.5,
        ("moewe_balance_gain_seconds", (("kind", "clocked"), replica)): 0.75,
    }


def test_ratios_forget_what_is_older_than_two_windows() -> None:
    replica = ReplicaMetrics(0)
    replica.begin(ready(), 0.0)
    replica.observe(stats(10), 1.0)
    assert replica.saturation()[0, DECODE] == pytest.approx(0.5 * 6_000 / 4_500)
    for window in range(1, 3):
        replica.observe(stats(10), 1.0 + window * (WINDOW_S + 1))
    assert replica.saturation()[0, DECODE] == 0.0


def test_requests_are_counted_once_and_as_the_client_saw_them() -> None:
    metrics = Metrics(version="1", model="m", topology="EP1DP1")
    times = metrics.submitted(7)
    metrics.observe(times, Delta(request_id="a", first_scheduled=times.submitted + 0.25))
    metrics.observe(times, Delta(request_id="a", token_ids=(1,), first_scheduled=times.submitted + 0.25))
    metrics.observe(times, Delta(request_id="a", token_ids=(2, 3), finish_reason="stop"))
    metrics.observe(times, Delta(request_id="a", finish_reason="stop"))
    aborted = metrics.submitted(9)
    metrics.finished(aborted, "abort")
    metrics.finished(aborted, "abort")
    metrics.error(400)
    values = scrape(metrics)
    assert values["moewe_prompt_tokens_total", ()] == 7
    assert values["moewe_generation_tokens_total", ()] == 3
    assert {labels[0][1]: n for (name, labels), n in values.items() if name == "moewe_requests_finished_total"} == {
        "stop": 1, "length": 0, "abort": 1, "error": 0}  # fmt: skip
    assert values["moewe_request_errors_total", (("status", "400"),)] == 1
    assert values["moewe_time_to_first_token_seconds_count", ()] == 1
    assert values["moewe_inter_token_latency_seconds_count", ()] == 2
    assert values["moewe_time_per_output_token_seconds_count", ()] == 1
    assert values["moewe_request_duration_seconds_count", ()] == 2
    assert values["moewe_queue_time_seconds_count", ()] == 1
    assert values["moewe_queue_time_seconds_sum", ()] == pytest.approx(0.25)
    for kind, total, bound in ("prompt", 7 + 9, "8.0"), ("generation", 3 + 0, "1.0"):
        name = f"moewe_request_{kind}_tokens"
        assert values[f"{name}_sum", ()] == total and values[f"{name}_count", ()] == 2
        assert values[f"{name}_bucket", (("le", bound),)] == 1


def test_histogram_buckets_are_cumulative_and_inclusive() -> None:
    histogram = Histogram([1.0, 2.0])
    for value in (-1.0, 1.0, 1.5, 9.0):
        histogram.observe(value)
    assert histogram.cumulative() == [("1.0", 2.0), ("2.0", 3.0), ("+Inf", 4.0)]
    assert histogram.total == 11.5


def test_rows_of_steps_are_a_distribution_of_each_replica() -> None:
    metrics = Metrics(version="1", model="m", topology="EP2DP2")
    metrics.observe_stats(0, Stats(num_running=0, num_waiting=0, num_preemptions=0, num_steps=0))
    assert not any(name.startswith("moewe_step_tokens") for name, _ in scrape(metrics)), "nobody has counted"
    for replica in range(2):
        metrics.observe_stats(replica, stats(4 + replica))
    values = scrape(metrics)
    for replica in range(2):
        own = (("replica", str(replica)),)
        buckets = [values["moewe_step_tokens_bucket", (("le", le), *own)] for le in ("4.0", "8.0", "+Inf")]
        assert buckets == [0, 4 + replica, 4 + replica] == [0, *[values["moewe_step_tokens_count", own]] * 2]
        assert values["moewe_step_tokens_sum", own] == 6 * (4 + replica)


def everything(folder: Path) -> Metrics:
    """All that there can be at once: prices, energy of both kinds, links, a counter of the GPU's memory, moves."""
    package = folder / "intel-rapl:0"
    package.mkdir()
    for file, text in (("name", "package-0"), ("energy_uj", "5"), ("max_energy_range_uj", "9")):
        (package / file).write_text(text)
    metrics = Metrics(version="1", model="m", topology="EP2DP1", price_per_hour=1.0, energy=HostEnergy(folder))
    metrics.totals.generation_tokens = 1
    metrics.set_ready(0, msgspec.structs.replace(ready(), links=LINKS))
    with_counter = tuple(msgspec.structs.replace(rank, measured_bytes=1.0, joules=2.0) for rank in stats(1).ranks)
    balance = BalanceStats(placement=0, slots=b"")
    metrics.observe_stats(0, msgspec.structs.replace(stats(1), ranks=with_counter, balance=balance))
    metrics.error(503)
    calibration = Calibration(
        observed_s=2.0, predicted_s=1.0, products=1.0, rest_s=0.0, exchange=1.0, wait=1.0, meet_s=0.0
    )
    metrics.advice.observe(
        Advice(number=1, time=1.0, topology="EP2DP1", verdict="stay", advised="EP2DP1", gain=0.1, reason="",
               calibration=calibration)
    )  # fmt: skip
    metrics.advice.changes["done"] += 1
    return metrics


def test_everything_exported_is_in_the_table_with_its_labels(tmp_path: Path) -> None:
    metrics = everything(tmp_path)
    assert scrape(metrics)["moewe_advice_model_error_ratio", ()] == -0.5
    assert scrape(metrics)["moewe_advice_windows_total", (("verdict", "stay"),)] == 1
    seen = set()
    for family in metrics.collect():
        name = family.name + ("_total" if family.type == "counter" else "")
        seen.add(name)
        assert family.type == BY_NAME[name].kind
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(BY_NAME[name].labels)
    assert seen == {metric.name for metric in METRICS}
    assert all(re.fullmatch(r"moewe_[a-z_]+", name) for name in seen)


def test_document_holds_the_table() -> None:
    assert (Path(__file__).parents[2] / "docs" / "metrics.md").read_text().endswith(markdown_table())


def test_load_of_slots_is_kept_by_phase_and_forgotten_in_time() -> None:
    replica = ReplicaMetrics(0)
    replica.observe(stats(4), 1.0)
    assert replica.slots.tokens("decode").tolist() == [[4, 4, 8, 8], [0, 0, 0, 0]]
    assert not replica.slots.tokens("prefill").any()
    for window in range(1, 3):
        replica.observe(stats(4 + window), 1.0 + window * (WINDOW_S + 1))
    assert replica.slots.tokens("decode").tolist() == [[1, 1, 2, 2], [0, 0, 0, 0]]
    imbalances = {labels[1]: value for name, labels, value in replica.samples() if name.endswith("imbalance_ratio")}
    assert imbalances == {"rank": pytest.approx(4 / 3), "slot": pytest.approx(4 / 3)}


def test_a_rank_that_has_not_counted_yet_leaves_the_window_alone() -> None:
    replica = ReplicaMetrics(0)
    silent = rank_stats(1, b"", used_blocks=0, total_blocks=12)
    replica.observe(msgspec.structs.replace(stats(2), ranks=(counted(0, 2), silent)), 1.0)
    assert replica.slots.tokens().shape == (0, 0)
    assert ("moewe_expert_imbalance_ratio", ("0", "rank"), 0.0) in list(replica.samples())


def begun(steps: int, *, wall: float) -> ReplicaMetrics:
    """Two ranks that have decoded since a replica was ready, at a ridge point of 5/3 operations a byte."""
    replica = ReplicaMetrics(0)
    replica.begin(msgspec.structs.replace(ready(), matrix_rates=({"bfloat16": 9e3, "int8": 7.5e3},) * 2), 100.0)
    replica.observe(stats(0), 100.0)
    replica.observe(stats(steps), 100.0 + wall)
    return replica


def test_operations_stand_beside_bytes() -> None:
    replica = begun(4, wall=2.5)
    values = {(name, labels): value for name, labels, value in replica.samples()}
    assert values["moewe_compute_saturation_ratio", ("0", "1", "decode")] == pytest.approx(
        4 * 7_500 / (4 * 0.5 * 7_500)
    )
    assert values["moewe_arithmetic_intensity_operations_per_byte", ("0", "decode")] == 5.0
    assert values["moewe_arithmetic_intensity_operations_per_byte", ("0", "prefill")] == 0.0
    assert values["moewe_ridge_point_operations_per_byte", ("0",)] == pytest.approx(7_500 / 4_500)
    assert values["moewe_wall_seconds_total", ("0",)] == 2.5


def test_the_matrix_rate_is_that_of_the_format_most_weights_have() -> None:
    replica = begun(1, wall=1.0)
    assert replica.matrix_rate == 7.5e3
    kinds = ({"routed/fp8_block": 10, "head/int8": 5},) * 2
    replica.begin(msgspec.structs.replace(replica.ready, weight_kinds=kinds), 0.0)
    assert replica.matrix_rate == 9e3


@pytest.mark.parametrize(("isa", "efficiency"), [("amx", 0.2), ("avx512", 0.6), ("", 0.6)])
def test_what_good_kernels_reach_is_known_by_instructions(isa: str, efficiency: float) -> None:
    replica = begun(1, wall=1.0)
    replica.begin(msgspec.structs.replace(replica.ready, isa=isa), 0.0)
    ceilings = replica.ceilings()
    assert ceilings is not None and ceilings.matrix_efficiency == efficiency


def test_what_binds_is_exported_with_its_shares() -> None:
    replica = begun(4, wall=40.0)
    bound = {labels[1:]: value for name, labels, value in replica.samples() if name == "moewe_bound"}
    assert bound == {("0", "idle"): 1.0, ("1", "idle"): 1.0}
    shares = {labels[1]: value for name, labels, value in replica.samples() if name == "moewe_bound_share_ratio"}
    assert tuple(shares) == BOUNDS
    assert shares["idle"] == pytest.approx((40 - 4 * 0.5625) / 40) and shares["queue"] == pytest.approx(1 / 3)
    assert sum(shares.values()) - shares["queue"] == pytest.approx(1)
    replica.observe(stats(60), 142.0)  # the collectives of stats() take longer than its steps: all wait alike
    assert replica.overall is not None and replica.overall.bound == "link"


def test_without_a_ceiling_there_is_no_verdict() -> None:
    replica = begun(4, wall=40.0)
    assert replica.ready is not None
    replica.begin(msgspec.structs.replace(replica.ready, matrix_rates=()), 200.0)
    replica.observe(stats(4), 201.0)
    names = {name for name, _, _ in replica.samples()}
    assert not names & {"moewe_bound", "moewe_bound_share_ratio", "moewe_ridge_point_operations_per_byte"}
    assert "moewe_compute_saturation_ratio" in names


def test_an_engine_that_starts_again_is_counted_from_its_own_start() -> None:
    replica = begun(40, wall=30.0)
    replica.begin(ready(), 200.0)
    replica.observe(stats(2), 210.0)
    assert replica.saturation()[0, DECODE] == pytest.approx(2 * 1_500 / (2 * 0.5 * 4_500))
    assert replica.sums().wall_seconds == 10.0 and replica.sums().waiting_seconds == 0


@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize(("layers", "experts"), [(1, 1), (58, 256), (94, 2048)])
def test_a_rank_has_at_most_64_series_whatever_the_model(layers: int, experts: int, device: str) -> None:
    """With all that there is: every phase, component, scope and kind of weights, in mixed formats.

    Only GPUs have counters of their own, and only on CPUs a clock sees collectives.
    """
    counters = RankCounters(layers, experts)
    for phase in PHASES:
        counters.begin_step(phase, 1)
        for component in COMPONENTS:
            counters.add_bytes(component, 1)
            counters.add_flops(component, 1)
        counters.add_exchange((1, 1, 1), (1.0, 1.0, 1.0) if device == "cpu" else (0.0, 0.0, 0.0))
        counters.add_expert_tokens(np.ones((layers, experts), np.int64))
        counters.end_step(1.0, 0.5, 0.5)
    if device == "gpu":
        counters.measured_bytes = counters.joules = 1.0
    told = rank_stats(0, encode_counters(counters, (1,) * len(MEMORY_PARTS)), used_blocks=1, total_blocks=2)
    kinds = ("attention", "routed", "shared", "dense", "embedding", "head")
    formats = ("bfloat16", "float32", "int8", "int4", "mxfp4", "fp8_block")
    full = msgspec.structs.replace(
        ready(), memory_bandwidth=(1.0,), weight_bytes=(36,), expert_slots=(experts,), kv_bytes=({"fp8": 7},),
        weight_kinds=({f"{kind}/{held}": 1 for kind in kinds for held in formats},),
        matrix_rates=({"bfloat16": 9e3, "int8": 7.5e3},),
    )  # fmt: skip
    metrics = Metrics(version="1", model="m", topology="EP1DP1")
    metrics.set_ready(0, full)
    for _ in range(2):
        metrics.observe_stats(0, msgspec.structs.replace(stats(1), ranks=(told,), running_per_rank=(1,)))
    series = [labels for _, labels in scrape(metrics) if ("rank", "0") in labels]
    assert 50 < len(series) <= 64


def test_counted_bytes_stand_beside_measured_ones() -> None:
    replica = begun(4, wall=40.0)
    names = {name for name, _, _ in replica.samples()}
    assert not names & {"moewe_measured_memory_bytes_total", "moewe_model_error_ratio"}
    with_counter = [msgspec.structs.replace(rank, measured_bytes=7_500.0) for rank in stats(4).ranks]
    replica.observe(msgspec.structs.replace(stats(4), ranks=tuple(with_counter)), 141.0)
    values = {(name, labels): value for name, labels, value in replica.samples()}
    assert values["moewe_measured_memory_bytes_total", ("0", "1")] == 7_500.0
    assert values["moewe_model_error_ratio", ("0", "1")] == pytest.approx(4 * 1_500 / 7_500 - 1)


def test_every_metric_says_what_to_do() -> None:
    assert all(metric.when_high.endswith(".") and metric.meaning.endswith(".") for metric in METRICS)
    assert len(BY_NAME) == len(METRICS)
