"""Builds the `AttentionBatch` of a step from the numpy rows of a rank.

Not attention: index arithmetic, once a step for all layers. Decode rows of similar length share a bucket, so that one
long sequence does not make all others read padding.
Shapes: T rows, N decode rows, n blocks of a table; units: tokens, blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from .batch import AttentionBatch, DecodeBucket, PrefillSegment


class SegmentRows(Protocol):
    """What is read of a run of rows of one sequence (runtime/worker_batch.py has it in numpy)."""

    @property
    def row_start(self) -> int:
        """First row."""
        ...

    @property
    def num_rows(self) -> int:
        """How many rows."""
        ...

    @property
    def num_computed_tokens(self) -> int:
        """Tokens that are in KV before them."""
        ...

    @property
    def block_table(self) -> np.ndarray:
        """[n] i64."""
        ...


def build_attention_batch(
    *,
    slot_mapping: np.ndarray,
    segments: Sequence[SegmentRows],
    decode_rows: np.ndarray,
    decode_lengths: np.ndarray,
    decode_tables: np.ndarray,
    block_size: int,
    device: torch.device,
) -> AttentionBatch:
    """Return the batch of one step.

    Args:
        slot_mapping: [T] i64, where each row's K and V go.
        segments: runs of rows of one sequence each.
        decode_rows: [N] i64, row numbers of single rows.
        decode_lengths: [N] i64, tokens that each attends to, its own included.
        decode_tables: [N, n] i64, padded with block 0.
        block_size: tokens a block.
        device: where the tensors of the batch go.

    Example:
        Lengths 5, 9, 40 with blocks of 16 make two buckets: {5, 9} with 1 block and {40} with 3 (a power of two, 4,
        cut to what the longest needs).
    """

    def move(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64)).to(device, non_blocking=True)

    prefills = tuple(_segment(segment, move(segment.block_table)) for segment in segments)
    decodes = []
    if len(decode_rows):
        num_blocks = -(-decode_lengths // block_size)
        bucket_of = np.ceil(np.log2(num_blocks)).astype(np.int64)
        for bucket in np.unique(bucket_of).tolist():
            members = np.flatnonzero(bucket_of == bucket)
            most = int(num_blocks[members].max())
            lengths = move(decode_lengths[members])
            places = torch.arange(most * block_size, device=device)
            decodes.append(
                DecodeBucket(
                    rows=move(decode_rows[members]),
                    block_table=move(decode_tables[members, :most]),
                    lengths=lengths,
                    mask=(places < lengths[:, None])[:, None, None],
                )
            )
    read = int(decode_lengths.sum()) + sum(s.num_computed_tokens + s.num_rows for s in segments)
    return AttentionBatch(
        slot_mapping=move(slot_mapping), prefills=prefills, decodes=tuple(decodes), kv_tokens_read=read
    )


def _segment(rows: SegmentRows, block_table: torch.Tensor) -> PrefillSegment:
    mask = None
    if rows.num_computed_tokens and rows.num_rows > 1:
        length = rows.num_computed_tokens + rows.num_rows
        mask = torch.ones(rows.num_rows, length, dtype=torch.bool, device=block_table.device)
        mask = mask.tril_(rows.num_computed_tokens)
    return PrefillSegment(
        row_start=rows.row_start,
        num_rows=rows.num_rows,
        num_computed_tokens=rows.num_computed_tokens,
        block_table=block_table,
        mask=mask,
    )
