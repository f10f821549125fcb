"""The rows of a step and cache group as kernels are told of them: runs, block tables and tiles, on the device.

Not attention (attend.py) and not the numpy rows of a rank. Made once a step, read by every layer of the group.
Letters: R runs of rows of one sequence; the first are single rows (decode). Units: tokens, blocks.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch


class GpuStep:
    """One step.

    Args:
        runs: [R, 4] i64: first row, number of rows, position of the first, where its blocks begin in `tables`.
        tables: [n] i32, block tables after each other, each from the first block of its sequence on; entries of blocks
            that no row sees are not looked at.
        num_decodes: how many of the first runs are single rows that `decode` kernels take.
        device: where the tensors go.
        send: takes arrays there; None: as torch does, which makes the host wait where their memory is not pinned.

    Attributes:
        runs, tables: on the device.
        num_decodes: as above.
        longest_decode: tokens of the longest sequence among them, its row's own included; 0 without any.
    """

    def __init__(
        self,
        runs: np.ndarray,
        tables: np.ndarray,
        num_decodes: int,
        device: torch.device,
        send: Callable[[np.ndarray], torch.Tensor] | None = None,
    ) -> None:
        assert runs.dtype == np.int64 and runs.shape[1:] == (4,) and tables.dtype == np.int32, (
            runs.dtype,
            tables.dtype,
        )
        assert (runs[:num_decodes, 1] == 1).all(), "decode rows are single"
        self._host_runs, self._send = runs, send or (lambda array: torch.from_numpy(array).to(device))
        self.runs, self.tables = self._send(runs), self._send(tables)
        self.num_decodes = num_decodes
        self.longest_decode = int(runs[:num_decodes, 2].max(initial=-1)) + 1
        self._tiles: dict[int, torch.Tensor] = {}

    @classmethod
    def of_single_rows(cls, runs: torch.Tensor, tables: torch.Tensor, longest: int) -> GpuStep:
        """Return a step of single rows whose numbers stand on the device already and may change there.

        Args:
            runs: [R, 4] i64.
            tables: [n] i32.
            longest: no sequence has more tokens.
        """
        step = cls.__new__(cls)
        step._host_runs, step._tiles = np.empty((len(runs), 4), np.int64), {}
        step._send = lambda array: torch.from_numpy(array).to(runs.device)
        step.runs, step.tables, step.num_decodes, step.longest_decode = runs, tables, len(runs), longest
        return step

    def tiles(self, rows: int) -> torch.Tensor:
        """Return the other runs cut into tiles of `rows`, those with most keys first: [n, 2] i32, run and first row.

        Example:
            Runs of 5 and 2 rows behind 0 and 100 tokens in tiles of 4: [[1, 0], [0, 4], [0, 0]].
        """
        if rows not in self._tiles:
            numbers, lengths = np.arange(self.num_decodes, len(self._host_runs)), self._host_runs[self.num_decodes :, 1]
            counts = -(-lengths // rows)
            run = np.repeat(numbers, counts)
            first = (np.arange(len(run)) - np.repeat(np.cumsum(counts) - counts, counts)) * rows
            order = np.argsort(-(self._host_runs[run, 2] + first), kind="stable")
            tiles = np.stack([run, first], axis=1)[order].astype(np.int32)
            self._tiles[rows] = self._send(tiles)
        return self._tiles[rows]
