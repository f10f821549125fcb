"""`TraceSession`: one step trace of all replicas, as their client sees it.

Not the recording (runtime/step_recorder.py) and not HTTP (server/trace/). All of it runs in the thread of the replicas.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from .messages import StartTrace, StopTrace, Traced, TraceProgress
from .replica import Replica

# Marks take 16 bytes in engines, and some 120 bytes each as JSON.
MOST_MARKS = 500_000
_TRACE_IDS = itertools.count(1)


class TraceSession:
    """Asks all replicas to record their next steps. Must be closed.

    Args:
        replicas: all of them.
        num_steps: of each.
        after_command: called when something was said to a replica.
        most_marks: of all replicas together; a replica that reaches its share ends early.

    Attributes:
        num_steps: as asked.
        steps: of each replica, as far as is known.
        traces: of each replica; None before it has come.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        num_steps: int,
        after_command: Callable[[], None],
        most_marks: int = MOST_MARKS,
    ) -> None:
        self.num_steps = num_steps
        self.steps = [0] * len(replicas)
        self.traces: list[Traced | None] = [None] * len(replicas)
        self._replicas, self._after_command = replicas, after_command
        self._trace_id = next(_TRACE_IDS)
        share = most_marks // len(replicas)
        for index, replica in enumerate(replicas):
            replica.on_trace = self._listener(index)
            replica.trace(StartTrace(trace_id=self._trace_id, num_steps=num_steps, most_marks=share))
        after_command()

    @property
    def is_done(self) -> bool:
        """True when every replica has handed over its trace, or never will."""
        return all(trace is not None or not one.lives for trace, one in zip(self.traces, self._replicas, strict=True))

    def stop(self) -> None:
        """Let replicas hand over what they have."""
        for trace, replica in zip(self.traces, self._replicas, strict=True):
            if trace is None:
                replica.trace(StopTrace(trace_id=self._trace_id))
        self._after_command()

    def close(self) -> None:
        """End it, whatever has come."""
        for replica in self._replicas:
            replica.on_trace = None
        self.stop()

    def _listener(self, index: int) -> Callable[[TraceProgress | Traced], None]:
        def listen(message: TraceProgress | Traced) -> None:
            if message.trace_id != self._trace_id:
                return  # of one before, which was given up
            if isinstance(message, Traced):
                self.traces[index] = message
                self.steps[index] = len(message.steps)
            else:
                self.steps[index] = message.num_steps

        return listen
