"""Paged attention equals the slow reference on mixed steps, whatever blocks the sequences lie in.

Every block that is not a sequence's own, or lies before what its rows see, holds NaN.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moewe.attention import paged, reference
from moewe.attention.batch import AttentionOptions
from moewe.attention.build import build_attention_batch
from moewe.attention.paged import paged_attention
from moewe.kvcache.storage import KVStorage
from tests.support.attention_steps import (
    LAYER,
    Rows,
    Shape,
    Step,
    expected_row,
    fill_with_nan,
    make_step,
    random_sequence,
    write,
)
from tests.support.numerics import assert_near, assert_same
from tests.support.pairwise import each_pair

STEPS = {
    "nothing": ([], []),
    "one_decode": ([], [1]),
    "block_borders": ([], [3, 4, 5, 8, 9]),
    "one_long_many_short": ([], [1, 2, 40, 3, 2]),
    "buckets": ([], [3, 33, 70, 65, 7, 140]),
    "whole_prompt": ([(0, 9)], []),
    "chunk_behind_context": ([(7, 5)], []),
    "chunk_of_one": ([(0, 1), (6, 1), (12, 1)], []),
    "mixed": ([(0, 3), (10, 6), (4, 1), (16, 9)], [17, 1, 5]),
}
KINDS = {
    "full": Shape(),
    "window_1": Shape(kind="window", window=1),
    "window_of_a_block": Shape(kind="window", window=4),
    "window_odd": Shape(kind="window", window=7),
    "window_longer_than_all": Shape(kind="window", window=500),
    "chunk_of_a_block": Shape(kind="chunk", window=4),
    "chunk_odd": Shape(kind="chunk", window=6),
    "chunk_of_blocks": Shape(kind="chunk", window=16),
    "narrow_keys": Shape(widths=(16, 24)),
    "narrow_keys_window": Shape(widths=(16, 24), kind="window", window=6),
    "latent": Shape(heads=(6, 1), widths=(40, 32), kind="latent"),
}
SINKS = torch.tensor([20.0, -20.0, 0.0, 1.5, -0.7, 3.0])
OPTIONS = {"plain": (0.0, False), "cap": (0.8, False), "sinks": (0.0, True), "cap_and_sinks": (2.0, True)}


def options_of(name: str, num_heads: int, scale: float = 0.3) -> AttentionOptions:
    cap, sinks = OPTIONS[name]
    return AttentionOptions(scale, cap, SINKS[:num_heads].clone() if sinks else None)


def check(step: Step, options: AttentionOptions) -> None:
    got = paged_attention(step.q, step.storage, LAYER, step.batch, options)
    assert got.dtype == step.q.dtype
    expected = step.expected(options)
    assert_near(got, expected, format=step.shape.dtype)
    assert_near(reference.paged_attention(step.q, step.storage, LAYER, step.batch, options), expected, format="float32")


@each_pair(step=STEPS.keys(), kind=KINDS.keys(), options=OPTIONS.keys())
def test_every_kind_with_all_options(step: str, kind: str, options: str) -> None:
    for stale in ("foreign", "nothing") if options == "plain" else ("foreign",):  # tables know nothing of options
        check(make_step(KINDS[kind], *STEPS[step], stale=stale), options_of(options, KINDS[kind].heads[0]))


@each_pair(
    step=STEPS.keys(),
    options=["plain", "cap_and_sinks"],  # the two paths
    dtype=["float32", "bfloat16", "float16"],
    heads={"mha": (4, 4), "gqa": (4, 2), "mqa": (6, 1)},
)
def test_every_format_and_grouping(step: str, options: str, dtype: str, heads: tuple[int, int]) -> None:
    for kind, window in (("full", 0), ("window", 6)):
        shape = Shape(heads=heads, kind=kind, window=window, dtype=dtype)
        check(make_step(shape, *STEPS[step]), options_of(options, heads[0]))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_latent_in_half_formats(dtype: str) -> None:
    shape = Shape(heads=(6, 1), widths=(40, 32), kind="latent", dtype=dtype)
    check(make_step(shape, *STEPS["mixed"]), AttentionOptions(0.2))


@given(
    kind=st.sampled_from(["full", "window", "chunk", "latent"]),
    window=st.integers(1, 20),
    block_size=st.sampled_from([1, 2, 4, 16]),
    segments=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 25)), max_size=3),
    decodes=st.lists(st.integers(1, 60), max_size=6),
    options=st.sampled_from(sorted(OPTIONS)),
    num_kv_heads=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
def test_random_steps(kind, window, block_size, segments, decodes, options, num_kv_heads, seed) -> None:
    shape = Shape(
        heads=(4, 1 if kind == "latent" else num_kv_heads),
        widths=(8, 5) if kind == "latent" or seed % 3 == 0 else (8, 8),
        kind=kind,
        window=window if kind in ("window", "chunk") else 0,
        block_size=block_size,
    )
    step = make_step(shape, segments, decodes, seed=seed, stale="nothing" if seed % 2 else "foreign")
    check(step, options_of(options, 4))
    assert step.batch.kv_tokens_read == step.tokens_seen() and step.batch.pairs_scored == step.pairs_scored()


@each_pair(
    kind=["full", "window_of_a_block", "window_odd", "chunk_odd", "chunk_of_blocks", "latent"],
    options=["plain", "cap_and_sinks"],
    chunk=[1, 5, 7, 33],
)
def test_a_prompt_in_chunks_with_blocks_freed_behind_it(kind: str, options: str, chunk: int) -> None:
    shape, length = KINDS[kind], 33
    torch.manual_seed(0)
    sequence = random_sequence(shape, length)
    q = torch.randn(length, shape.heads[0], shape.widths[0])
    blocks = -(-length // shape.block_size)
    table = np.random.default_rng(0).permutation(blocks).astype(np.int64)
    storage = KVStorage([shape.group()], num_blocks=blocks, block_size=shape.block_size)
    for start in range(0, length, chunk):
        stop = min(start + chunk, length)
        write(storage, shape, sequence, range(start, stop), table)
        freed = reference.first_seen(shape.kind, shape.window, start) // shape.block_size
        fill_with_nan(storage, table[:freed])
        batch = build_attention_batch(
            slot_mapping=np.zeros(stop - start, np.int64),
            segments=[Rows(0, stop - start, start, table[: -(-stop // shape.block_size)])],
            decode_lengths=np.zeros(0, np.int64),
            decode_tables=np.zeros((0, 0), np.int64),
            block_size=shape.block_size,
            device=torch.device("cpu"),
            kind=shape.kind,
            window=shape.window,
        )
        chosen = options_of(options, shape.heads[0])
        got = paged_attention(q[start:stop], storage, LAYER, batch, chosen)
        for i, row in enumerate(got):
            expected = expected_row(shape, q[start + i], sequence, start + i, chosen)
            assert_near(row, expected, format="float32")


@pytest.mark.parametrize("options", ["plain", "sinks"])
@pytest.mark.parametrize(("kind", "window"), [("window", 8), ("chunk", 24)])
def test_a_long_prompt_behind_a_short_window(kind: str, window: int, options: str) -> None:
    """Whole tiles of keys are masked for its last rows."""
    shape = Shape(kind=kind, window=window, heads=(2, 1), widths=(4, 4))
    step = make_step(shape, [(3, 1100)], [])
    assert len(step.batch.prefills) == 3
    check(step, options_of(options, 2))


def test_sinks_take_their_part_of_the_softmax() -> None:
    """One key with score 0 against a sink of s leaves 1 / (1 + e^s) of the value."""
    shape = Shape(heads=(6, 2))
    step = make_step(shape, [], [1])
    got = paged_attention(torch.zeros_like(step.q), step.storage, LAYER, step.batch, AttentionOptions(1.0, 0.0, SINKS))
    value = step.sequences[0].v[0].double().repeat_interleave(3, 0)
    assert_near(got[0], value * torch.sigmoid(-SINKS.double())[:, None], format="float32")


@pytest.mark.parametrize(("sink", "left"), [(500.0, 0.0), (-500.0, 1.0), (-float("inf"), 1.0)])
def test_sinks_far_from_the_scores_leave_nothing_or_all(sink: float, left: float) -> None:
    step = make_step(Shape(), [], [1])
    options = AttentionOptions(1.0, sinks=torch.full((4,), sink))
    got = paged_attention(step.q, step.storage, LAYER, step.batch, options)
    assert_near(got[0], left * step.sequences[0].v[0].double().repeat_interleave(2, 0), format="float32")


def test_scores_beyond_the_cap_weigh_alike() -> None:
    shape = Shape(heads=(2, 2), widths=(4, 4))
    step = make_step(shape, [], [2])
    step.sequences[0].k[...] = torch.tensor([1e3, 2e3]).view(2, 1, 1)
    write(step.storage, shape, step.sequences[0], range(2), step.batch.decodes[0].block_table[0].numpy())
    got = paged_attention(torch.ones_like(step.q), step.storage, LAYER, step.batch, AttentionOptions(1.0, 30.0))
    assert_near(got[0], step.sequences[0].v.double().mean(0), format="float32")


@pytest.mark.parametrize("kind", ["full", "window_odd", "latent"])
def test_rows_computed_in_parts_get_the_same(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step = make_step(KINDS[kind], [(5, 11), (0, 6)], [9, 20, 6])
    options = options_of("cap_and_sinks", KINDS[kind].heads[0])
    monkeypatch.setattr(paged, "MOST_SCORES", 2 * KINDS[kind].heads[0] * 16)
    check(step, options)
    monkeypatch.setattr(paged, "MOST_SCORES", 1)
    check(step, options)


def test_only_options_and_widths_leave_the_fused_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged, "_spelled_out", lambda *args: pytest.fail("plain groups take the fused call"))
    for kind in ("full", "window_odd", "chunk_odd"):
        check(make_step(KINDS[kind], *STEPS["mixed"]), AttentionOptions(0.3))


def test_latent_values_are_not_gathered_again(monkeypatch: pytest.MonkeyPatch) -> None:
    step, gathered = make_step(KINDS["latent"], [(2, 3)], [5]), []
    gather = paged._gather
    monkeypatch.setattr(paged, "_gather", lambda *args: gathered.append(args[0].elements.shape[-1]) or gather(*args))
    check(step, AttentionOptions(0.2))
    assert gathered == [40, 40]


def test_a_row_in_no_piece_shows_in_the_reference() -> None:
    step = make_step(Shape(), [], [3])
    q = torch.cat([step.q, step.q])
    assert reference.paged_attention(q, step.storage, LAYER, step.batch, AttentionOptions(1.0))[1].isnan().all()


@pytest.mark.parametrize("kind", ["full", "window_odd", "chunk_odd"])
def test_rows_read_only_their_own_blocks(kind: str) -> None:
    step = make_step(KINDS[kind], [(20, 3)], [5, 29])
    before = paged_attention(step.q, step.storage, LAYER, step.batch, AttentionOptions(0.3))
    used = {int(b) for bucket in step.batch.decodes for b in bucket.block_table.flatten()}
    used |= {int(b) for segment in step.batch.prefills for b in segment.block_table}
    fill_with_nan(step.storage, np.array([b for b in range(step.storage.num_blocks[0]) if b not in used]))
    assert_same(paged_attention(step.q, step.storage, LAYER, step.batch, AttentionOptions(0.3)), before)
