"""Which rows of a step attend to which KV blocks: built once a step, read by every layer.

Not the attention itself (attention/paged.py) and not storage (kvcache/storage.py).
Shapes: T rows of this rank in the step; a prefill segment is a run of rows of one sequence; decode rows are single.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


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
        num_computed_tokens: tokens of the sequence that were in KV before this step.
        block_table: [n] i64, blocks that hold tokens [0, num_computed_tokens + num_rows).
        mask: [num_rows, num_computed_tokens + num_rows] (see `AttentionBatch`), row i sees tokens up to its own; None
            where plain causality (nothing computed before) or no mask at all (one row) says the same.
    """

    row_start: int
    num_rows: int
    num_computed_tokens: int
    block_table: torch.Tensor
    mask: torch.Tensor | None


@dataclass(frozen=True, kw_only=True)
class DecodeBucket:
    """Single rows of sequences of similar length, computed together.

    Attributes:
        rows: [B] i64 row numbers in the step.
        block_table: [B, n] i64, padded with block 0.
        lengths: [B] i64, tokens to attend to, this row's own included.
        num_keys: the largest of `lengths`.
        mask: [B, 1, 1, num_keys] (see `AttentionBatch`); None when all rows attend to `num_keys` tokens.
    """

    rows: torch.Tensor
    block_table: torch.Tensor
    lengths: torch.Tensor
    num_keys: int
    mask: torch.Tensor | None


@dataclass(frozen=True, kw_only=True)
class AttentionBatch:
    """All rows of one rank in one step, for one cache group.

    Masks are what the device's attention takes without converting them in every layer: on a CPU f32 to add (0 or -inf),
    elsewhere bool (true attends).

    Attributes:
        slot_mapping: [T] i64, block_id * block_size + offset where the row's K and V are written.
        prefills, decodes: together they cover each row exactly once; both may be empty.
        kv_tokens_read: tokens of KV that one layer reads (for telemetry).
    """

    slot_mapping: torch.Tensor
    prefills: tuple[PrefillSegment, ...]
    decodes: tuple[DecodeBucket, ...]
    kv_tokens_read: int
