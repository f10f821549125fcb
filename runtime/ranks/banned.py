"""Tokens that a sequence may not take next: the ends of bad words whose beginnings its last tokens spell.

Not the ban itself (logit_edits.py). Only slots that have bad words cost anything.
Shapes: S slots, B words of all slots, L most tokens of a word before its last one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_ANY, _NOTHING = -1, -2  # in a beginning: no token is asked for; in a history: no token is there


class BadWords:
    """Words by slot, and the last output tokens of the slots.

    A word counts when all its tokens are output, so a prompt that ends within one bans nothing.

    Args:
        num_slots: S.
    """

    def __init__(self, num_slots: int) -> None:
        self._slot = np.zeros(0, np.int64)  # [B]
        self._begin = np.zeros((0, 0), np.int64)  # [B, L], aligned to the right
        self._last = np.zeros(0, np.int64)  # [B]
        self._history = np.full((num_slots, 0), _NOTHING, np.int64)  # [S, L], aligned to the right

    def admit(self, slot: int, words: Sequence[Sequence[int]], output: np.ndarray) -> None:
        """Take the words of a sequence that has generated `output` already."""
        longest = max(len(word) for word in words) - 1
        grow = ((0, 0), (max(0, longest - self._begin.shape[1]), 0))
        self._begin = np.pad(self._begin, grow, constant_values=_ANY)
        self._history = np.pad(self._history, grow, constant_values=_NOTHING)
        width = self._begin.shape[1]
        begin = np.full((len(words), width), _ANY, np.int64)
        for row, word in zip(begin, words, strict=True):
            row[width - len(word) + 1 :] = word[:-1]
        self._begin = np.concatenate([self._begin, begin])
        self._last = np.concatenate([self._last, [word[-1] for word in words]])
        self._slot = np.concatenate([self._slot, np.full(len(words), slot)])
        recent = output[max(0, len(output) - width) :]
        self._history[slot] = _NOTHING
        self._history[slot, width - len(recent) :] = recent

    def release(self, slots: np.ndarray) -> None:
        """Forget the words of `slots`."""
        kept = ~np.isin(self._slot, slots)
        self._slot, self._begin, self._last = self._slot[kept], self._begin[kept], self._last[kept]

    def note(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        """Take one generated token of each of `slots`."""
        if self._history.shape[1]:
            self._history[slots, :-1] = self._history[slots, 1:]
            self._history[slots, -1] = tokens

    def entries(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (index into `slots`, token that may not come next), [n] i64 each."""
        place = np.full(len(self._history), -1, np.int64)
        place[slots] = np.arange(slots.size)
        row = place[self._slot]
        spelled = (self._begin == _ANY) | (self._begin == self._history[self._slot])
        banned = spelled.all(1) & (row >= 0)
        return row[banned], self._last[banned]
