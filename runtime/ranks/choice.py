"""What became of the rows of a step: tokens and health, chosen by the first rank of an attention replica for all of it.

Not the choosing (sampler.py). Ranks that divide heads all book the same tokens, because they are told them.
Shapes: K rows that sample, S slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ...attention.tensor_parallel import TensorParallelGroup
from ..plan import PromptLogprobs, TokenLogprobs
from .batch import StepRows


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Tokens [K] i64, which slots are healthy [S] bool, and what was asked about tokens and prompts."""

    tokens: np.ndarray
    healthy: np.ndarray
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()


def healthy_slots(rows: StepRows, num_slots: int, finite: np.ndarray, well: np.ndarray) -> np.ndarray:
    """Return which slots saw only finite numbers, [S] bool; `finite` [K] tells it of logits, `well` [T] of all rows."""
    healthy = np.ones(num_slots, np.bool_)
    if not (finite.all() and well.all()):
        healthy[rows.row_slots[~well]] = False
        healthy[rows.sample_slots[~finite]] = False
    return healthy


def agree(
    ranks: TensorParallelGroup, rows: StepRows, choice: Choice | None, *, num_slots: int, device: torch.device
) -> Choice:
    """Return what the first rank of the attention replica chose. A collective, where there are rows.

    Args:
        ranks: of the replica.
        rows: of the step, the same on all of them.
        choice: of the first rank; None on the others.
        num_slots: S.
        device: of the collective.
    """
    num_tokens = rows.sample_slots.size
    numbers = np.ones(num_tokens + num_slots, np.int64)
    if choice is not None:
        numbers = np.concatenate([choice.tokens, choice.healthy], dtype=np.int64)
    if rows.num_rows:
        numbers = ranks.first(torch.from_numpy(numbers).to(device)).cpu().numpy()
    return choice or Choice(tokens=numbers[:num_tokens], healthy=numbers[num_tokens:] != 0)
