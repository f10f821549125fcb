"""The rows of one rank in one step, as a decoder takes them.

Not a decoder (decoder.py) and not the numpy rows of a rank. Shapes: T rows of this rank, S rows that sample.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..attention.batch import AttentionBatch
from ..attention.kernels.decode_rows import DecodeRows


@dataclass(frozen=True, kw_only=True)
class ForwardBatch:
    """The rows of one rank in one step.

    Attributes:
        input_ids: [T] i64.
        positions: [T] i64, from 0 in each sequence.
        attention: which blocks each row reads and writes, one a cache group, in the order of the storage's groups.
        sample_rows: [S] i64, rows whose logits are wanted.
        long_rows: [T] bool, or numbers other than 0, rows of sequences that may grow beyond the length that the rotary
            embedding was made for; None where the model has but one set of frequencies.
        fixed: where these tensors stand, if they do so in every step. Rows behind `num_rows` then stand for nothing.
        num_rows: rows that stand for something; None: all T.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    attention: tuple[AttentionBatch, ...]
    sample_rows: torch.Tensor
    long_rows: torch.Tensor | None = None
    fixed: DecodeRows | None = None
    num_rows: int | None = None
