"""What parsers of a model's output report: text, reasoning, and calls of tools in pieces.

Not a wire format (server/answers/chat_parts.py). Adjacent events of a kind mean the same as one with the texts joined,
so where the output was cut changes nothing.
Units: characters; calls are counted from 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True)
class Text:
    """Characters of the answer itself."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """Characters of the thinking before the answer."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """Call number `index` begins; its function is known."""

    index: int
    name: str


@dataclass(frozen=True)
class CallArguments:
    """The next characters of the arguments of call number `index`: JSON, once the call has ended well."""

    index: int
    text: str


@dataclass(frozen=True)
class CallEnd:
    """Call number `index` is over; its arguments are one JSON object only if it is `complete`."""

    index: int
    complete: bool


Event: TypeAlias = Text | Reasoning | CallStart | CallArguments | CallEnd


def merged(events: Iterable[Event]) -> list[Event]:
    """Join adjacent events of a kind and leave out empty ones.

    Example:
        >>> merged([Text("a"), Text(""), Text("b")])
        [Text(text='ab')]
    """
    runs: list[tuple[type, int, list[str]] | Event] = []
    for event in events:
        if isinstance(event, (CallStart, CallEnd)):
            runs.append(event)
            continue
        if not event.text:
            continue
        index = event.index if isinstance(event, CallArguments) else -1
        last = runs[-1] if runs else None
        if isinstance(last, tuple) and last[:2] == (type(event), index):
            last[2].append(event.text)
        else:
            runs.append((type(event), index, [event.text]))
    return [_joined(*run) if isinstance(run, tuple) else run for run in runs]


def _joined(kind: type, index: int, parts: list[str]) -> Event:
    text = "".join(parts)
    if kind is CallArguments:
        return CallArguments(index, text)
    return Text(text) if kind is Text else Reasoning(text)
