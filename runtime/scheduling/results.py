"""What the result of a rank means to the requests that it is about: whose it is, and which tokens each of them got.

Not the books (scheduler.py, batch_state.py): functions that read them. Units: tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from ..plan import FINISH_LENGTH, FINISH_NONE, FINISH_STOP, RankResult, unpack
from .batch_state import BatchState
from .request import Request, SequenceUpdate

# Of FINISH_*; an error has a text of its own.
REASONS = {FINISH_NONE: None, FINISH_STOP: "stop", FINISH_LENGTH: "length"}


def owners_of(
    batch: BatchState, departed: Mapping[int, Request], rank: int, slots: np.ndarray, ids: np.ndarray
) -> list[Request | None]:
    """Return whose sequences `ids` [n] in `slots` [n] of `rank` are; None for one that was given up meanwhile.

    Args:
        batch: knows those that hold their slot still.
        departed: by sequence id, those that do not.
        rank, slots, ids: as a result names them.
    """
    current = batch.sequence_id[rank, slots] == ids
    requests = batch.requests[rank]
    if current.all():
        return [requests[slot] for slot in slots.tolist()]
    found = zip(slots.tolist(), ids.tolist(), current.tolist(), strict=True)
    return [requests[slot] if is_current else departed.get(sequence_id) for slot, sequence_id, is_current in found]


def flags_of(outcome: RankResult, num: int) -> list[int]:
    """Return FINISH_* of each of the `num` sequences of a result."""
    return unpack(outcome.flags, "u1").tolist() if outcome.flags else [FINISH_NONE] * num


def tokens_of(outcome: RankResult) -> list[list[int]]:
    """Return the new tokens of each sequence of a result, in its order."""
    tokens = unpack(outcome.tokens).tolist()
    if not outcome.counts:
        return [[token] for token in tokens]
    ends = np.cumsum(unpack(outcome.counts)).tolist()
    return [tokens[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def prompt_updates(outcome: RankResult, owner: Callable[[int, int], Request | None]) -> dict[int, SequenceUpdate]:
    """Return updates, by sequence id, for requests whose prompts' log-probabilities came, and count their places.

    `owner` tells whose the sequence in a slot is, by its slot and its id.
    """
    updates: dict[int, SequenceUpdate] = {}
    for piece in outcome.prompt_logprobs:
        request = owner(piece.slot, piece.sequence_id)
        if request is not None:
            assert piece.start == request.num_prompt_logprobs + 1, "a place of a prompt is missing, or came twice"
            request.num_prompt_logprobs += len(piece.ranks) // 4
            updates.setdefault(piece.sequence_id, SequenceUpdate(request, [])).prompt_logprobs += (piece,)
    return updates
