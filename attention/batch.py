"""Which rows of a step attend to which KV blocks: built once a step and cache group, read by every layer of the group.

Not the attention itself (attention/paged.py) and not storage (kvcache/storage.py).
Shapes: T rows of this rank in the step; a prefill segment is a run of rows of one sequence; decode rows are single.
Keys are numbered from the first token of the first block of a table on: the block that holds the first token which the
segment's first row, or the bucket's row, sees. What lies before it is not read and may belong to another sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .kernels.step import GpuStep
    from .native import NativeStep


@dataclass(frozen=True, eq=False)
class AttentionOptions:
    """What a layer does with its scores.

    Attributes:
        scale: factor on them.
        score_cap: scaled scores become cap * tanh(score / cap), before any mask; 0 leaves them.
        sinks: [H] f32; a score a query head that takes part in every softmax and yields no value. None knows none.
    """

    scale: float
    score_cap: float = 0.0
    sinks: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class PrefillSegment:
    """Consecutive rows of one sequence.

    Attributes:
        row_start, num_rows: rows [row_start, row_start + num_rows) of the step.
        num_computed_tokens: tokens of the sequence before them, which is the position of the first row.
        block_table: [n] i64, blocks from the one with the first row's first visible token to the one with the last row.
        num_keys: tokens from the start of the first of these blocks to the last row, its own included.
        mask: [num_rows, num_keys] (see `AttentionBatch`); None where plain causality (key i is row i) or no mask at
            all (one row that sees every key) says the same.
    """

    row_start: int
    num_rows: int
    num_computed_tokens: int
    block_table: torch.Tensor
    num_keys: int
    mask: torch.Tensor | None


@dataclass(frozen=True, kw_only=True)
class DecodeBucket:
    """Single rows of sequences that read a similar number of blocks, computed together.

    Attributes:
        rows: [B] i64 row numbers in the step.
        block_table: [B, n] i64, each from the block with the row's first visible token on, padded with its last block.
        lengths: [B] i64, tokens of the sequence, this row's own included.
        num_keys: the largest number of keys of a row.
        mask: [B, 1, 1, num_keys] (see `AttentionBatch`); None when all rows see all `num_keys` keys.
    """

    rows: torch.Tensor
    block_table: torch.Tensor
    lengths: torch.Tensor
    num_keys: int
    mask: torch.Tensor | None


@dataclass(kw_only=True, eq=False)
class AttentionBatch:
    """All rows of one rank in one step, for one cache group.

    Masks are what the device's attention takes without converting them in every layer: on a CPU f32 to add (0 or -inf),
    elsewhere bool (true attends).

    Attributes:
        kind, window: of the cache group.
        slot_mapping: [T] i64, block_id * block_size + offset where the row's K and V are written.
        prefills, decodes: together they cover each row exactly once; both may be empty. None where others attend.
        native: the rows as native attention wants them, instead of `prefills` and `decodes`.
        gpu: the rows as kernels on a GPU want them, likewise.
        kv_tokens_read: tokens of KV that some row of a sequence sees in one layer, over all sequences (for telemetry).
        pairs_scored: pairs of a row and a token that it sees, in one layer (likewise).
    """

    kind: str
    window: int
    slot_mapping: torch.Tensor
    prefills: tuple[PrefillSegment, ...]
    decodes: tuple[DecodeBucket, ...]
    kv_tokens_read: int
    pairs_scored: int
    native: NativeStep | None = None
    gpu: GpuStep | None = None
