"""Native attention equals the slow reference on mixed steps, whatever blocks the sequences lie in.

Every block that is not a sequence's own, or lies before what its rows see, holds NaN. Bits are another file's affair.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moewe.attention.batch import AttentionOptions
from moewe.attention.paged import paged_attention
from moewe.native.library import load
from tests.attention.test_paged import KINDS, OPTIONS, SINKS, STEPS, options_of
from tests.support.attention_steps import LAYER, Shape, Step, make_step, write
from tests.support.numerics import assert_near
from tests.support.pairwise import each_pair

pytestmark = pytest.mark.skipif(load() is None, reason="no native kernels here")


def check(step: Step, options: AttentionOptions) -> None:
    got = paged_attention(step.q, step.storage, LAYER, step.batch, options)
    assert got.dtype == step.q.dtype
    assert_near(got, step.expected(options), format="bfloat16")


def shape_of(kind: str) -> Shape:
    made = KINDS[kind]
    return Shape(made.heads, made.widths, made.kind, made.window, made.block_size, "bfloat16")


@each_pair(step=STEPS.keys(), kind=KINDS.keys(), options=OPTIONS.keys())
def test_every_kind_with_all_options(step: str, kind: str, options: str) -> None:
    shape = shape_of(kind)
    for stale in ("foreign", "nothing"):
        check(make_step(shape, *STEPS[step], stale=stale, native=True), options_of(options, shape.heads[0]))


@given(
    kind=st.sampled_from(["full", "window", "chunk"]),
    window=st.integers(1, 90),
    block_size=st.sampled_from([1, 3, 4, 16, 32, 48, 64]),
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 2), (5, 1), (16, 1), (24, 1), (40, 2)]),
    widths=st.sampled_from([(8, 8), (64, 64), (80, 80), (96, 96), (128, 128), (256, 256), (96, 64), (40, 72)]),
    segments=st.lists(st.tuples(st.integers(0, 150), st.integers(1, 90)), max_size=2),
    decodes=st.lists(st.integers(1, 200), max_size=4),
    options=st.sampled_from(sorted(OPTIONS)),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_random_steps(kind, window, block_size, heads, widths, segments, decodes, options, seed) -> None:
    shape = Shape(heads, widths, kind, window if kind in ("window", "chunk") else 0, block_size, "bfloat16")
    step = make_step(shape, segments, decodes, seed=seed, stale="nothing" if seed % 2 else "foreign", native=True)
    scale = widths[0] ** -0.5
    sinks = torch.linspace(-3, 3, heads[0]) if "sinks" in options else None
    check(step, AttentionOptions(scale, OPTIONS[options][0], sinks))
    assert step.batch.kv_tokens_read == step.tokens_seen() and step.batch.pairs_scored == step.pairs_scored()


@given(
    block_size=st.sampled_from([1, 16, 24]),
    num_heads=st.sampled_from([1, 6, 16, 40]),
    widths=st.sampled_from([(576, 512), (40, 32), (72, 24)]),
    segments=st.lists(st.tuples(st.integers(0, 80), st.integers(1, 20)), max_size=2),
    decodes=st.lists(st.integers(1, 150), max_size=3),
    sinks=st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_random_steps_over_latents(block_size, num_heads, widths, segments, decodes, sinks) -> None:
    shape = Shape((num_heads, 1), widths, "latent", 0, block_size, "bfloat16")
    scores = torch.linspace(-2, 2, num_heads) if sinks else None
    check(make_step(shape, segments, decodes, native=True), AttentionOptions(widths[0] ** -0.5, 0.0, scores))


def test_sinks_take_their_part_of_the_softmax() -> None:
    """One key with score 0 against a sink of s leaves 1 / (1 + e^s) of the value."""
    step = make_step(Shape(heads=(6, 2), dtype="bfloat16"), [], [1], native=True)
    got = paged_attention(torch.zeros_like(step.q), step.storage, LAYER, step.batch, AttentionOptions(1.0, 0.0, SINKS))
    value = step.sequences[0].v[0].double().repeat_interleave(3, 0)
    assert_near(got[0], value * torch.sigmoid(-SINKS.double())[:, None], format="bfloat16")


@pytest.mark.parametrize(("sink", "left"), [(500.0, 0.0), (-500.0, 1.0), (-float("inf"), 1.0)])
def test_sinks_far_from_the_scores_leave_nothing_or_all(sink: float, left: float) -> None:
    step = make_step(Shape(dtype="bfloat16"), [], [1], native=True)
    options = AttentionOptions(1.0, sinks=torch.full((4,), sink))
    got = paged_attention(step.q, step.storage, LAYER, step.batch, options)
    assert_near(got[0], left * step.sequences[0].v[0].double().repeat_interleave(2, 0), format="bfloat16")


def test_scores_beyond_the_cap_weigh_alike() -> None:
    shape = Shape(heads=(2, 2), widths=(4, 4), dtype="bfloat16")
    step = make_step(shape, [], [2], native=True)
    step.sequences[0].k[...] = torch.tensor([1e3, 2e3]).view(2, 1, 1)
    assert step.batch.native is not None
    write(step.storage, shape, step.sequences[0], range(2), step.batch.native.tables)
    got = paged_attention(torch.ones_like(step.q), step.storage, LAYER, step.batch, AttentionOptions(1.0, 30.0))
    assert_near(got[0], step.sequences[0].v.double().mean(0), format="bfloat16")


def test_scores_far_apart_leave_the_largest() -> None:
    """Weights run over many powers of two, and the largest comes in the last tile."""
    shape = Shape(heads=(1, 1), widths=(8, 8), dtype="bfloat16")
    step = make_step(shape, [], [150], native=True)
    sequence = step.sequences[0]
    sequence.k[...] = torch.linspace(-300, 300, 150).view(-1, 1, 1)
    assert step.batch.native is not None
    write(step.storage, shape, sequence, range(150), step.batch.native.tables)
    got = paged_attention(torch.ones_like(step.q), step.storage, LAYER, step.batch, AttentionOptions(1.0))
    assert_near(got[0], sequence.v[-1].double(), format="bfloat16")
