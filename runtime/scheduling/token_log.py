"""The newest tokens of all sequences that hold a slot, a row a step: a step books all of its tokens in one write.

Not a request's own list: what the log is about to forget, and what somebody asks for, moves there (`settle`).
Shapes: N places (a slot of a rank each: rank * S + slot), ROWS steps; token ids are i32, NOTHING where none came.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

ROWS = 256
# Rows are written one by one, and turned when there are WIDTH of them, a cache line: so that a step writes to one
# stretch of memory, and settling a place reads another.
WIDTH = 16
NOTHING = -1
# A block of places is settled at once, so that no step settles all of them; fewer would cost more than they spread.
LEAST_BLOCK = 64


class TokenOwner(Protocol):
    """Who gets tokens of a place, as i32 bytes at the end of `past`."""

    past: bytes
    place: int


class TokenLog:
    """Rows of tokens by place; written over after ROWS steps, and settled before that.

    Args:
        num_places: N.
    """

    def __init__(self, num_places: int) -> None:
        self._recent = np.full((WIDTH, num_places), NOTHING, np.int32)
        self._turned = np.full((num_places, ROWS), NOTHING, np.int32)
        self._since = np.zeros(num_places, np.int64)  # rows before it are settled, or another owner's
        self._clock = 0  # rows written so far
        self._block = max(LEAST_BLOCK, -(-num_places // ROWS))

    def begin(self, places: np.ndarray) -> None:
        """Let new owners have what comes to `places` from now on."""
        self._since[places] = self._clock

    def write(self, places: np.ndarray, tokens: np.ndarray, owners: Sequence[TokenOwner | None]) -> None:
        """Book a token, or NOTHING, of each of `places`, all different.

        `owners` are those of all places, None where it is free.
        """
        row = self._recent[self._clock % WIDTH]
        row.fill(NOTHING)
        row[places] = tokens
        self._clock += 1
        if self._clock % WIDTH == 0:
            end = (self._clock - 1) % ROWS + 1
            self._turned[:, end - WIDTH : end] = self._recent.T
        start = self._clock % ROWS * self._block
        if start < len(self._since):  # in ROWS steps each place has its turn once
            block = slice(start, start + self._block)
            self._settle(block, owners[block])

    def is_behind(self, place: int) -> bool:
        """Tell whether `settle` would have something to do for the owner of `place`."""
        return bool(self._since[place] < self._clock)

    def settle(self, owners: Sequence[TokenOwner]) -> None:
        """Hand each of `owners`, all different, the tokens that came to its place since the last time."""
        places = np.array([owner.place for owner in owners], np.int64)
        behind = np.flatnonzero(self._since[places] < self._clock)
        if behind.size:
            self._settle(places[behind], [owners[i] for i in behind.tolist()])

    def leave(self, places: np.ndarray) -> LeftTokens:
        """Return what came to `places` [n] since the last time, in their order, for owners that give them up."""
        return self._unsettled(places)

    def _settle(self, places: np.ndarray | slice, owners: Sequence[TokenOwner | None]) -> None:
        data, ends = self._unsettled(places).apart()
        start = 0
        for owner, end in zip(owners, ends, strict=True):
            if owner is not None and end > start:
                owner.past += data[start:end]
            start = end
        self._since[places] = self._clock

    def _unsettled(self, places: np.ndarray | slice) -> LeftTokens:
        ages = (self._clock - self._since[places]).astype(np.int16)  # at most ROWS
        num_recent, oldest = self._clock % WIDTH, self._clock // WIDTH * WIDTH % ROWS
        return LeftTokens(self._turned[places], oldest, self._recent[:num_recent, places], ages)

    def check_invariants(self, owners: Sequence[TokenOwner | None]) -> None:
        """Raise AssertionError when tokens could be lost, or an owner does not know its place."""
        taken = [place for place, owner in enumerate(owners) if owner is not None]
        assert all(owners[place].place == place for place in taken), "an owner is at another place"  # type: ignore[union-attr]
        since = self._since[taken]
        assert ((since <= self._clock) & (since >= self._clock - ROWS)).all(), "tokens were written over"


class LeftTokens:
    """Tokens of sequences that gave up their places together; told apart when somebody asks, which few do.

    Args:
        turned: [n, ROWS] i32, tokens of each in a ring.
        oldest: where the ring begins.
        recent: [m, n] i32, the tokens that came behind those.
        ages: [n] i16, of how many of the newest of both each sequence is owner.
    """

    def __init__(self, turned: np.ndarray, oldest: int, recent: np.ndarray, ages: np.ndarray) -> None:
        self._turned, self._oldest, self._recent, self._ages = turned, oldest, recent, ages
        self._data = b""
        self._ends: list[int] = []

    def of(self, index: int) -> bytes:
        """Return the tokens of one sequence as i32 bytes."""
        if not self._ends:
            self._data, self._ends = self.apart()
        return self._data[self._ends[index - 1] if index else 0 : self._ends[index]]

    def apart(self) -> tuple[bytes, list[int]]:
        """Return the tokens of each sequence, one after another, as i32 bytes, and where each of them ends."""
        ring, oldest, ages = self._turned, self._oldest, self._ages
        rows = np.concatenate((ring[:, oldest:], ring[:, :oldest], self._recent.T), 1)
        rows = rows[:, rows.shape[1] - int(ages.max()) :]  # oldest first
        fresh = (rows != NOTHING) & (np.arange(rows.shape[1], 0, -1, dtype=np.int16) <= ages[:, None])
        data = (rows if fresh.all() else rows[fresh]).tobytes()
        ends: list[int] = (fresh.sum(1).cumsum() * rows.itemsize).tolist()
        return data, ends
