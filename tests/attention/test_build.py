"""The batch of a step by hand: which blocks are read, which masks are needed, how rows share buckets."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moewe.attention.batch import AttentionBatch
from moewe.attention.build import WINDOW_PIECE_ROWS, NativeDecodes, build_attention_batch, build_native_batch
from tests.support.attention_steps import Rows, Shape, make_step

NONE = -torch.inf
STALE = -1


def build(
    segments: list[tuple[int, int, list[int]]],
    decodes: list[tuple[int, list[int]]],
    *,
    kind: str = "full",
    window: int = 0,
) -> AttentionBatch:
    """Blocks of 4; a segment is (computed, rows, table), a decode row (length, table)."""
    runs, row = [], len(decodes)
    for computed, rows, table in segments:
        runs.append(Rows(row, rows, computed, np.array(table, np.int64)))
        row += rows
    width = max((len(table) for _, table in decodes), default=0)
    return build_attention_batch(
        slot_mapping=np.arange(row),
        segments=runs,
        decode_lengths=np.array([length for length, _ in decodes], np.int64),
        decode_tables=np.array([table + [STALE] * (width - len(table)) for _, table in decodes], np.int64).reshape(
            len(decodes), width
        ),
        block_size=4,
        device=torch.device("cpu"),
        kind=kind,
        window=window,
    )


def test_decode_rows_are_padded_with_their_own_last_block() -> None:
    batch = build([], [(9, [5, 3, 8]), (2, [7])])
    (bucket,) = batch.decodes
    assert bucket.rows.tolist() == [0, 1]
    assert bucket.block_table.tolist() == [[5, 3, 8], [7, 7, 7]]
    assert bucket.lengths.tolist() == [9, 2]
    assert (bucket.num_keys, batch.kv_tokens_read) == (9, 11)
    assert bucket.mask is not None
    assert bucket.mask.tolist() == [[[[0.0] * 9]], [[[0.0] * 2 + [NONE] * 7]]]


def test_decode_rows_of_equal_length_need_no_mask() -> None:
    (bucket,) = build([], [(6, [1, 2]), (6, [3, 4])]).decodes
    assert bucket.mask is None and bucket.num_keys == 6


def test_decode_rows_behind_a_window_read_from_its_first_block_on() -> None:
    # positions 13 (sees 9..13, blocks 2 and 3), 7 (sees 3..7, blocks 0 and 1) and 1 (sees both tokens)
    batch = build([], [(14, [STALE, STALE, 6, 9]), (8, [4, 5]), (2, [0])], kind="window", window=5)
    (bucket,) = batch.decodes
    assert bucket.block_table.tolist() == [[6, 9], [4, 5], [0, 0]]
    assert (bucket.num_keys, batch.kv_tokens_read) == (8, 5 + 5 + 2)
    assert bucket.mask is not None
    assert (bucket.mask[:, 0, 0] == 0).int().tolist() == [
        [0, 1, 1, 1, 1, 1, 0, 0],
        [0, 0, 0, 1, 1, 1, 1, 1],
        [1, 1, 0, 0, 0, 0, 0, 0],
    ]


def test_buckets_follow_what_is_read_not_how_long_a_sequence_is() -> None:
    lengths = [5, 40, 200, 300]
    tables = [(length, list(range(-(-length // 4)))) for length in lengths]
    assert [len(bucket.lengths) for bucket in build([], tables).decodes] == [1, 1, 1, 1]
    assert [bucket.block_table.shape[1] for bucket in build([], tables).decodes] == [2, 10, 50, 75]
    (bucket,) = build([], tables, kind="window", window=16).decodes
    assert bucket.rows.tolist() == [0, 1, 2, 3]
    assert bucket.block_table.shape[1] == 4


def test_rows_at_the_start_of_their_chunk_see_themselves() -> None:
    batch = build([], [(9, [STALE, STALE, 2]), (8, [STALE, 1])], kind="chunk", window=4)
    (bucket,) = batch.decodes
    assert bucket.block_table.tolist() == [[2], [1]]
    assert batch.kv_tokens_read == 1 + 4


def test_segments_of_a_full_group() -> None:
    batch = build([(0, 3, [4]), (5, 2, [8, 1]), (6, 1, [2, 3])], [])
    first, second, third = batch.prefills
    assert first.mask is None and first.num_keys == 3
    assert second.mask is not None and second.num_keys == 7
    assert second.mask.tolist() == [[0.0] * 6 + [NONE], [0.0] * 7]
    assert third.mask is None and third.block_table.tolist() == [2, 3]
    assert batch.kv_tokens_read == 3 + 7 + 7


def test_a_segment_behind_a_window_reads_from_its_first_rows_window_on() -> None:
    batch = build([(10, 3, [STALE, 7, 5, 9])], [], kind="window", window=4)  # rows 10, 11, 12; row 10 sees 7..10
    (segment,) = batch.prefills
    assert segment.block_table.tolist() == [7, 5, 9]
    assert (segment.num_keys, batch.kv_tokens_read) == (9, 6)  # tokens 4..12; 7..12
    assert segment.mask is not None
    assert (segment.mask == 0).int().tolist() == [
        [0, 0, 0, 1, 1, 1, 1, 0, 0],
        [0, 0, 0, 0, 1, 1, 1, 1, 0],
        [0, 0, 0, 0, 0, 1, 1, 1, 1],
    ]


def test_a_segment_across_chunks() -> None:
    batch = build([(4, 4, [STALE, 3])], [], kind="chunk", window=6)  # rows 4, 5 see from 0 on, so its block is needed
    assert batch.prefills[0].block_table.tolist() == [STALE, 3]
    batch = build([(6, 4, [STALE, 3, 8])], [], kind="chunk", window=6)
    (segment,) = batch.prefills
    assert segment.block_table.tolist() == [3, 8]
    assert (segment.num_keys, batch.kv_tokens_read) == (6, 4)
    assert segment.mask is not None
    assert (segment.mask == 0).int().tolist() == [
        [0, 0, 1, 0, 0, 0],
        [0, 0, 1, 1, 0, 0],
        [0, 0, 1, 1, 1, 0],
        [0, 0, 1, 1, 1, 1],
    ]


@pytest.mark.parametrize(("kind", "window"), [("window", 9), ("chunk", 8)])
def test_windows_that_hide_nothing_need_no_mask(kind: str, window: int) -> None:
    first = 0 if kind == "window" else 8  # a chunk begins where a block does
    (segment,) = build([(first, 8, [0, 1, 2, 3])], [], kind=kind, window=window).prefills
    assert segment.mask is None and segment.num_keys == 8


def test_long_segments_behind_windows_are_cut_at_absolute_positions() -> None:
    for window, piece in ((8, WINDOW_PIECE_ROWS), (700, 700)):
        for kind in ("window", "chunk"):
            batch = make_step(Shape(kind=kind, window=window, heads=(1, 1), widths=(1, 1)), [(5, 1500)], []).batch
            starts = [segment.num_computed_tokens for segment in batch.prefills]
            assert starts == [5, piece, 2 * piece]
            assert [segment.row_start for segment in batch.prefills] == [0, piece - 5, 2 * piece - 5]
            assert sum(segment.num_rows for segment in batch.prefills) == 1500
            assert batch.kv_tokens_read == 1505


def test_native_attention_is_told_runs_and_whole_tables() -> None:
    batch = build_native_batch(
        slot_mapping=np.arange(5),
        segments=[Rows(2, 3, 6, np.array([7, 5, 9]))],
        decode_lengths=np.array([6, 3]),
        decode_tables=np.array([[1, 2], [3, STALE]]),
        kind="window",
        window=4,
    )
    assert (batch.prefills, batch.decodes) == ((), ())
    assert batch.native is not None
    assert batch.native.runs.tolist() == [[0, 1, 5, 0], [1, 1, 2, 2], [2, 3, 6, 4]]
    assert batch.native.tables.tolist() == [1, 2, 3, STALE, 7, 5, 9]
    assert batch.slot_mapping.tolist() == [0, 1, 2, 3, 4]
    assert batch.kv_tokens_read == 4 + 3 + 6  # tokens 2..5; 0..2; 3..8
    assert batch.pairs_scored == 4 + 3 + 3 * 4


@pytest.mark.parametrize(("kind", "window"), [("full", 0), ("window", 9), ("chunk", 8)])
def test_decodes_that_go_on_are_told_as_those_that_are_built_anew(kind: str, window: int) -> None:
    tables = np.arange(60, dtype=np.int32).reshape(6, 10)  # by slot
    slots, lengths, mapping = np.array([1, 4, 5]), np.array([3, 16, 30]), np.zeros(3, np.int64)
    decodes = NativeDecodes(slot_mapping=mapping, lengths=lengths, tables=tables, slots=slots, kind=kind, window=window)
    for step in range(20):
        if step:
            lengths += 1
            mapping += 7
            tables[4, step % 10] = 100 + step
            decodes.advance()
        fresh = build_native_batch(
            slot_mapping=mapping,
            segments=[],
            decode_lengths=lengths,
            decode_tables=tables[slots],
            kind=kind,
            window=window,
        )
        assert decodes.batch.kv_tokens_read == fresh.kv_tokens_read
        assert decodes.batch.slot_mapping.tolist() == fresh.slot_mapping.tolist()
        for told, wanted in zip(runs_of(decodes.batch), runs_of(fresh), strict=True):
            assert told == wanted


def runs_of(batch: AttentionBatch) -> list[tuple[list[int], list[int]]]:
    assert batch.native is not None
    flat = batch.native.tables.ravel()
    return [(run[:3].tolist(), flat[run[3] : run[3] + 10].tolist()) for run in batch.native.runs]
