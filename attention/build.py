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

SMALLEST_BUCKET_BLOCKS = 8  # reading a little padding costs less than one more call a layer


class SegmentRows(Protocol):
    """What is read of a run of rows of one sequence (runtime/ranks/batch.py has it in numpy)."""

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
    decode_lengths: np.ndarray,
    decode_tables: np.ndarray,
    block_size: int,
    device: torch.device,
    kind: str = "full",
    window: int = 0,
) -> AttentionBatch:
    """Return the batch of one step.

    Args:
        slot_mapping: [T] i64, where each row's K and V go.
        segments: runs of rows of one sequence each.
        decode_lengths: [N] i64, tokens of the sequence of each of the first N rows of the step, its own included.
        decode_tables: [N, n] i64, padded with block 0.
        block_size: tokens a block.
        device: where the tensors of the batch go.
        kind, window: of the cache group.

    Example:
        Lengths 5, 40, 200, 300 with blocks of 16 make three buckets: {5, 40} up to 8 blocks, {200} up to 16, {300} up
        to 32, each cut to the blocks that its longest row needs: 3, 13 and 19.
    """

    def move(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64)).to(device, non_blocking=True)

    prefills = tuple(_segment(segment, move(segment.block_table)) for segment in segments)
    decodes = []
    if len(decode_lengths):
        num_blocks = -(-decode_lengths // block_size)
        bucket_of = np.ceil(np.log2(np.maximum(num_blocks, SMALLEST_BUCKET_BLOCKS))).astype(np.int64)
        for bucket in np.unique(bucket_of).tolist():
            members = np.flatnonzero(bucket_of == bucket)
            lengths = decode_lengths[members]
            most, num_keys = int(num_blocks[members].max()), int(lengths.max())
            mask = None
            if num_keys != lengths.min():
                mask = _mask(move(np.arange(num_keys)) < move(lengths)[:, None])[:, None, None]
            decodes.append(
                DecodeBucket(
                    rows=move(members),
                    block_table=move(decode_tables[members, :most]),
                    lengths=move(lengths),
                    num_keys=num_keys,
                    mask=mask,
                )
            )
    read = int(decode_lengths.sum()) + sum(s.num_computed_tokens + s.num_rows for s in segments)
    return AttentionBatch(
        slot_mapping=move(slot_mapping), prefills=prefills, decodes=tuple(decodes), kv_tokens_read=read
    )


def _mask(visible: torch.Tensor) -> torch.Tensor:
    """Return the mask that attends where `visible`, in the form that the device's attention takes as it is."""
    if visible.device.type != "cpu":
        return visible
    return torch.zeros(visible.shape).masked_fill_(~visible, -torch.inf)


def _segment(rows: SegmentRows, block_table: torch.Tensor) -> PrefillSegment:
    mask = None
    if rows.num_computed_tokens and rows.num_rows > 1:
        length = rows.num_computed_tokens + rows.num_rows
        visible = torch.ones(rows.num_rows, length, dtype=torch.bool, device=block_table.device)
        mask = _mask(visible.tril_(rows.num_computed_tokens))
    return PrefillSegment(
        row_start=rows.row_start,
        num_rows=rows.num_rows,
        num_computed_tokens=rows.num_computed_tokens,
        block_table=block_table,
        mask=mask,
    )
