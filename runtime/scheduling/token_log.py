"""The newest tokens of all sequences that hold a slot, a row a step: a step books all of its tokens in one write.

Not a request's own list: what the log is about to forget, and what somebody asks for, moves there (`settle`).
Shapes: N places (a slot of a rank each: rank * S + slot), ROWS steps; token ids are i32, NOTHING where none came.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Protocol

import numpy as np

ROWS = 128
NOTHING = -1
# A block of places is settled at once, so that no step settles all of them; fewer would cost more than they spread.
LEAST_BLOCK = 64


class TokenOwner(Protocol):
    """Who gets tokens of a place."""

    past: array[int]
    place: int


class TokenLog:
    """Rows of tokens by place; written over after ROWS steps, and settled before that.

    Args:
        num_places: N.
    """

    def __init__(self, num_places: int) -> None:
        self._rows = np.full((ROWS, num_places), NOTHING, np.int32)
        self._since = np.zeros(num_places, np.int64)  # rows before it are settled, or another owner's
        self._clock = 0  # rows written so far
        self._block = max(LEAST_BLOCK, -(-num_places // ROWS))

    def begin(self, places: np.ndarray) -> None:
        """Let new owners have what comes to `places` from now on."""
        self._since[places] = self._clock

    def write(self, places: np.ndarray, tokens: np.ndarray, owners: Sequence[TokenOwner | None]) -> None:
        """Book a token of each of `places`, all different; `owners` are those of all places, None where it is free."""
        row = self._rows[self._clock % ROWS]
        row.fill(NOTHING)
        row[places] = tokens
        self._clock += 1
        start = self._clock % ROWS * self._block
        if start < len(self._since):  # in ROWS steps each place has its turn once
            block = slice(start, start + self._block)
            self._settle(block, [owner for owner in owners[block]])

    def is_behind(self, place: int) -> bool:
        """Tell whether `settle` would have something to do for the owner of `place`."""
        return bool(self._since[place] < self._clock)

    def settle(self, owners: Sequence[TokenOwner]) -> None:
        """Hand each of `owners`, all different, the tokens that came to its place since the last time."""
        places = np.array([owner.place for owner in owners], np.int64)
        behind = np.flatnonzero(self._since[places] < self._clock)
        if behind.size:
            self._settle(places[behind], [owners[i] for i in behind.tolist()])

    def _settle(self, places: slice | np.ndarray, owners: Sequence[TokenOwner | None]) -> None:
        steps = np.arange(self._clock - ROWS, self._clock)
        rows = self._rows[:, places][steps % ROWS]  # [ROWS, n], oldest first
        fresh = ((rows != NOTHING) & (steps[:, None] >= self._since[places])).T
        ends = fresh.sum(1).cumsum() * 4
        data, start = rows.T[fresh].tobytes(), 0
        for owner, end in zip(owners, ends.tolist(), strict=True):
            if owner is not None and end > start:
                owner.past.frombytes(data[start:end])
            start = end
        self._since[places] = self._clock

    def check_invariants(self, owners: Sequence[TokenOwner | None]) -> None:
        """Raise AssertionError when tokens could be lost, or an owner does not know its place."""
        taken = [place for place, owner in enumerate(owners) if owner is not None]
        assert all(owners[place].place == place for place in taken), "an owner is at another place"  # type: ignore[union-attr]
        since = self._since[taken]
        assert ((since <= self._clock) & (since >= self._clock - ROWS)).all(), "tokens were written over"
