"""The byte budget: lines that add up, and refusals whose advice works."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from moewe.topologies import (
    ByteBudget,
    KVGroup,
    ModelFootprint,
    StepLimits,
    TopologyError,
    byte_budget,
    check_fits,
    check_runnable,
    format_bytes,
    parse_topology,
)
from moewe.topologies.budget import most_moves

GIB = 1 << 30
MIB = 1 << 20
MODEL = ModelFootprint(
    name="m",
    num_layers=4,
    num_moe_layers=4,
    num_experts=16,
    top_k=2,
    attention_bytes=40 * MIB,
    dense_bytes=1 * MIB,
    shared_bytes=8 * MIB,
    expert_bytes=32 * MIB,
    embedding_bytes=64 * MIB,
    head_bytes=0,
    kv_groups=(KVGroup(name="full", kind="full", bytes_per_token=4096),),
    hidden_size=1024,
    vocab_size=32000,
    max_model_len=4096,
    activation_itemsize=2,
    flops_per_token=1,
)
DENSE = replace(MODEL, num_moe_layers=0, num_experts=0, top_k=0, expert_bytes=0)


def budget(
    topology: str = "EP1DP1",
    model: ModelFootprint = MODEL,
    *,
    rank_memory_bytes: int = 8 * GIB,
    kv_bytes: int | None = None,
    **limits: int,
) -> ByteBudget:
    usual = {"max_num_batched_tokens": 128, "max_model_len": 4096, "max_num_seqs": 64, "block_size": 16}
    return byte_budget(
        model,
        parse_topology(topology),
        StepLimits(**usual | limits),
        rank_memory_bytes=rank_memory_bytes,
        kv_bytes=kv_bytes,
    )


def test_weights_add_up_to_the_model_at_one_rank() -> None:
    assert budget().of_kind("weights") == MODEL.total_bytes
    assert budget(model=DENSE).of_kind("weights") == DENSE.total_bytes


def test_experts_are_split_and_the_rest_is_replicated() -> None:
    assert budget("EP4DP2").of_kind("weights") == MODEL.replicated_bytes + MODEL.routed_bytes // 4
    # 16 + 2 slots over 4 ranks: the fullest rank holds 5.
    assert budget("EP4DP1[red=2]").of_kind("weights") == MODEL.replicated_bytes + 5 * 4 * 32 * MIB
    lines = {line.name: line.num_bytes for line in budget("EP4DP1[red=2]").lines}
    assert lines["redundant expert slots (1 a layer)"] == 4 * 32 * MIB
    # 16 experts over 3 ranks: 6, 5, 5.
    assert budget("EP3DP1").of_kind("weights") == MODEL.replicated_bytes + 6 * 4 * 32 * MIB


def test_kv_takes_what_is_left_in_whole_blocks_but_no_more_than_is_useful() -> None:
    small = budget(rank_memory_bytes=3 * GIB)
    assert small.total <= 3 * GIB < small.total + 16 * 4096
    assert small.kv_bytes == small.num_blocks * 16 * 4096
    useful = budget(rank_memory_bytes=100 * GIB, max_num_seqs=8)
    assert useful.num_blocks * 16 == 8 * 4096
    assert useful.max_concurrency(4096) == 8 and useful.max_concurrency(4097) == 7
    assert budget("EP2DP3", rank_memory_bytes=100 * GIB, max_num_seqs=8).max_concurrency(4096) == 8 * 6
    assert budget(kv_bytes=10 * 16 * 4096).num_blocks == 10


def test_table_names_every_line_and_the_concurrency() -> None:
    table = budget("EP2DP1").table()
    for word in (
        "attention",
        "routed experts (8 of 16 a layer)",
        "KV cache",
        "exchange",
        "reserve",
        "total",
        "8.00 GiB",
    ):
        assert word in table
    assert "max concurrency at 4,096 tokens: 128" in table
    assert "redundant" not in table and "head" not in table


def test_a_budget_that_fits_passes() -> None:
    check_fits(budget())
    check_fits(budget("EP4DP2"))


def refusal(made: ByteBudget, host_bytes: int | None = None) -> str:
    with pytest.raises(TopologyError) as error:
        check_fits(made, host_bytes=host_bytes)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_too_small_gpus_are_told_the_width_that_fits() -> None:
    message = refusal(budget(rank_memory_bytes=2 * GIB))
    wider = re.search(r"use (EP\d+DP1)", message)
    assert wider is not None
    check_fits(budget(wider[1], rank_memory_bytes=2 * GIB, max_model_len=16))
    assert "EP2DP1" in message


def test_a_host_is_told_fewer_ranks() -> None:
    message = refusal(budget("EP2DP4", rank_memory_bytes=6 * GIB // 8), host_bytes=6 * GIB)
    assert "use EP2DP1" in message or "use EP2DP2" in message


def test_other_remedies() -> None:
    assert "--dtype bfloat16" in refusal(
        budget(model=replace(MODEL, activation_itemsize=4), rank_memory_bytes=2 * GIB), host_bytes=2 * GIB
    )
    assert "smaller model" in refusal(budget(rank_memory_bytes=GIB), host_bytes=GIB)
    assert "--max-num-batched-tokens" in refusal(budget(max_num_batched_tokens=1 << 20))


def test_kv_that_cannot_be_is_told_what_could() -> None:
    message = refusal(budget(kv_bytes=20 * GIB))
    most = re.search(r"use at most (\d+)", message)
    assert most is not None
    check_fits(budget(kv_bytes=int(most[1])))
    message = refusal(budget(kv_bytes=100 * 16 * 4096))
    assert "--max-model-len 1600" in message
    least = re.search(r"at least (\d+)", message)
    assert least is not None
    check_fits(budget(kv_bytes=int(least[1])))


@pytest.mark.parametrize(
    ("topology", "options", "word"),
    [
        ("EP4DP1[red=25]", {"num_experts": 8}, "8 experts on 4 ranks); use red=24 or less"),
        ("EP1DP2[red=1]", {"num_experts": 8}, "use red=0"),
        ("EP1DP1[red=1]", {"num_experts": 0}, "use red=0"),
        ("EP4DP1", {"num_experts": 0}, "use EP1DP4"),
        ("EP9DP1", {"num_experts": 8}, "use EP8DP1"),
        ("EP8DP8", {"num_experts": 256, "num_ranks_available": 8, "unit": "GPU"},
         "needs 64 GPUs (8 x 8), this machine has 8; did you mean EP8DP1?"),
        ("EP4DP4", {"num_experts": 256, "num_ranks_available": 9}, "EP4DP2?"),
    ],
)  # fmt: skip
def test_what_cannot_run_is_refused(topology: str, options: dict[str, Any], word: str) -> None:
    with pytest.raises(TopologyError) as error:
        check_runnable(parse_topology(topology), **options)
    assert word in str(error.value)


def test_what_can_run_passes() -> None:
    check_runnable(parse_topology("EP4DP2"), num_experts=10)
    check_runnable(parse_topology("EP4DP1[red=24]"), num_experts=8)
    check_runnable(parse_topology("EP4DP2[atp=2]"), num_experts=10)
    check_runnable(parse_topology("EP1DP2"), num_experts=0, num_ranks_available=2)


def test_ranks_that_divide_heads_hold_a_part_of_attention_and_run_the_same_rows() -> None:
    kv = (KVGroup(name="full", kind="full", bytes_per_token=4096, num_heads=2),)
    model = replace(MODEL, kv_groups=kv, attention_shares=((2, 21 * MIB), (4, 11 * MIB)))
    apart, halves, fourths = (budget(f"EP4DP1[atp={atp}]", model) for atp in (1, 2, 4))
    lines = [{line.name: line.num_bytes for line in each.lines} for each in (apart, halves, fourths)]
    assert [each["attention weights"] // MIB for each in lines] == [40, 21, 11]
    assert [each.kv_groups[0].bytes_per_token for each in (apart, halves, fourths)] == [4096, 2048, 2048]
    exchange = [each["exchange buffers (worst case)"] for each in lines]
    row, received = 1024 * 2, 128 * 2  # each of 128 tokens to both of its experts
    joined = {4: 0, 2: 2 * 128 * row, 1: 2 * 128 * row}  # what ranks of an attention replica offer each other, in turns
    assert exchange == [2 * row * (adp * received + received // (4 // adp)) + joined[adp] for adp in (4, 2, 1)]
    assert [each.max_concurrency(4096) for each in (apart, halves, fourths)] == [256, 128, 64]
    assert budget("EP4DP1[atp=2]").of_kind("weights") == apart.of_kind("weights") - 20 * MIB, "equal parts"


def test_experts_on_their_way_are_held_aside() -> None:
    assert [most_moves(size) for size in (1, 32 * MIB, 64 * MIB, 100 * MIB, 1 << 40)] == [8, 8, 4, 2, 2]

    def aside(topology: str, model: ModelFootprint) -> list[int]:
        lines = budget(topology, model, moves_experts=True).lines
        return [line.num_bytes for line in lines if "on their way" in line.name]

    assert aside("EP4DP1", MODEL) == [most_moves(MODEL.expert_bytes) * MODEL.expert_bytes]
    assert aside("EP1DP1", MODEL) == aside("EP1DP1", DENSE) == []


def test_format_bytes() -> None:
    assert [format_bytes(number) for number in (0, 1023, 1536, 3 * GIB)] == ["0 B", "1,023 B", "1.50 KiB", "3.00 GiB"]


def test_block_tables_on_a_gpu_are_paid_for_before_kv() -> None:
    with_tables, without = (budget(rank_memory_bytes=3 * GIB, has_tables=has) for has in (True, False))
    counted = with_tables.fixed_bytes - without.fixed_bytes
    assert counted == {line.name: line.num_bytes for line in with_tables.lines}["block tables (worst case)"]
    assert counted > 2 * 64 * (4096 // 16) * 4, "a table of 4,096 tokens for each of 64 sequences, twice"
    assert abs(without.kv_bytes - with_tables.kv_bytes - counted) < 16 * 4096, "KV gets so much less, to a block"
