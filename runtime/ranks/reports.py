"""Log-probabilities as a rank reports them: of the tokens that were chosen, and of the tokens of prompts.

Not their computation (logprobs.py) and not their texts (runtime/deltas.py). Those of prompts come in
pieces as chunks run, each place once, also where a preemption makes a prompt run again.
Shapes: T rows of the step, K sampled; place p of a prompt is judged by the row that reads place p - 1.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ..plan import PromptLogprobs, TokenLogprobs, pack
from .batch import Segment, StepRows, WorkerBatch
from .host_memory import Send
from .logprobs import token_logprobs
from .row_scan import finite_rows

# Rows of prompts whose logits exist at once. Between two pieces a rank shows a sign of life, so a piece must be short
# beside `--stall-timeout` even where one slow core multiplies them with a large vocabulary.
MOST_ROWS = 64


def chosen_logprobs(
    batch: WorkerBatch, rows: StepRows, logits: torch.Tensor, tokens: np.ndarray, healthy: np.ndarray, send: Send
) -> tuple[TokenLogprobs, ...]:
    """Return what was asked about `tokens` [K], chosen by `logits` [K, V]; `healthy` is [S] bool by slot.

    What is asked of the logits goes to where they are by `send`.
    """
    wanted = batch.sampling.num_logprobs[rows.sample_slots]
    generates = batch.num_tokens[rows.sample_slots] < batch.max_length[rows.sample_slots]
    at = np.flatnonzero((wanted >= 0) & healthy[rows.sample_slots] & generates)
    if not at.size:
        return ()
    found = token_logprobs(logits, send(tokens[at]), int(wanted[at].max()), at, send)
    sequence_ids = batch.sequence_ids[rows.sample_slots[at]].tolist()
    chosen = tokens[at].tolist()
    return tuple(
        TokenLogprobs(
            sequence_id=sequence_ids[i],
            token_ids=(chosen[i], *found.top_ids[i, :num].tolist()),
            logprobs=(float(found.chosen[i]), *found.top[i, :num].tolist()),
            rank=int(found.rank[i]),
        )
        for i, num in enumerate(wanted[at].tolist())
    )


def prompt_logprobs(
    batch: WorkerBatch,
    rows: StepRows,
    hidden: torch.Tensor,
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    healthy: np.ndarray,
    send: Send,
) -> tuple[PromptLogprobs, ...]:
    """Return what was asked about the prompts of this step's chunks, and remember that it is told.

    Args:
        batch: whose prompts.
        rows: what ran.
        hidden: [T, D], final.
        logits_of: [n, D] -> [n, V] f32.
        healthy: [S] bool by slot; false is written where logits are not finite.
        send: takes tokens to where the hidden states are.
    """
    if not batch.sampling.prompt_end.any():
        return ()
    pieces: list[PromptLogprobs] = []
    for segment in rows.segments:
        slot = segment.slot
        first = max(segment.num_computed_tokens + 1, int(batch.sampling.prompt_from[slot]))
        end = min(segment.num_computed_tokens + segment.num_rows + 1, int(batch.sampling.prompt_end[slot]))
        for start in range(first, end, MOST_ROWS):
            if not healthy[slot]:
                break
            stop = min(start + MOST_ROWS, end)
            own = _piece(batch, segment, hidden, logits_of, (start, stop), send)
            if own is None:
                healthy[slot] = False
            else:
                pieces.append(own)
                batch.sampling.prompt_from[slot] = stop
    return tuple(pieces)


def _piece(
    batch: WorkerBatch,
    segment: Segment,
    hidden: torch.Tensor,
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    places: tuple[int, int],
    send: Send,
) -> PromptLogprobs | None:
    """Return the report of `places` (first, behind the last), None when their logits are not finite."""
    slot, (start, stop) = segment.slot, places
    row = segment.row_start + start - 1 - segment.num_computed_tokens
    logits = logits_of(hidden[row : row + stop - start])
    if not bool(finite_rows(logits).all()):
        return None
    tokens = batch.tokens[slot][start:stop].astype(np.int64)
    num_top = int(batch.sampling.num_prompt_logprobs[slot])
    found = token_logprobs(logits, send(tokens), num_top)
    return PromptLogprobs(
        slot=slot,
        sequence_id=int(batch.sequence_ids[slot]),
        start=start,
        token_ids=pack(np.concatenate([tokens[:, None], found.top_ids], axis=1)),
        logprobs=pack(np.concatenate([found.chosen[:, None], found.top], axis=1), "<f4"),
        ranks=pack(found.rank),
    )
