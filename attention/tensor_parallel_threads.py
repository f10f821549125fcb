"""Ranks of an attention replica that are threads of one process: each reads what the others left.

Not for speed: it lets tests run any attention layout in one process. One meeting a collective.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..topologies.meeting import Meeting
from .tensor_parallel import HeadShare
from .tensor_parallel_meeting import MeetingTensorParallelGroup


class ThreadTensorParallelHub:
    """The meeting place of the W ranks of one attention replica.

    Args:
        size: W.
        timeout_s: how long a rank waits for the others in one collective; None waits for ever.
    """

    def __init__(self, size: int, *, timeout_s: float | None = None) -> None:
        self.size = size
        self._meeting = Meeting(size, timeout_s, "attention")

    def rank(self, rank: int) -> ThreadTensorParallelGroup:
        """Return the group as the thread of `rank`, counted within the replica, sees it."""
        return ThreadTensorParallelGroup(self._meeting, HeadShare(rank, self.size))

    def abort(self, reason: str) -> None:
        """Make every rank that waits, or comes to wait, raise `PeersLostError` with `reason`."""
        self._meeting.abort(reason)


class ThreadTensorParallelGroup(MeetingTensorParallelGroup):
    """`TensorParallelGroup` of one rank of a `ThreadTensorParallelHub`."""

    def __init__(self, meeting: Meeting, share: HeadShare) -> None:
        super().__init__(share)
        self._meeting = meeting

    def _meet(self, values: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
        parts: list[torch.Tensor] = self._meeting.swap(self.share.rank, values)
        assert [part.shape[0] for part in parts] == list(sizes), ([part.shape for part in parts], sizes)
        return parts
