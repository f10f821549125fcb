"""Native attention over KV in fp8 and int8 equals the slow reference on the values that are stored, bit by bit the same
however a prompt is cut, and its own write of K and V stores what torch would.

Blocks that are not a sequence's own hold scales that are NaN, and elements that are.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moewe.attention.batch import AttentionOptions
from moewe.attention.native_heads import HeadSteps, QkvEpilogue
from moewe.attention.paged import paged_attention
from moewe.kvcache.scaled import SMALLEST_HEAD
from moewe.kvcache.storage import KVStorage
from tests.attention.test_native_bits import SHAPES, attend, options_of, queries_of
from tests.support.attention_steps import LAYER, Shape, make_step, random_sequence
from tests.support.native import needs_native, team_of
from tests.support.numerics import assert_near, assert_same

pytestmark = needs_native
FORMATS = ["fp8", "int8"]


@given(
    kv_dtype=st.sampled_from(FORMATS),
    kind=st.sampled_from(["full", "window", "chunk", "latent"]),
    window=st.integers(1, 90),
    block_size=st.sampled_from([1, 3, 16, 64]),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 2), (5, 1), (24, 1), (40, 2)]),
    widths=st.sampled_from([(8, 8), (64, 64), (80, 80), (128, 128), (96, 64), (40, 24)]),
    segments=st.lists(st.tuples(st.integers(0, 150), st.integers(1, 60)), max_size=2),
    decodes=st.lists(st.integers(1, 200), max_size=4),
    extras=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=25, deadline=None)
def test_random_steps(kv_dtype, kind, window, block_size, heads, widths, segments, decodes, extras, seed) -> None:
    if kind == "latent":
        heads = (heads[0], 1)
    shape = Shape(heads, widths, kind, window if kind in ("window", "chunk") else 0, block_size, "bfloat16", kv_dtype)
    step = make_step(shape, segments, decodes, seed=seed, stale="nothing" if seed % 2 else "foreign", native=True)
    sinks = torch.linspace(-3, 3, heads[0]) if extras else None
    options = AttentionOptions(widths[0] ** -0.5, 2.0 if extras else 0.0, sinks)
    got = paged_attention(step.q, step.storage, LAYER, step.batch, options)
    assert_near(got, step.expected(options), format="bfloat16")


@given(
    kv_dtype=st.sampled_from(FORMATS),
    name=st.sampled_from(sorted(SHAPES)),
    block_size=st.sampled_from([1, 5, 16, 64]),
    inner=st.sets(st.integers(1, 149), max_size=8),
    others=st.lists(st.integers(1, 90), max_size=3),
    seed=st.integers(0, 99),
)
@settings(max_examples=15, deadline=None)
def test_chunks_neighbours_places_and_threads_change_no_bit(kv_dtype, name, block_size, inner, others, seed) -> None:
    shape, length = replace(SHAPES[name], kv_dtype=kv_dtype), 150
    torch.manual_seed(seed)
    sequence, q = random_sequence(shape, length), queries_of(shape, length)
    options = options_of(shape, 2.0 if seed % 3 == 0 else 0.0, seed % 3 == 1)
    whole = attend(shape, q, sequence, options, cuts=[0, length])
    with team_of(1 + seed % 2):
        cuts, moved = [0, *sorted(inner), length], replace(shape, block_size=block_size)
        got = attend(moved, q, sequence, options, cuts=cuts, others=tuple(others), seed=seed, decodes=seed % 2 == 0)
    assert whole.isfinite().all()
    assert_same(got, whole)


@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_a_token_that_is_not_finite_shows_in_the_rows_that_see_it_and_no_others(kv_dtype: str) -> None:
    shape = replace(SHAPES["gqa"], kv_dtype=kv_dtype)
    torch.manual_seed(0)
    sequence, q = random_sequence(shape, 100), queries_of(shape, 100)
    expected = attend(shape, q, sequence, options_of(shape), cuts=[0, 100], others=(40, 80))
    for part, number in ((sequence.k, torch.nan), (sequence.v, torch.inf)):
        part[70, 0, 3], kept = number, part[70, 0, 3].clone()
        got = attend(shape, q, sequence, options_of(shape), cuts=[0, 100], others=(40, 80))
        part[70, 0, 3] = kept
        assert_same(got[:70], expected[:70])
        assert got[70:, :2].isnan().all()  # heads of KV head 0
        assert_same(got[70:, 2:], expected[70:, 2:])


@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_every_stored_scale_reaches_the_result(kv_dtype: str) -> None:
    """P-KVQ-01: a scale that were not passed on, or was another head's, would change nothing."""
    shape = Shape((4, 2), (32, 32), "full", 0, 16, "bfloat16", kv_dtype)
    options = options_of(shape)
    for part in range(2):
        for head in range(2):
            step = make_step(shape, [], [20], native=True)
            before = paged_attention(step.q, step.storage, LAYER, step.batch, options)
            assert step.batch.native is not None
            block = step.batch.native.tables[0]
            step.storage.pages(LAYER)[part].scales[block, 7, head] *= 2
            after = paged_attention(step.q, step.storage, LAYER, step.batch, options)
            changed = (before != after).any(-1)[0]
            assert changed.tolist() == [head == 0, head == 0, head == 1, head == 1]


def edge_rows(rows: torch.Tensor) -> torch.Tensor:
    """Put what has no ordinary scale into rows [T >= 9, heads * width]."""
    tiny = SMALLEST_HEAD / 2
    for i, value in enumerate([0.0, -0.0, tiny, 1e-38, 3.3e38, SMALLEST_HEAD]):
        rows[i] = rows[i].sign() * value
    rows[6, -1], rows[7, 0], rows[8, 1] = torch.nan, torch.inf, -torch.inf
    return rows


@given(
    kv_dtype=st.sampled_from(FORMATS),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 3)]),
    width=st.sampled_from([4, 16, 24, 80, 128]),
    spread=st.sampled_from([0.0, 3.0, 9.0]),
    seed=st.integers(0, 99),
)
@settings(max_examples=25, deadline=None)
def test_the_native_write_stores_the_bits_of_torch(kv_dtype, heads, width, spread, seed) -> None:
    torch.manual_seed(seed)
    shape = Shape(heads, (width, width), "full", 0, 4, "bfloat16", kv_dtype)
    num_heads, num_kv_heads = heads
    rows = torch.randn(12, (num_heads + 2 * num_kv_heads) * width) * (torch.randn(12, 1) * spread).exp()
    qkv = edge_rows(rows).bfloat16()
    slots = torch.randperm(20)[:12]
    mine, other = (KVStorage([shape.group()], num_blocks=5, block_size=4) for _ in range(2))
    steps = HeadSteps(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=width)
    QkvEpilogue(steps, mine, LAYER)(qkv, slots, None)
    k, v = qkv[:, num_heads * width :].view(12, 2, num_kv_heads, width).unbind(1)
    other.write(LAYER, k, v, slots)
    for layer in (0, LAYER):
        for ours, theirs in zip(mine.pages(layer), other.pages(layer), strict=True):
            assert_same(ours.elements, theirs.elements)
            assert ours.scales is not None and theirs.scales is not None
            assert_same(ours.scales, theirs.scales)
