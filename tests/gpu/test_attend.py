"""`triton_attention` against the slow reference on mixed steps, whatever blocks the sequences lie in.

Every block that is not a sequence's own, or lies before what its rows see, holds NaN, as does memory that nobody wrote.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moewe.attention.batch import AttentionOptions
from moewe.attention.kernels.attend import AttentionShape, pick_decode, pick_prefill, triton_attention
from moewe.attention.kernels.step import GpuStep
from moewe.native.gpu import TARGETS, GpuTarget
from tests.support.attention_steps import LAYER, Shape, Step, make_step, write
from tests.support.numerics import assert_near, assert_same
from tests.support.pairwise import each_pair

STEPS = {
    "nothing": ([], []),
    "one_decode": ([], [1]),
    "block_borders": ([], [3, 4, 5]),
    "long_and_short": ([], [1, 140]),
    "whole_prompt": ([(0, 9)], []),
    "long_prompt": ([(0, 70)], []),
    "chunk_behind_context": ([(67, 5)], []),
    "mixed": ([(0, 3), (130, 6), (4, 1)], [17, 1]),
}
KINDS = {
    "full": ("full", 0),
    "window_1": ("window", 1),
    "window_odd": ("window", 7),
    "window_longer_than_all": ("window", 500),
    "chunk_odd": ("chunk", 6),
    "chunk_of_tiles": ("chunk", 64),
    "latent": ("latent", 0),
}
# Heads of q and of K and V; a group of 3 and one of 17, which no tile fits.
HEADS = {"gqa": (4, 2), "one_each": (2, 2), "odd_group": (6, 2), "more_than_a_tile": (17, 1)}
WIDTHS = {"64": (64, 64), "80": (80, 80), "256": (256, 256), "192/128": (192, 128), "narrow_values": (24, 16)}
LATENTS = {"latent": (40, 32), "latent_of_two_parts": (80, 48)}
FORMATS = {
    "bfloat16": ("bfloat16", None), "fp8": ("bfloat16", "fp8"), "int8": ("bfloat16", "int8"),
    "float16": ("float16", None), "float32": ("float32", None), "float32 over bfloat16": ("float32", "bfloat16"),
}  # fmt: skip
OPTIONS = {"plain": (0.0, False), "cap": (0.8, False), "sinks": (0.0, True), "cap_and_sinks": (2.0, True)}


def options_of(name: str, num_heads: int, width: int) -> AttentionOptions:
    cap, sinks = OPTIONS[name]
    return AttentionOptions(width**-0.5, cap, torch.linspace(-20, 20, num_heads) if sinks else None)


def attend(step: Step, num_decodes: int, options: AttentionOptions, target: GpuTarget = TARGETS[90]) -> torch.Tensor:
    native = step.batch.native
    assert native is not None
    made = GpuStep(native.runs, native.tables, num_decodes, torch.device("cpu"))
    return triton_attention(step.q, step.storage, LAYER, made, options, target)


@pytest.mark.slow
@each_pair(
    step=STEPS.keys(), kind=KINDS.keys(), heads=HEADS.keys(), widths=WIDTHS.keys(), held=FORMATS.keys(),
    options=OPTIONS.keys(), capability=TARGETS.keys(),
)  # fmt: skip
def test_every_kind_with_all_options(step, kind, heads, widths, held, options, capability) -> None:
    name, window = KINDS[kind]
    dtype, kv_dtype = FORMATS[held]
    shape = Shape(HEADS[heads], WIDTHS[widths], name, window, 4, dtype, kv_dtype)
    if name == "latent":
        wide = LATENTS["latent" if widths in ("64", "256") else "latent_of_two_parts"]
        shape = Shape((HEADS[heads][0], 1), wide, name, 0, 5, dtype, kv_dtype)
    segments, decodes = STEPS[step]
    made = make_step(shape, segments, decodes, stale="nothing" if options == "plain" else "foreign", native=True)
    scores = options_of(options, shape.heads[0], shape.widths[0])
    got = attend(made, len(decodes), scores, TARGETS[capability])
    assert got.dtype == made.q.dtype
    assert_near(got, made.expected(scores), format=dtype)


@pytest.mark.parametrize(
    ("shape", "options", "capability"),
    [
        (Shape((4, 2), (80, 80), "full", 0, 4, "bfloat16"), "cap_and_sinks", 90),
        (Shape((6, 2), (16, 16), "window", 7, 4, "bfloat16", "fp8"), "sinks", 80),
        (Shape((4, 1), (80, 64), "latent", 0, 5, "bfloat16", "int8"), "plain", 90),
    ],
    ids=["full", "window", "latent"],
)  # fmt: skip
def test_a_mixed_step(shape: Shape, options: str, capability: int) -> None:
    step = make_step(shape, [(66, 4)], [40], native=True)
    scores = options_of(options, shape.heads[0], shape.widths[0])
    assert_near(attend(step, 1, scores, TARGETS[capability]), step.expected(scores), format="bfloat16")


@pytest.mark.parametrize("lengths", [[513, 1030], pytest.param([512, 513, 4200], marks=pytest.mark.slow)], ids=str)
def test_splits_add_up_and_a_row_has_the_same_bits_in_any_batch(lengths: list[int]) -> None:
    """Lengths around the borders of splits, which alone have fewer splits than beside the longest."""
    shape, options = Shape((2, 1), (16, 16), "full", 0, 64, "bfloat16"), AttentionOptions(0.25)
    together = make_step(shape, [], lengths, native=True)
    got = attend(together, len(lengths), options)
    assert_near(got, together.expected(options), format="bfloat16")
    for i, length in enumerate(lengths[:-1]):
        alone = make_step(shape, [], [length], seed=i, native=True)
        k, v = together.sequences[i].k, together.sequences[i].v
        alone.sequences[0].k[...], alone.sequences[0].v[...], alone.q[0] = k, v, together.q[i]
        assert alone.batch.native is not None
        write(alone.storage, shape, alone.sequences[0], range(length), alone.batch.native.tables)
        assert_same(attend(alone, 1, options)[0], got[i])


@pytest.mark.parametrize("kind", ["full", "window"])
def test_how_a_prompt_is_cut_changes_no_bit(kind: str) -> None:
    shape, options = Shape((4, 2), (16, 16), kind, 21 if kind == "window" else 0, 4, "bfloat16"), AttentionOptions(0.25)
    whole = make_step(shape, [(0, 90)], [], native=True)
    native = whole.batch.native
    assert native is not None
    expected = attend(whole, 0, options)
    for start, stop in ((0, 2), (2, 67), (67, 90)):
        runs = native.runs.copy()
        runs[0, :3] = 0, stop - start, start
        step = GpuStep(runs, native.tables, 0, torch.device("cpu"))
        part = triton_attention(whole.q[start:stop].clone(), whole.storage, LAYER, step, options, TARGETS[90])
        assert_same(part, expected[start:stop])


def test_a_token_that_is_not_finite_shows_in_the_rows_that_see_it() -> None:
    shape, options = Shape((2, 1), (16, 16), "full", 0, 4, "bfloat16", "fp8"), AttentionOptions(0.25)
    step = make_step(shape, [(0, 40)], [], native=True)
    expected = attend(step, 0, options)
    assert step.batch.native is not None
    step.sequences[0].v[20, 0, 3] = torch.inf
    write(step.storage, shape, step.sequences[0], range(40), step.batch.native.tables)
    got = attend(step, 0, options)
    assert_same(got[:20], expected[:20])
    assert got[20:].isnan().all()


def test_tiles_come_with_most_keys_first() -> None:
    runs = np.array([[0, 1, 5, 0], [1, 5, 0, 2], [6, 2, 100, 4]])
    step = GpuStep(runs, np.zeros(30, np.int32), 1, torch.device("cpu"))
    assert step.longest_decode == 6
    assert step.tiles(4).tolist() == [[2, 0], [1, 4], [1, 0]]


@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda target: target.name)
def test_every_choice_fits_shared_memory_and_registers(target: GpuTarget) -> None:
    for width in (16, 64, 80, 96, 128, 192, 256, 576):
        for group in (1, 5, 8, 12, 16, 128):
            for itemsize, held in ((2, "plain"), (4, "plain"), (2, "int8"), (2, "e4m3")):
                shape = AttentionShape(
                    group=group, head_dim=width, value_dim=min(width, 512), latent=width == 576, itemsize=itemsize,
                    one_byte=held != "plain", e4m3=held == "e4m3",
                )  # fmt: skip
                for config in (pick_decode(shape, target), pick_prefill(shape, target)):
                    queries = config.block_m * (shape.main + shape.rest) * itemsize
                    buffers = (config.num_stages + 1) // 2
                    assert queries + buffers * config.block_n * shape.row_bytes <= target.shared_bytes, (shape, config)
                    assert config.block_m * shape.value_block <= config.num_warps * 32 * 128, (shape, config)
                    assert config.block_m % config.heads == 0 and config.split % config.block_n == 0
