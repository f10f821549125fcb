"""Builds the `AttentionBatch` of a step and cache group from the numpy rows of a rank.

Not attention: index arithmetic, once a step for all layers of a group. Native attention and kernels of a GPU are told
runs of rows and block tables as they are (`build_native_batch`, `build_gpu_batch`). For torch, decode rows that read a
similar number of blocks share a bucket, so that one long sequence does not make all others read padding; of sequences
with windows or chunks, only whole blocks from the first visible token on are read.
Shapes: T rows, N decode rows, n blocks of a table; units: tokens, blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch

from ..kvcache.groups import first_visible, first_visible_rows
from .batch import AttentionBatch, DecodeBucket, PrefillSegment
from .kernels.step import GpuStep
from .native import NativeStep

SMALLEST_BUCKET_BLOCKS = 8  # reading a little padding costs less than one more call a layer
# Rows behind a window are computed in pieces of about so many: each reads its rows and the window before them, so that
# work and mask grow with the rows, not with their square.
WINDOW_PIECE_ROWS = 512


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
        """[n] i64; entries before the first visible token are never looked at."""
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
        decode_tables: [N, n] i64; entries before the first visible token and behind the last are never looked at.
        block_size: tokens a block.
        device: where the tensors of the batch go.
        kind, window: of the cache group.

    Example:
        Lengths 5, 40, 200, 300 with blocks of 16 make three buckets: {5, 40} up to 8 blocks, {200} up to 16, {300} up
        to 32, each cut to the blocks that its longest row needs: 3, 13 and 19.
    """

    def move(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64)).to(device, non_blocking=True)

    prefills, read, pairs = [], 0, 0
    for segment in segments:
        begin, end = segment.num_computed_tokens, segment.num_computed_tokens + segment.num_rows
        read += end - first_visible(kind, window, begin)
        pairs += _pairs(kind, window, begin, end)
        for start, stop in pairwise(_edges(begin, end, window)):
            first = first_visible(kind, window, start) // block_size
            prefills.append(
                PrefillSegment(
                    row_start=segment.row_start + start - begin,
                    num_rows=stop - start,
                    num_computed_tokens=start,
                    block_table=move(segment.block_table[first : (stop - 1) // block_size + 1]),
                    num_keys=stop - first * block_size,
                    mask=_segment_mask(kind, window, range(start, stop), first * block_size, device),
                )
            )
    decodes = []
    if len(decode_lengths):
        visible = first_visible_rows(kind, window, decode_lengths - 1)
        seen = int((decode_lengths - visible).sum())
        read, pairs = read + seen, pairs + seen
        first_block, last_block = visible // block_size, (decode_lengths - 1) // block_size
        num_blocks = last_block - first_block + 1
        starts, stops = visible - first_block * block_size, decode_lengths - first_block * block_size  # in keys
        bucket_of = np.ceil(np.log2(np.maximum(num_blocks, SMALLEST_BUCKET_BLOCKS))).astype(np.int64)
        for bucket in np.unique(bucket_of).tolist():
            members = np.flatnonzero(bucket_of == bucket)
            most, num_keys = int(num_blocks[members].max()), int(stops[members].max())
            # Padding is masked, but multiplied: it must be a block of the sequence that is still its own.
            at = np.minimum(first_block[members, None] + np.arange(most), last_block[members, None])
            mask = None
            behind_start = bool(starts[members].any())
            if behind_start or num_keys != stops[members].min():
                keys = move(np.arange(num_keys))
                is_seen = keys < move(stops[members])[:, None]
                if behind_start:
                    is_seen &= keys >= move(starts[members])[:, None]
                mask = _mask(is_seen)[:, None, None]
            decodes.append(
                DecodeBucket(
                    rows=move(members),
                    block_table=move(decode_tables[members[:, None], at]),
                    lengths=move(decode_lengths[members]),
                    num_keys=num_keys,
                    mask=mask,
                )
            )
    return AttentionBatch(
        kind=kind,
        window=window,
        slot_mapping=move(slot_mapping),
        prefills=tuple(prefills),
        decodes=tuple(decodes),
        kv_tokens_read=read,
        pairs_scored=pairs,
    )


def build_native_batch(
    *,
    slot_mapping: np.ndarray,
    segments: Sequence[SegmentRows],
    decode_lengths: np.ndarray,
    decode_tables: np.ndarray,
    kind: str = "full",
    window: int = 0,
) -> AttentionBatch:
    """Return the batch of one step for native attention; arguments as of `build_attention_batch`."""
    runs, tables = _runs(segments, decode_lengths, decode_tables)
    slots = torch.from_numpy(np.ascontiguousarray(slot_mapping, dtype=np.int64))
    read, pairs = _seen(segments, decode_lengths, kind, window)
    return AttentionBatch(
        kind=kind,
        window=window,
        slot_mapping=slots,
        prefills=(),
        decodes=(),
        kv_tokens_read=read,
        pairs_scored=pairs,
        native=NativeStep(runs, tables, slots),
    )


def build_gpu_batch(
    *,
    slot_mapping: np.ndarray,
    segments: Sequence[SegmentRows],
    decode_lengths: np.ndarray,
    decode_tables: np.ndarray,
    device: torch.device,
    send: Callable[[np.ndarray], torch.Tensor] | None = None,
    kind: str = "full",
    window: int = 0,
) -> AttentionBatch:
    """Return the batch of one step for kernels on a GPU.

    Args:
        send: takes arrays to the device; None: as torch does, see `GpuStep`.
        slot_mapping, segments, decode_lengths, decode_tables, device, kind, window: as of `build_attention_batch`.
    """
    runs, tables = _runs(segments, decode_lengths, decode_tables)
    slots = np.ascontiguousarray(slot_mapping, dtype=np.int64)
    read, pairs = _seen(segments, decode_lengths, kind, window)
    return AttentionBatch(
        kind=kind,
        window=window,
        slot_mapping=torch.from_numpy(slots).to(device) if send is None else send(slots),
        prefills=(),
        decodes=(),
        kv_tokens_read=read,
        pairs_scored=pairs,
        gpu=GpuStep(runs, tables, len(decode_lengths), device, send),
    )


class NativeDecodes:
    """The batch of decode rows alone for native attention, of the same sequences step after step.

    Args:
        slot_mapping: [N] i64, where each row's K and V go.
        lengths: [N] i64, tokens of each sequence, its row's own included.
        tables: [S, n] i32, block tables by slot; entries that no row sees are never looked at.
        slots: [N] i64, whose rows they are.
        kind, window: of the cache group.

    Attributes:
        batch: for the step whose numbers stand in the arrays; after other numbers were written there, see `advance`.
    """

    def __init__(
        self,
        *,
        slot_mapping: np.ndarray,
        lengths: np.ndarray,
        tables: np.ndarray,
        slots: np.ndarray,
        kind: str = "full",
        window: int = 0,
    ) -> None:
        self._lengths, self._kind, self._window = lengths, kind, window
        self._runs = np.empty((len(slots), 4), np.int64)
        self._runs[:, 0] = np.arange(len(slots))
        self._runs[:, 1] = 1
        self._runs[:, 3] = slots * tables.shape[1]
        mapping = torch.from_numpy(slot_mapping)
        self.batch = AttentionBatch(
            kind=kind,
            window=window,
            slot_mapping=mapping,
            prefills=(),
            decodes=(),
            kv_tokens_read=0,
            pairs_scored=0,
            native=NativeStep(self._runs, tables, mapping),
        )
        self.advance()

    def advance(self) -> None:
        """Take over what stands in `slot_mapping`, `lengths` and `tables` now."""
        positions = self._runs[:, 2]
        np.subtract(self._lengths, 1, out=positions)
        read = int(self._lengths.sum())
        if self._window:
            read -= int(first_visible_rows(self._kind, self._window, positions).sum())
        self.batch.kv_tokens_read = self.batch.pairs_scored = read  # one row a sequence


def _runs(
    segments: Sequence[SegmentRows], decode_lengths: np.ndarray, decode_tables: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of a step as runs [R, 4] i64 and all block tables after each other, i32; see `NativeStep`."""
    num_decodes, width = decode_tables.shape
    runs = np.empty((num_decodes + len(segments), 4), np.int64)
    rows = np.arange(num_decodes)
    runs[:num_decodes] = np.stack([rows, np.ones_like(rows), decode_lengths - 1, rows * width], axis=1)
    tables, at = [decode_tables.ravel()], num_decodes * width
    for i, segment in enumerate(segments, num_decodes):
        runs[i] = segment.row_start, segment.num_rows, segment.num_computed_tokens, at
        tables.append(segment.block_table)
        at += len(segment.block_table)
    return runs, np.concatenate(tables, dtype=np.int32, casting="same_kind")


def _seen(segments: Sequence[SegmentRows], decode_lengths: np.ndarray, kind: str, window: int) -> tuple[int, int]:
    """Return tokens of KV that are read and pairs that are scored; see `AttentionBatch`."""
    read = pairs = int((decode_lengths - first_visible_rows(kind, window, decode_lengths - 1)).sum())
    for segment in segments:
        position = segment.num_computed_tokens
        read += position + segment.num_rows - first_visible(kind, window, position)
        pairs += _pairs(kind, window, position, position + segment.num_rows)
    return read, pairs


def _pairs(kind: str, window: int, begin: int, end: int) -> int:
    """Return how many tokens the rows at positions [begin, end) of one sequence see, added up over the rows."""
    pairs = (end - begin) * (begin + end + 1) // 2
    if window:
        pairs -= int(first_visible_rows(kind, window, np.arange(begin, end)).sum())
    return pairs


def _edges(begin: int, end: int, window: int) -> list[int]:
    """Cut positions [begin, end) into pieces, at absolute positions, so that chunks of a prompt share them."""
    if not window:
        return [begin, end]
    rows = -(-WINDOW_PIECE_ROWS // window) * window
    return [begin, *range((begin // rows + 1) * rows, end, rows), end]


def _mask(visible: torch.Tensor) -> torch.Tensor:
    """Return the mask that attends where `visible`, in the form that the device's attention takes as it is."""
    if visible.device.type != "cpu":
        return visible
    return torch.zeros(visible.shape).masked_fill_(~visible, -torch.inf)


def _segment_mask(
    kind: str, window: int, positions: range, first_key: int, device: torch.device
) -> torch.Tensor | None:
    """Return the mask of rows at `positions` over the keys from `first_key` on; None where none is needed."""
    num_rows, own = len(positions), positions.start - first_key  # the first row is key number `own`
    all_from_start = first_visible(kind, window, positions[-1]) <= first_key  # no row sees less than the last one
    if all_from_start and (num_rows == 1 or not own):
        return None
    visible = torch.ones(num_rows, own + num_rows, dtype=torch.bool, device=device).tril_(own)
    if not all_from_start:
        starts = first_visible_rows(kind, window, np.arange(positions.start, positions.stop)) - first_key
        keys = torch.arange(own + num_rows, device=device)
        visible &= keys >= torch.from_numpy(starts).to(device, non_blocking=True)[:, None]
    return _mask(visible)
