"""A row of native attention has the same bits however its prompt is cut, whoever runs beside it, wherever blocks lie.

Slots that no token of the sequence has been written to hold NaN: they must not show.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moewe.attention import reference
from moewe.attention.batch import AttentionOptions
from moewe.attention.build import build_native_batch
from moewe.attention.paged import paged_attention
from moewe.kvcache.storage import KVStorage
from moewe.native.library import load
from tests.support.attention_steps import LAYER, Rows, Sequence, Shape, fill_with_nan, random_sequence, write
from tests.support.numerics import assert_same

pytestmark = pytest.mark.skipif(load() is None, reason="no native kernels here")

SHAPES = {
    "gqa": Shape((4, 2), (64, 64), "full", 0, 16, "bfloat16"),
    "odd_group": Shape((10, 2), (40, 40), "full", 0, 16, "bfloat16"),
    "window": Shape((6, 2), (32, 32), "window", 21, 16, "bfloat16"),
    "chunk": Shape((3, 3), (32, 64), "chunk", 40, 16, "bfloat16"),
    "latent": Shape((6, 1), (96, 64), "latent", 0, 16, "bfloat16"),
}


@pytest.fixture
def two_threads() -> Iterator[None]:
    library = load()
    assert library is not None
    library.moewe_set_threads(2)
    yield
    library.moewe_set_threads(1)


def options_of(shape: Shape, cap: float = 0.0, sinks: bool = False) -> AttentionOptions:
    scores = torch.linspace(-1, 1, shape.heads[0]) if sinks else None
    return AttentionOptions(shape.widths[0] ** -0.5, cap, scores)


def queries_of(shape: Shape, length: int) -> torch.Tensor:
    return torch.randn(length, shape.heads[0], shape.widths[0]).bfloat16()


def attend(
    shape: Shape,
    q: torch.Tensor,
    sequence: Sequence,
    options: AttentionOptions,
    *,
    cuts: list[int],
    others: tuple[int, ...] = (),
    seed: int = 0,
    decodes: bool = False,
) -> torch.Tensor:
    """Run rows [cuts[0], cuts[-1]) of a sequence in pieces, with single rows of other sequences in front of each.

    What lies before the first cut is written, but not run. With `decodes` pieces of one row are decode rows.
    """
    made, size = np.random.default_rng(seed), shape.block_size
    lengths = [cuts[-1], *others]
    needed = [-(-length // size) for length in lengths]
    order = made.permutation(sum(needed) + 2).astype(np.int32)
    tables = np.split(order, np.cumsum(needed))[:-1]
    storage = KVStorage([shape.group()], num_blocks=len(order), block_size=size)
    fill_with_nan(storage, order)
    torch.manual_seed(seed + 1)
    for table, length in zip(tables[1:], others):
        write(storage, shape, random_sequence(shape, length), range(length), table)
    width = max(needed)
    decode_tables = np.full((len(others) + 1, width), -1, np.int32)
    for row, table in zip(decode_tables, [*tables[1:], tables[0]]):
        row[: len(table)] = table
    other_q, found = queries_of(shape, len(others)), []
    write(storage, shape, sequence, range(cuts[0]), tables[0])
    for start, stop in pairwise(cuts):
        write(storage, shape, sequence, range(start, stop), tables[0])
        fill_with_nan(storage, tables[0][: reference.first_seen(shape.kind, shape.window, start) // size])
        single = decodes and stop - start == 1
        run = Rows(len(others), stop - start, start, tables[0][: -(-stop // size)])
        batch = build_native_batch(
            slot_mapping=np.zeros(len(others) + stop - start, np.int64),
            segments=[] if single else [run],
            decode_lengths=np.array([*others, stop] if single else others, np.int64),
            decode_tables=decode_tables if single else decode_tables[:-1],
            kind=shape.kind,
            window=shape.window,
        )
        rows = torch.cat([other_q, q[start:stop]])
        found.append(paged_attention(rows, storage, LAYER, batch, options)[len(others) :])
    return torch.cat(found)


@given(
    name=st.sampled_from(sorted(SHAPES)),
    block_size=st.sampled_from([1, 5, 16, 64]),
    inner=st.sets(st.integers(1, 149), max_size=12),
    others=st.lists(st.integers(1, 90), max_size=3),
    seed=st.integers(0, 99),
    extras=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_chunks_neighbours_and_places_change_no_bit(name, block_size, inner, others, seed, extras) -> None:
    shape, length = SHAPES[name], 150
    torch.manual_seed(seed)
    sequence, q = random_sequence(shape, length), queries_of(shape, length)
    options = options_of(shape, 2.0 if extras else 0.0, extras)
    whole = attend(shape, q, sequence, options, cuts=[0, length])
    moved = Shape(shape.heads, shape.widths, shape.kind, shape.window, block_size, "bfloat16")
    cuts = [0, *sorted(inner), length]
    got = attend(moved, q, sequence, options, cuts=cuts, others=tuple(others), seed=seed, decodes=seed % 2 == 0)
    assert whole.isfinite().all()
    assert_same(got, whole)


@pytest.mark.parametrize("name", SHAPES)
def test_a_prompt_row_by_row_as_decode_rows(name: str) -> None:
    shape, length = SHAPES[name], 131
    torch.manual_seed(0)
    sequence, q = random_sequence(shape, length), queries_of(shape, length)
    whole = attend(shape, q, sequence, options_of(shape), cuts=[0, length])
    got = attend(shape, q, sequence, options_of(shape), cuts=list(range(length + 1)), others=(70, 3), decodes=True)
    assert_same(got, whole)


@pytest.mark.parametrize("name", SHAPES)
def test_two_threads_change_no_bit(name: str, request: pytest.FixtureRequest) -> None:
    shape, length = SHAPES[name], 300
    torch.manual_seed(0)
    sequence, q = random_sequence(shape, length), queries_of(shape, length)

    def both() -> list[torch.Tensor]:
        return [
            attend(shape, q, sequence, options_of(shape), cuts=[0, length], others=(200, 17)),
            attend(shape, q, sequence, options_of(shape), cuts=[length - 1, length], decodes=True),
        ]

    expected = both()
    request.getfixturevalue("two_threads")
    for got, alone in zip(both(), expected, strict=True):
        assert_same(got, alone)


@pytest.mark.parametrize("name", ["gqa", "latent"])
def test_a_sequence_that_is_not_finite_spoils_no_other(name: str) -> None:
    shape = SHAPES[name]
    torch.manual_seed(0)
    sequence, q = random_sequence(shape, 100), queries_of(shape, 100)
    expected = attend(shape, q, sequence, options_of(shape), cuts=[99, 100], others=(40, 80))
    bad = q.clone()
    bad[99, 0, 0] = torch.nan
    got = attend(shape, bad, sequence, options_of(shape), cuts=[99, 100], others=(40, 80))
    assert got[0, 0].isnan().all()
    assert_same(got[0, 1:], expected[0, 1:])
    sequence.k[50, 0, 3] = torch.nan
    assert attend(shape, q, sequence, options_of(shape), cuts=[99, 100])[0, 0].isnan().all()
