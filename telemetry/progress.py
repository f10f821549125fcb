"""Signs of life of every rank: counters in shared memory that a supervisor can read though a rank is stopped.

Not a metric: values are compared only with themselves a moment ago. One writer a row, so no lock is needed.
Shapes: board [W, 4] i64, columns below.
"""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np

STEP, TICK, HEARTBEAT, STATE = range(4)
STATE_STARTING, STATE_IDLE, STATE_BUSY = range(3)


class RankProgress:
    """The row of one rank: the rank ticks it, the supervisor reads it."""

    def __init__(self, row: np.ndarray) -> None:
        self._row = row
        self._cells = row.data  # faster than numpy for single numbers, and this is called often

    @property
    def tick_address(self) -> int:
        """Where the counter of `tick` lies (i64), for native code that gets further without coming back."""
        return int(self._row.ctypes.data) + TICK * self._row.itemsize

    def tick(self) -> None:
        """Say that this rank got one operation further (a layer, one side of a collective, a loaded tensor)."""
        self._cells[TICK] += 1

    def heartbeat(self) -> None:
        """Say that this rank is alive while it waits for a plan."""
        self._cells[HEARTBEAT] += 1

    def enter(self, state: int, step: int) -> None:
        """Say what this rank does now (`STATE_*`) and in which step; ticks count from 0 again, so ranks compare."""
        self._cells[TICK] = 0
        self._cells[STATE] = state
        self._cells[STEP] = step


class ProgressBoard:
    """The rows of all ranks, in this process's memory or in a file that several processes map.

    Args:
        num_ranks: W, rows of the board.
        path: a file to map (made and sized when missing); None keeps the board in this process.
    """

    def __init__(self, num_ranks: int, path: Path | None = None) -> None:
        num_bytes = num_ranks * 4 * 8
        if path is None:
            self.rows = np.zeros((num_ranks, 4), np.int64)  # [W, 4]
            return
        with open(path, "a+b") as file:
            if file.tell() < num_bytes:
                file.truncate(num_bytes)
            self._map = mmap.mmap(file.fileno(), num_bytes)
        self.rows = np.frombuffer(self._map, np.int64).reshape(num_ranks, 4)

    def rank(self, rank: int) -> RankProgress:
        """Return the handle with which `rank` reports."""
        return RankProgress(self.rows[rank])

    def snapshot(self) -> np.ndarray:
        """Return a copy of all rows, [W, 4] i64."""
        return self.rows.copy()
