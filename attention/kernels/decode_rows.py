"""The numbers that a step of single rows needs on a GPU, at addresses that never change, so that a graph can hold it.

Not attention and not the numpy rows of a rank. All numbers that change from step to step come in one copy; block tables
are copied when other sequences decode, and grow by themselves in every step (`grant`).
Letters: N rows of a step, M most rows, G cache groups, W most blocks of a sequence. Units: tokens, blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from ...kvcache.groups import first_visible_rows
from ..batch import AttentionBatch
from .step import GpuStep

_SHORTEST = 512  # tokens: what one split of attention walks


class DecodeRows:
    """Device memory for steps of at most M single rows.

    A step is as many rows as its bucket; those behind the N that stand for something read one token of block 0, write
    nothing, and are to reach no expert (`num_filled`).

    Args:
        most_rows: M, also of buckets.
        groups: kind and window of each cache group.
        max_blocks: W.
        block_size: tokens a block.
        device: of the tensors.
        copy: takes an array to a tensor of the device, and may do so later: the array changes meanwhile. None: torch.

    Attributes:
        num_filled: [1] i64, N.
        input_ids, positions: [M] i64.
        is_long: [M] i64, other than 0 for rows of sequences that may outgrow a rotary embedding's original length.
        runs: [M, 4] i64, see `GpuStep`.
        slot_mapping: [G, M] i64, -1 behind the last row.
        tables: [G, M * W + 1 or a little more] i32: a table a row, then block 0.
        num_bytes: of all that (`topologies.kv_sizes.decode_rows_bytes` knows it beforehand).
    """

    def __init__(
        self,
        *,
        most_rows: int,
        groups: Sequence[tuple[str, int]],
        max_blocks: int,
        block_size: int,
        device: torch.device,
        copy: Callable[[torch.Tensor, np.ndarray], None] | None = None,
    ) -> None:
        self._copy = copy or _copy
        self._groups, self._width, self._block_size = tuple(groups), max_blocks, block_size
        self._most_rows, self._spare = most_rows, most_rows * max_blocks
        room = -(-most_rows // 2) * 2  # so that each part begins at a multiple of 16 bytes, as other tensors do
        sizes = [2, room, room, room, 4 * room, len(self._groups) * room]
        self._host = np.zeros(sum(sizes), np.int64)
        self._numbers = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        self.num_filled, self.input_ids, self.positions, self.is_long, runs, slots = torch.split(self._numbers, sizes)
        self.runs, self.slot_mapping = runs.view(-1, 4), slots.view(len(self._groups), -1)
        parts = np.split(self._host, np.cumsum(sizes)[:-1])
        self._host_filled, self._host_ids, self._host_positions, self._host_long = parts[:4]
        self._host_runs, self._host_slots = parts[4].reshape(-1, 4), parts[5].reshape(len(self._groups), -1)
        self._host_runs[:, 0] = np.arange(room)
        self._host_runs[:, 1] = 1
        self.num_filled = self.num_filled[:1]
        self.tables = torch.zeros(len(self._groups), self._spare // 4 * 4 + 4, dtype=torch.int32, device=device)
        self.num_bytes = self._numbers.nbytes + self.tables.nbytes
        self._steps: dict[tuple[int, int], tuple[AttentionBatch, ...]] = {}

    def load_tables(self, tables: Sequence[np.ndarray]) -> None:
        """Take over the block tables of the rows, [N, n] i32 for each group; entries that no row sees may be -1."""
        for own, table in zip(self.tables, tables, strict=True):
            num_rows, width = table.shape
            place = own[: num_rows * self._width].view(num_rows, self._width)[:, :width]
            self._copy(place, table)

    def fill(
        self,
        input_ids: np.ndarray,
        positions: np.ndarray,
        slot_mappings: Sequence[np.ndarray],
        bucket: int,
        is_long: np.ndarray | None = None,
    ) -> tuple[AttentionBatch, ...]:
        """Set the numbers of a step and return its batches, one a group: the same objects for the same sizes.

        Args:
            input_ids, positions: [N] i64.
            slot_mappings: [N] i64 for each group.
            bucket: rows of the step, N or more.
            is_long: [N], see there; None: none.
        """
        num_rows = len(positions)
        assert num_rows <= bucket <= self._most_rows, (num_rows, bucket, self._most_rows)
        filled, padding = slice(0, num_rows), slice(num_rows, bucket)
        self._host_filled[0] = num_rows
        self._host_ids[filled], self._host_ids[padding] = input_ids, 0
        self._host_positions[filled], self._host_positions[padding] = positions, 0
        self._host_long[filled], self._host_long[padding] = 0 if is_long is None else is_long, 0
        runs = self._host_runs
        runs[filled, 2], runs[padding, 2] = positions, 0
        runs[filled, 3], runs[padding, 3] = np.arange(num_rows) * self._width, self._spare
        for own, slots in zip(self._host_slots, slot_mappings, strict=True):
            own[filled], own[padding] = slots, -1
        self._copy(self._numbers, self._host)
        most = int(positions.max(initial=0)) + 1
        batches = self.batches(bucket, max(_SHORTEST, 1 << (most - 1).bit_length()))
        for batch in batches:
            read = int((positions + 1 - first_visible_rows(batch.kind, batch.window, positions)).sum())
            batch.kv_tokens_read = batch.pairs_scored = read  # one row a sequence
        return batches

    def grant(self, bucket: int) -> None:
        """Enter the block that each row writes to into its table: part of the step, all on the device."""
        at = self.runs[:bucket, 3] + self.positions[:bucket] // self._block_size
        blocks = self.slot_mapping[:, :bucket].clamp(min=0) // self._block_size
        self.tables.index_copy_(1, at, blocks.to(torch.int32))

    def batches(self, bucket: int, longest: int) -> tuple[AttentionBatch, ...]:
        """Return the batches of `bucket` rows of sequences of up to `longest` tokens: the same objects each time."""
        if (bucket, longest) not in self._steps:
            self._steps[bucket, longest] = tuple(
                AttentionBatch(
                    kind=kind,
                    window=window,
                    slot_mapping=slots[:bucket],
                    prefills=(),
                    decodes=(),
                    kv_tokens_read=0,
                    pairs_scored=0,
                    gpu=GpuStep.of_single_rows(self.runs[:bucket], table, longest),
                )
                for (kind, window), slots, table in zip(self._groups, self.slot_mapping, self.tables, strict=True)
            )
        return self._steps[bucket, longest]


def _copy(place: torch.Tensor, array: np.ndarray) -> None:
    place.copy_(torch.from_numpy(array))
