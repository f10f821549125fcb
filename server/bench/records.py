"""What was seen of one request, whoever ran it.

Not statistics over many (server/bench/statistics.py). One record a request; the client or the session fills it.
Units: seconds of one monotonic clock; tokens.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field


def _doubles() -> array[float]:
    return array("d")


@dataclass(kw_only=True)
class RequestRecord:
    """One request.

    Attributes:
        started: when it was sent.
        first: when the first token was seen; None when none was.
        last: when the latest token was seen.
        ended: when the answer was complete, or had failed.
        prompt_tokens, output_tokens: as the server counts them; of a server that does not tell, what was asked for and
            the number of pieces.
        pieces: parts of the answer that brought tokens.
        gaps: seconds between one piece and the next.
        counted: the server told how many tokens there were.
        error: why it failed; None when it succeeded.
    """

    started: float = 0.0
    first: float | None = None
    last: float = 0.0
    ended: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    pieces: int = 0
    gaps: array[float] = field(default_factory=_doubles)
    counted: bool = False
    error: str | None = None

    def saw_piece(self, now: float) -> None:
        """Note that tokens came."""
        if self.first is None:
            self.first = now
        else:
            self.gaps.append(now - self.last)
        self.last = now
        self.pieces += 1

    @property
    def ttft(self) -> float | None:
        """Time to the first token."""
        return None if self.first is None else self.first - self.started

    @property
    def e2el(self) -> float:
        """End-to-end latency."""
        return self.ended - self.started

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; None when there were fewer than two."""
        if self.first is None or self.output_tokens < 2:
            return None
        return (self.last - self.first) / (self.output_tokens - 1)
