"""Blocks of cache groups: what a sequence needs at once, what bytes buy, and how far it reaches."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moewe.kvcache.groups import first_visible
from moewe.topologies import KVGroup, StepLimits, byte_budget, parse_topology
from moewe.topologies import kv_sizes as sizes
from tests.topologies.test_budget import MODEL

LIMITS = StepLimits(max_num_batched_tokens=32, max_model_len=200, max_num_seqs=4, block_size=4)
FULL = KVGroup(name="full", kind="full", bytes_per_token=10)
WINDOW = KVGroup(name="window8", kind="window", window=8, bytes_per_token=30)
CHUNK = KVGroup(name="chunk10", kind="chunk", window=10, bytes_per_token=5)
LATENT = KVGroup(name="latent", kind="latent", bytes_per_token=7)
MODELS = {
    "full": (FULL,),
    "latent": (LATENT,),
    "window and full": (WINDOW, FULL),
    "chunk and full": (CHUNK, FULL),
    "window alone": (WINDOW,),
    "three": (WINDOW, FULL, CHUNK),
}


@given(
    kind=st.sampled_from(["full", "latent", "window", "chunk"]),
    window=st.integers(1, 30),
    num_tokens=st.integers(1, 200),
    block_size=st.integers(1, 9),
)
def test_a_sequence_needs_what_its_hungriest_row_needs(kind: str, window: int, num_tokens: int, block_size: int):
    def needs(row: int) -> int:
        return row // block_size - first_visible(kind, window, row) // block_size + 1

    exact = max(needs(row) for row in range(num_tokens))
    found = sizes.sequence_blocks(kind, window, num_tokens, block_size)
    assert exact <= found <= -(-num_tokens // block_size)
    if num_tokens > (block_size + 1) * window + block_size or kind in ("full", "latent"):  # long enough for the worst
        assert found == exact


def test_windowed_groups_get_what_their_windows_and_a_step_need_and_the_others_what_is_given():
    # A window of 8 may lie over 3 blocks, a run of 10 over 4; 32 rows are 8 blocks, and each of 4 chunks may begin one.
    assert sizes.useful_blocks(WINDOW, LIMITS) == 4 * 3 + 8 + 4
    assert sizes.useful_blocks(CHUNK, LIMITS) == 4 * 3 + 8 + 4
    assert sizes.useful_blocks(FULL, LIMITS) == sizes.useful_blocks(LATENT, LIMITS) == 4 * 50
    assert sizes.group_blocks(MODELS["three"], LIMITS, 100) == (24, 100, 24)
    assert sizes.group_blocks(MODELS["three"], LIMITS, 9) == (9, 9, 9)
    assert sizes.kv_bytes(MODELS["window and full"], LIMITS, 100) == 4 * (24 * 30 + 100 * 10)
    wide = replace(WINDOW, window=1000)
    assert sizes.group_blocks((wide,), LIMITS, 1000) == (4 * 50,), "no window is wider than the longest sequence"


@pytest.mark.parametrize("name", MODELS)
def test_bytes_buy_as_many_blocks_as_fit(name: str):
    groups = MODELS[name]
    for num_bytes in (-5, 0, 39, 40, 160, 161, 3000, 4400, 10_000, 100_000):
        found = sizes.blocks_in(groups, LIMITS, num_bytes)
        assert sizes.kv_bytes(groups, LIMITS, found) <= max(0, num_bytes)
        more = sizes.kv_bytes(groups, LIMITS, found + 1)
        assert more > num_bytes or found == sizes.most_useful(groups, LIMITS)
    for num_blocks in (1, 5, 24, 100):
        again = sizes.blocks_in(groups, LIMITS, sizes.kv_bytes(groups, LIMITS, num_blocks))
        assert sizes.group_blocks(groups, LIMITS, again) == sizes.group_blocks(groups, LIMITS, num_blocks)


@pytest.mark.parametrize(
    ("name", "num_blocks", "longest"),
    [("full", 10, 40), ("full", 50, 200), ("full", 99, 200), ("window and full", 10, 40), ("window alone", 2, 8),
     ("window alone", 3, 200), ("three", 2, 8), ("latent", 3, 12)],
)  # fmt: skip
def test_the_longest_sequence_is_that_of_the_scarcest_group(name: str, num_blocks: int, longest: int):
    assert sizes.longest_sequence(MODELS[name], LIMITS, num_blocks) == longest


@pytest.mark.parametrize("name", MODELS)
def test_the_least_that_holds_a_sequence_holds_it(name: str):
    groups = MODELS[name]
    least = sizes.blocks_to_hold(groups, LIMITS)
    assert sizes.longest_sequence(groups, LIMITS, least) == 200
    assert sizes.longest_sequence(groups, LIMITS, least - 1) < 200


def test_concurrency_is_that_of_the_scarcest_group():
    assert sizes.max_concurrency(MODELS["window and full"], LIMITS, 100, 200) == 2
    assert sizes.max_concurrency(MODELS["window and full"], LIMITS, 1000, 200) == 24 // 3
    assert sizes.max_concurrency(MODELS["window alone"], LIMITS, 1000, 5) == 24 // 2


def test_the_budget_shows_kv_by_group_and_what_a_window_saves():
    limits = StepLimits(max_num_batched_tokens=32, max_model_len=4096, max_num_seqs=4, block_size=16)

    def budget(*groups: KVGroup, **changes: int):
        options = {"rank_memory_bytes": 8 << 30} | changes
        return byte_budget(replace(MODEL, kv_groups=groups), parse_topology("EP1DP1"), limits, **options)

    both = budget(FULL, WINDOW)
    blocks = 4 * 2 + 32 // 16 + 4
    assert both.group_blocks == (1024, blocks) and both.num_blocks == 1024
    lines = {line.name: line.num_bytes for line in both.lines if line.kind == "kv"}
    assert lines == {
        "KV cache, full (2 groups)": 1024 * 160, "KV cache, window8 (2 groups)": blocks * 480,
    }  # fmt: skip
    assert "full 1,024 (16,384 tokens), window8 14 (224 tokens); max concurrency at 4,096 tokens: 4" in both.table()
    assert both.longest_sequence == 4096
    kv_bytes = 100 * 160 + blocks * 480
    assert budget(FULL, WINDOW, kv_bytes=kv_bytes + 159).group_blocks == (100, blocks)
    assert budget(FULL, WINDOW, kv_bytes=kv_bytes).longest_sequence == 1600


def test_latent_rows_are_not_split_over_ranks_that_split_heads():
    def token_bytes(group: KVGroup) -> int:
        made = byte_budget(
            replace(MODEL, kv_groups=(group,)), parse_topology("EP4DP1[atp=2]"),
            replace(LIMITS, max_model_len=64, block_size=16), rank_memory_bytes=8 << 30,
        )  # fmt: skip
        return sum(own.bytes_per_token for own in made.kv_groups)

    assert (token_bytes(replace(FULL, num_heads=2)), token_bytes(LATENT)) == (5, 7)
    assert token_bytes(replace(FULL, num_heads=1)) == 10, "two ranks share a head"
