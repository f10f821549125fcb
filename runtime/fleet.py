"""`Fleet`: replica sets of more than one layout behind one door, while one takes the place of another.

Not a change of layout (server/http/layout_change.py decides what starts and ends) and not a set (runtime/replicas.py).
Use it from the thread of the sets.
"""

from __future__ import annotations

from .messages import Stats
from .params import SamplingParams
from .replicas import ReplicaSet
from .trace_session import TraceSession


class Fleet:
    """All sets that serve; the last one is `current`: figures, traces and /v1/topology are of it.

    Args:
        first: the set that serves alone.
    """

    def __init__(self, first: ReplicaSet) -> None:
        self.sets = [first]

    @property
    def current(self) -> ReplicaSet:
        """The set that is shown."""
        return self.sets[-1]

    def submit(self, request_id: str, prompt: bytes, params: SamplingParams, priority: int = 0) -> None:
        """Hand a request to the set whose least loaded replica has least to do; of equals to the one that is shown.

        Raises:
            ValueError, ReplicaLost: as `ReplicaSet.submit`.
        """
        taking = [(load, each) for each in reversed(self.sets) if (load := each.least_outstanding) is not None]
        chosen = min(taking, key=lambda one: one[0])[1] if taking else self.current
        chosen.submit(request_id, prompt, params, priority)

    def abort(self, request_id: str) -> None:
        """Ask to forget a request; unknown ids are ignored."""
        for each in self.sets:
            each.abort(request_id)

    def lengths(self) -> list[int]:
        """Return the tokens that each request which runs or waits is expected to hold at its end."""
        return [length for each in self.sets for length in each.lengths]

    def stats(self) -> list[Stats]:
        """Return the newest statistics of the replicas of the set that is shown."""
        return self.current.stats()

    def trace(self, num_steps: int) -> TraceSession:
        """Let the replicas of the set that is shown record steps."""
        return self.current.trace(num_steps)
