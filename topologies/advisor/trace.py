"""The audit log of advice, a JSON object a line, and its replay: what was told, what was said, what was done.

Not the advisor. A line is `facts` (a layout begins to run), `window` (an observation and the advice after it), or
`applied` (a change was asked for, and how it ended). Replaying the first two gives the same advice again. A log comes
from a file and is checked like one: wrong lines are refused with their number, those that nobody ended are left out.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from .advisor import Advisor
from .records import Advice, AdviceError, Facts, Observation

log = logging.getLogger(__name__)

VERSION = 1
MOST_LINE_BYTES, MOST_LINES = 4 << 20, 10_000_000


class FactsLine(msgspec.Struct, frozen=True, kw_only=True, tag="facts", tag_field="record", forbid_unknown_fields=True):
    """A layout begins to run."""

    version: int
    facts: Facts


class WindowLine(
    msgspec.Struct, frozen=True, kw_only=True, tag="window", tag_field="record", forbid_unknown_fields=True
):
    """A window and what was said of it; a trace to try may leave `advice` out."""

    seen: Observation
    advice: Advice | None = None


class AppliedLine(
    msgspec.Struct, frozen=True, kw_only=True, tag="applied", tag_field="record", forbid_unknown_fields=True
):
    """A change was made, or not."""

    time: float
    before: str
    after: str
    outcome: str
    seconds: float = 0.0


Line = FactsLine | WindowLine | AppliedLine
_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(Line)


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """One window of a trace: its advice now, and the one in the trace (None: it has none)."""

    line: int
    seen: Observation
    advice: Advice
    recorded: Advice | None

    @property
    def is_same(self) -> bool:
        """True unless the trace has another advice."""
        return self.recorded is None or self.recorded == self.advice


def encode(line: Line) -> bytes:
    """Return a line of the log, with its end."""
    return _ENCODER.encode(line) + b"\n"


def read_trace(path: Path) -> Iterator[tuple[int, Line]]:
    """Yield (number from 1, line) of a log; a line that was cut short is left out with a warning, but the first.

    Raises:
        AdviceError: names the file and the line.
    """
    try:
        with path.open("rb") as file:
            for number in range(1, MOST_LINES + 1):
                content = file.readline(MOST_LINE_BYTES + 1)
                if not content:
                    return
                if len(content) > MOST_LINE_BYTES:
                    raise AdviceError(f"{path} line {number} is longer than {MOST_LINE_BYTES >> 20} MiB; is it a log?")
                if content.strip() and (line := _decoded(path, number, content)) is not None:
                    yield number, line
    except OSError as error:
        raise AdviceError(f"{path} cannot be read: {error.strerror}; name a log of --advice-log") from None


def _decoded(path: Path, number: int, content: bytes) -> Line | None:
    try:
        line = _DECODER.decode(content)
    except (ValueError, RecursionError) as error:  # msgspec's own among them
        why = " ".join(str(error).split())
        # No JSON at all: a disk was full, or a server was killed while it wrote. JSON of another kind is no log.
        is_json = not isinstance(error, msgspec.DecodeError) or isinstance(error, msgspec.ValidationError)
        if number > 1 and not is_json:
            log.warning("%s line %d was not written to its end and is left out: %s", path, number, why)
            return None
        raise AdviceError(f"{path} line {number} is no line of an advice log: {why}") from None
    if isinstance(line, FactsLine) and line.version != VERSION:
        raise AdviceError(f"{path} line {number} has version={line.version}; this version reads {VERSION}")
    return line


def replay(path: Path, lines: Iterable[tuple[int, Line]]) -> Iterator[Replayed]:
    """Yield what the advisor says to each window of a trace.

    Raises:
        AdviceError: a window before any facts, or records that do not belong together.
    """
    advisor: Advisor | None = None
    for number, line in lines:
        if isinstance(line, FactsLine):
            advisor = Advisor(line.facts)
        elif isinstance(line, WindowLine):
            if advisor is None:
                raise AdviceError(f"{path} line {number} is a window before any facts; a log begins with facts")
            try:
                advice = advisor.observe(line.seen)
            except (ArithmeticError, AssertionError, ValueError) as error:
                raise AdviceError(f"{path} line {number} cannot be judged: {error}") from None
            yield Replayed(line=number, seen=line.seen, advice=advice, recorded=line.advice)
