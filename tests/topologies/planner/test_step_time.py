"""Times of steps: parts worked out by hand, and how they move with width, rows, context and links."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from moewe.topologies import KVGroup, ModelFootprint, parse_topology
from moewe.topologies.exchange_cost import ExchangeCost
from moewe.topologies.planner.architecture import Architecture, Scores
from moewe.topologies.planner.hardware import EXPERTS, Hardware, local_host
from moewe.topologies.planner.routing import zipf
from moewe.topologies.planner.step_time import Constants, Rows, Setting, StepTime, step_time

FOOTPRINT = ModelFootprint(
    name="m", num_layers=4, num_moe_layers=4, num_experts=16, top_k=2, attention_bytes=400, dense_bytes=40,
    shared_bytes=80, expert_bytes=100, embedding_bytes=60, head_bytes=50, hidden_size=10, vocab_size=5,
    kv_groups=(KVGroup(name="full", kind="full", bytes_per_token=8, num_heads=2),), max_model_len=100,
    activation_itemsize=2, flops_per_token=0, attention_shares=((2, 210),),
)  # fmt: skip
MODEL = Architecture(
    footprint=FOOTPRINT, attention_numbers=200, dense_numbers=10, router_numbers=10, shared_numbers=40,
    expert_numbers=50, head_numbers=25, attention_precision="bf16", ffn_precision="bf16",
    score_precision="bf16", row_bytes=6, scores=(Scores(decode_flops=4, prefill_flops=2),),
)  # fmt: skip
MACHINE = Hardware(
    key="m", name="m", memory_bytes=1e6, memory_bandwidth=100.0, bf16_flops=1e9, scale_up_bandwidth=1000.0,
    scale_up_size=4, scale_out_bandwidth=10.0, dispatch_latency=1.0, combine_latency=2.0, within_efficiency=0.5,
    between_dispatch_latency=10.0, between_combine_latency=20.0, between_efficiency=1.0, decode_copies="ranks",
)  # fmt: skip
FEW = Rows(decodes=2, context=10)
PLAIN = Constants(memory_efficiency=1.0, flops_efficiency=1.0, layer_seconds=0.25)


def setting(topology: str = "EP1DP1", **changes: Any) -> Setting:
    made: dict[str, Any] = {"model": MODEL, "topology": parse_topology(topology), "hardware": MACHINE}
    return Setting(**(made | {"constants": PLAIN} | changes))


def step(topology: str = "EP1DP1", rows: Rows = FEW, **changes: Any) -> StepTime:
    return step_time(setting(topology, **changes), rows)


def test_parts_by_hand_where_memory_binds() -> None:
    made = step()
    hit = 1 - (1 - 2 / 16) ** 2
    parts = {part.name: part for part in made.parts}
    assert parts["attention weights"].seconds == pytest.approx(4.0)
    assert parts["KV and scores"].num_bytes == 2 * 10 * 8
    assert parts["dense weights"].num_bytes == 40 and parts["shared experts"].num_bytes == 80
    assert parts["routed experts"].num_bytes == pytest.approx(4 * 16 * 100 * hit)
    assert parts["output head"].num_bytes == 50 and parts["launch"].seconds == 1.0
    assert set(parts) == {
        "attention weights", "KV and scores", "dense weights", "shared experts", "routed experts", "output head",
        "rows between products", "launch",
    }  # fmt: skip
    read = 400 + 160 + 40 + 80 + 6400 * hit + 50
    assert parts["rows between products"].num_bytes == 2 * 6
    assert made.seconds == pytest.approx((read + 12) / 100 + 1)
    assert made.saturation == pytest.approx(read / 100 / made.seconds) and made.binds == "memory"


def test_parts_by_hand_where_arithmetic_binds() -> None:
    slow = replace(MACHINE, bf16_flops=1.0)
    made = step(hardware=slow)
    read = {part.name: part.num_bytes / 100 for part in made.parts}
    assert made.part("attention weights").seconds == read["attention weights"] + 2 * 200 * 2
    assert made.part("routed experts").seconds == pytest.approx(read["routed experts"] + 2 * 50 * 4 * 2 * 2)
    assert made.part("KV and scores").seconds == pytest.approx(read["KV and scores"] + 2 * 10 * 4)
    assert made.binds == "compute"
    drafted = step(rows=Rows(decodes=2, context=10, queries=2), hardware=slow)
    assert drafted.part("KV and scores").flops == 2 * made.part("KV and scores").flops
    assert drafted.part("KV and scores").num_bytes == made.part("KV and scores").num_bytes


def test_an_exchange_by_hand() -> None:
    made = step("EP4DP1")
    places = 4 * (1 - 12 * 11 / (16 * 15))
    row = 10 * (2 + 2)
    moved = 4 * 2 * places * 3 / 4 * row
    assert made.part("exchange").num_bytes == pytest.approx(moved)
    assert made.part("exchange").seconds == pytest.approx(4 * 3 + moved / 500)
    each = step("EP4DP1", hardware=replace(MACHINE, decode_copies=EXPERTS))
    assert each.part("exchange").num_bytes == pytest.approx(4 * 2 * 2 * 3 / 4 * row)


def test_beyond_a_domain_the_slow_link_decides() -> None:
    made = step("EP8DP1")
    places = 8 * (1 - 14 * 13 / (16 * 15))
    assert made.part("exchange").seconds == pytest.approx(4 * 30 + 4 * 2 * places * 4 / 8 * 40 / 10)
    assert made.binds == "link"
    prompts = step("EP8DP1", Rows(chunk=2, chunk_context=10))
    domains = 2 * (1 - 8 * 7 / (16 * 15))  # once to the other domain, where links inside pass it on
    assert prompts.part("exchange").seconds == pytest.approx(4 * 30 + 4 * 2 * domains / 2 * 40 / 10)


def test_wider_groups_read_fewer_expert_bytes_and_hit_more_of_them() -> None:
    bytes_at = [step(f"EP{x}DP1").part("routed experts").num_bytes for x in (1, 2, 4)]
    assert bytes_at == sorted(bytes_at, reverse=True)
    assert bytes_at[0] / 4 < bytes_at[2] < bytes_at[0]


def test_redundant_slots_level_what_popularity_makes_uneven() -> None:
    skewed = zipf(1.2, 16)
    even, uneven = step("EP4DP1"), step("EP4DP1", popularity=skewed)
    assert uneven.part("imbalance").seconds > even.part("imbalance").seconds
    level = step("EP4DP1[red=4]", popularity=skewed)
    assert level.part("imbalance").seconds < uneven.part("imbalance").seconds


def test_heads_divided_over_ranks() -> None:
    whole, divided = step("EP2DP1"), step("EP2DP1[adp=1,atp=2]", Rows(decodes=4, context=10))
    assert divided.part("attention weights").num_bytes == 210
    assert divided.part("KV and scores").num_bytes == 4 * 10 * 4  # twice the sequences, half the heads
    assert divided.part("routed experts").num_bytes == whole.part("routed experts").num_bytes
    assert divided.part("attention exchange").seconds > 0
    assert "attention exchange" not in {part.name for part in whole.parts}


def test_windows_bound_what_is_read() -> None:
    group = replace(FOOTPRINT.kv_groups[0], kind="window", window=3)
    model = replace(MODEL, footprint=replace(FOOTPRINT, kv_groups=(group,)))
    assert step(model=model).part("KV and scores").num_bytes == 2 * 3 * 8


def test_overlap_hides_no_more_than_there_is() -> None:
    plain, hidden = step("EP4DP1"), step("EP4DP1", overlap=True)
    assert 0 < hidden.hidden_seconds <= plain.part("exchange").seconds
    again = hidden.part("experts read twice").seconds
    assert again > 0  # few rows: both halves hit experts of their own
    assert hidden.seconds == pytest.approx(plain.seconds + again - hidden.hidden_seconds)


def test_a_shared_host_divides_its_memory() -> None:
    shared = replace(MACHINE, is_shared=True, scale_up_size=64)
    one, two = step(hardware=shared), step("EP1DP2", hardware=shared)
    assert two.part("attention weights").seconds == pytest.approx(2 * one.part("attention weights").seconds)


def test_a_dense_model_has_no_experts_and_no_exchange() -> None:
    dense = replace(MODEL, footprint=replace(FOOTPRINT, num_moe_layers=0, num_experts=0, top_k=0, expert_bytes=0))
    names = {part.name for part in step("EP1DP4", model=dense).parts}
    assert not names & {"routed experts", "exchange", "imbalance"}


def test_an_exchange_that_somebody_measured_takes_what_was_measured() -> None:
    cost = ExchangeCost(name="all_to_all", fixed_s=0.5, within_s=0.01, between_s=0.1)
    one, apart = step("EP2DP1", link=cost), step("EP2DP1[domains=1+1]", link=cost)
    rows, hit = 2.0, 1 - (1 - 1 / 2) ** 2
    num_bytes = 4 * rows * 20 * (hit + 2 / 2)  # out once to the other rank, back for each choice, half of them there
    assert one.part("exchange").num_bytes == pytest.approx(num_bytes)
    assert one.part("exchange").seconds == pytest.approx(4 * 0.5 + num_bytes * 0.01)
    assert apart.part("exchange").seconds == pytest.approx(4 * 0.5 + num_bytes * 0.1)
    inside = replace(cost, between_s=0.0)
    assert step("EP2DP1[domains=1+1]", link=inside) == step("EP2DP1[domains=1+1]"), "nobody measured that link"
    half = step("EP2DP1", Rows(decodes=0.5, context=10), link=cost)
    assert half.part("exchange").num_bytes == pytest.approx(num_bytes / 4), "half a row sends half of what one does"


def test_a_step_takes_time_beside_its_layers() -> None:
    made = step(constants=replace(PLAIN, step_seconds=3.0))
    assert made.part("launch").seconds == 1.0 + 3.0


def test_ranks_of_a_host_share_what_its_cores_reach() -> None:
    host = local_host(cores=2, memory_bytes=1e9, memory_bandwidth=100.0, bf16_flops=1e9, int8_flops=0.0)
    alone, two = setting(hardware=host), setting("EP1DP2", hardware=host)
    assert (alone.bandwidth, two.bandwidth) == (100.0, 50.0) and two.rate("bf16") == 5e8
