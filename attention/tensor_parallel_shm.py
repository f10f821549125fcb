"""Ranks of an attention replica that are processes of one host: rows lie in memory that all of them map.

Not a message goes between them: a rank writes its part, says so by one number, and reads those of the others in place.
On CPUs whose stores others see in order (x86). Waiting is a few looks, then short sleeps.
Letters: W ranks of the replica, T rows of the replica, t rows of this rank, D width. Units: bytes, seconds.
"""

from __future__ import annotations

import mmap
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from ..telemetry import RankProgress
from ..topologies.host_memory import share_memory
from .tensor_parallel import HeadShare
from .tensor_parallel_meeting import MeetingTensorParallelGroup

_LINE_BYTES = 128  # two cache lines, which are fetched together
_LOOKS = 2000  # some hundred microseconds, the processor offered to others between them
_SHORTEST_SLEEP_S, _LONGEST_SLEEP_S = 20e-6, 1e-3


def can_share() -> bool:
    """Tell whether this host keeps the order of stores, which is all that ranks rely on."""
    return platform.machine() in ("x86_64", "AMD64")


def area_bytes(*, num_rows: int, width: int, itemsize: int, num_slots: int) -> int:
    """Return the room that a rank needs for what it offers in one collective.

    Args:
        num_rows: most rows of a step.
        width: D.
        itemsize: bytes of an activation element.
        num_slots: sequences of a batch, about each of which the first rank says two numbers.
    """
    row_bytes = max(width * itemsize, 2 * 4)  # two fp32 numbers a row are averaged for a norm over all heads
    return max(num_rows * row_bytes, 2 * num_slots * 8)


def meet_at(place: Path, share: HeadShare, num_bytes: int, timeout_s: float) -> int:
    """Return a file descriptor of memory for the W ranks: the first makes it and says at `place` where it is.

    Args:
        place: a file in a folder private to this launch, one an attention replica.
        share: of this rank.
        num_bytes: `area_bytes`.
        timeout_s: how long to wait for the first.

    Raises:
        RuntimeError: it did not come in time.
    """
    total = _memory_bytes(share.size, num_bytes)
    return share_memory(place, "attention", total, is_first=share.is_first, timeout_s=timeout_s)


class ShmTensorParallelGroup(MeetingTensorParallelGroup):
    """`TensorParallelGroup` of one rank of an attention replica on one host.

    Args:
        fd: from `meet_at`; may be closed afterwards.
        share: of this rank.
        num_bytes: as given to `meet_at`.
        progress: ticked before and after each collective; None in tests.
    """

    def __init__(self, fd: int, share: HeadShare, num_bytes: int, progress: RankProgress | None = None) -> None:
        super().__init__(share)
        self._progress = progress
        self._memory = mmap.mmap(fd, _memory_bytes(share.size, num_bytes))
        lines = np.frombuffer(self._memory, np.int64, share.size * _LINE_BYTES // 8).reshape(share.size, -1)
        self._turns = lines[:, 0]  # [W], how many collectives each rank has come to
        whole = torch.frombuffer(self._memory, dtype=torch.uint8)[_head_bytes(share.size) :]
        # Two areas a rank, used in turns: one may be at its next collective while others still read this one, but not
        # further, since nobody passes a meeting before all have come to it.
        self._areas = whole.view(2, share.size, -1)
        self._turn = 0

    def _meet(self, values: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
        areas = self._offer(values)
        return [_part(area, values, (size, *values.shape[1:])) for area, size in zip(areas, sizes, strict=True)]

    def _offer(self, values: torch.Tensor) -> torch.Tensor:
        """Write `values` where others see them and wait for theirs; return the areas of all ranks [W, bytes]."""
        if self._progress is not None:
            self._progress.tick()
        self._turn += 1
        areas, rank = self._areas[self._turn % 2], self.share.rank
        if values.nbytes > areas.shape[1]:
            raise RuntimeError(f"{values.nbytes} bytes in a collective of attention; it was made for {areas.shape[1]}")
        _part(areas[rank], values, values.shape).copy_(values)
        self._turns[rank] = self._turn
        self._wait()
        if self._progress is not None:
            self._progress.tick()
        return areas

    def _wait(self) -> None:
        # A rank that never comes is for the watchdog to judge: it ends this process.
        turns, turn = self._turns, self._turn
        for rank in range(self.share.size):
            looks, sleep_s = 0, _SHORTEST_SLEEP_S
            while turns[rank] < turn:
                if looks < _LOOKS:
                    looks += 1
                    os.sched_yield()
                else:
                    time.sleep(sleep_s)
                    sleep_s = min(2 * sleep_s, _LONGEST_SLEEP_S)


def _part(area: torch.Tensor, like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the head of an area as a tensor of `shape` in the dtype of `like`."""
    num_bytes = torch.Size(shape).numel() * like.element_size()
    return area[:num_bytes].view(like.dtype).view(shape)


def _head_bytes(size: int) -> int:
    return -(-size * _LINE_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE


def _memory_bytes(size: int, num_bytes: int) -> int:
    area = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    return _head_bytes(size) + 2 * size * area
