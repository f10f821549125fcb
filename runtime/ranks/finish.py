"""Where a sequence ends: how many of the tokens chosen in a step it keeps, and why it stops there.

The one rule for one token a step and for many. Not stop strings: workers know tokens, the engine knows text
(runtime/text_output.py), and cuts further where a string ends before.
Shapes: K sequences, Q most tokens of any in the step, E most end tokens of any.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..plan import FINISH_LENGTH, FINISH_NONE, FINISH_STOP

NO_TOKEN = -1


@dataclass(frozen=True, kw_only=True)
class Committed:
    """What became of the tokens of a step.

    Attributes:
        counts: [K] i64, how many each sequence keeps, from its first on.
        flags: [K] u8, FINISH_*.
    """

    counts: np.ndarray
    flags: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Of n sequences that came on in a step: slots, how many of `tokens` each got, FINISH_* flags."""

    slots: np.ndarray
    tokens: np.ndarray
    counts: np.ndarray
    flags: np.ndarray


def commit_tokens(tokens: np.ndarray, lengths: np.ndarray, max_length: np.ndarray, ends: np.ndarray) -> Committed:
    """Keep tokens up to the first end token, which is kept, and no more than there is room for.

    An end token in the last place that there is room for ends the sequence as an end token.

    Args:
        tokens: [K, Q] i64, in order; NO_TOKEN behind the last one.
        lengths: [K] i64, tokens before these.
        max_length: [K] i64, of the sequence with all its tokens.
        ends: [K, E] i64, its end tokens, NO_TOKEN behind the last one.
    """
    if tokens.shape[1] == 1:
        return _commit_one(tokens[:, 0], lengths, max_length, ends)
    counts = np.minimum((tokens != NO_TOKEN).sum(1), np.maximum(max_length - lengths, 0))
    usable = np.arange(tokens.shape[1]) < counts[:, None]
    is_end = (tokens[:, :, None] == ends[:, None, :]).any(2) & usable
    stopped = is_end.any(1)
    counts = np.where(stopped, is_end.argmax(1) + 1, counts)
    flags = np.where(lengths + counts >= max_length, FINISH_LENGTH, FINISH_NONE)
    return Committed(counts=counts, flags=np.where(stopped, FINISH_STOP, flags).astype(np.uint8))


def _commit_one(tokens: np.ndarray, lengths: np.ndarray, max_length: np.ndarray, ends: np.ndarray) -> Committed:
    """The same for one token each, which is what a step nearly always brings: tokens [K]."""
    kept = (tokens != NO_TOKEN) & (lengths < max_length)
    flags = (lengths + kept >= max_length) * np.uint8(FINISH_LENGTH)
    flags[(tokens[:, None] == ends).any(1) & kept] = FINISH_STOP
    return Committed(counts=kept.astype(np.int64), flags=flags)
