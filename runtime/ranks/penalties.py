"""Which tokens occurred in the sequences that ask for penalties, how often, and where: in the prompt or in the output.

Not their effect on logits (logit_edits.py). Only slots that ask cost anything: a row of distinct tokens each.
Shapes: S slots, R rows of the table, C most distinct tokens of a row; tables are [R, C] i32 and grow by doubling.
"""

from __future__ import annotations

import numpy as np

NO_ROW = -1
_FIRST_WIDTH = 64


class PenaltyTable:
    """Distinct tokens by slot.

    Args:
        num_slots: S.

    Attributes:
        row: [S] i64, the row of each slot, NO_ROW for those that do not ask.
    """

    def __init__(self, num_slots: int) -> None:
        self.row = np.full(num_slots, NO_ROW, np.int64)
        self._ids = np.zeros((0, _FIRST_WIDTH), np.int32)
        self._outputs = np.zeros((0, _FIRST_WIDTH), np.int32)  # times in the output; 0 where only the prompt has it
        self._used = np.zeros(0, np.int64)  # distinct tokens of each row
        self._free: list[int] = []

    def admit(self, slot: int, prompt: np.ndarray, output: np.ndarray) -> None:
        """Count the known tokens of a sequence; an empty `prompt` where only the output counts."""
        ids, inverse = np.unique(np.concatenate([prompt, output]), return_inverse=True)
        row = self._new_row()
        self._widen(ids.size)
        self.row[slot], self._used[row] = row, ids.size
        self._ids[row, : ids.size] = ids
        self._outputs[row, : ids.size] = np.bincount(inverse[len(prompt) :], minlength=ids.size)

    def release(self, slots: np.ndarray) -> None:
        """Forget the sequences of `slots`."""
        rows = self.row[slots]
        self._free += rows[rows != NO_ROW].tolist()
        self.row[slots] = NO_ROW

    def note(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        """Count one generated token in each of `slots`, which are distinct; `tokens` as many."""
        rows = self.row[slots]
        asking = rows != NO_ROW
        if not asking.any():
            return
        rows, tokens = rows[asking], tokens[asking]
        used = self._used[rows]
        self._widen(int(used.max()) + 1)
        width = int(used.max()) + 1
        known = (self._ids[rows, :width] == tokens[:, None]) & (np.arange(width) < used[:, None])
        found = known.any(1)
        place = np.where(found, known.argmax(1), used)
        self._ids[rows, place] = tokens
        self._outputs[rows, place] = np.where(found, self._outputs[rows, place], 0) + 1
        self._used[rows] += ~found

    def entries(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (index into `slots`, token, times in the output) of all that occurred in these, [n] i64 each."""
        at = np.flatnonzero(self.row[slots] != NO_ROW)
        rows = self.row[slots[at]]
        used = self._used[rows]
        width = int(used.max(initial=0))
        owner, place = np.nonzero(np.arange(width) < used[:, None])
        taken = rows[owner], place
        return at[owner], self._ids[taken].astype(np.int64), self._outputs[taken].astype(np.int64)

    def _new_row(self) -> int:
        if not self._free:
            rows, width = self._ids.shape
            more = max(4, rows)
            self._ids = np.concatenate([self._ids, np.zeros((more, width), np.int32)])
            self._outputs = np.concatenate([self._outputs, np.zeros((more, width), np.int32)])
            self._used = np.concatenate([self._used, np.zeros(more, np.int64)])
            self._free = list(range(rows + more - 1, rows - 1, -1))
        return self._free.pop()

    def _widen(self, width: int) -> None:
        before = self._ids.shape[1]
        if width > before:
            wider = ((0, 0), (0, max(width, 2 * before) - before))
            self._ids, self._outputs = np.pad(self._ids, wider), np.pad(self._outputs, wider)
