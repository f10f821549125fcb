"""The whole output of a model taken apart: reasoning first, then calls in what is left, tidied at the seams.

Not formats. Blanks and line breaks between reasoning, text and calls belong to the format, not to the answer: they are
left out where two kinds meet. A text alone comes out as it is.
Units: characters.
"""

from __future__ import annotations

from .cursor import Parser
from .events import CallArguments, Event, Reasoning, Text

_BLANKS = " \t\r\n"


class OutputParser:
    """One output; `feed` text as it comes, then `finish`.

    Args:
        reasoning: takes the thinking off, if the model marks it.
        tools: takes the calls out of the rest.
    """

    def __init__(self, *, reasoning: Parser | None = None, tools: Parser | None = None) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._kind: type | None = None  # of the part at hand
        self._held: list[str] = []  # blanks at its end, or before any part

    @property
    def thinking(self) -> bool:
        """True while the text so far ends within reasoning."""
        return any(parser is not None and parser.thinking for parser in (self._reasoning, self._tools))

    def feed(self, text: str) -> list[Event]:
        """Take the next piece of text."""
        events: list[Event] = self._reasoning.feed(text) if self._reasoning is not None else [Text(text)]
        return self._tidied(self._with_calls(events))

    def finish(self) -> list[Event]:
        """Take the end of the text."""
        events = self._with_calls(self._reasoning.finish() if self._reasoning is not None else [])
        events = self._tidied(events + (self._tools.finish() if self._tools is not None else []))
        held = "".join(self._held)
        return [*events, Text(held)] if held and self._kind in (None, Text) else events

    def _with_calls(self, events: list[Event]) -> list[Event]:
        if self._tools is None:
            return events
        found: list[Event] = []
        for event in events:
            found += self._tools.feed(event.text) if isinstance(event, Text) else [event]
        return found

    def _tidied(self, events: list[Event]) -> list[Event]:
        tidy: list[Event] = []
        for event in events:
            if isinstance(event, CallArguments):
                if event.text:
                    tidy.append(event)
            elif isinstance(event, (Text, Reasoning)):
                tidy += self._tidied_text(event)
            else:
                self._kind, self._held = type(event), []
                tidy.append(event)
        return tidy

    def _tidied_text(self, event: Text | Reasoning) -> list[Event]:
        kind, body = type(event), event.text.rstrip(_BLANKS)
        if kind is Reasoning and not body and self._kind is None:
            self._kind, self._held = object, []  # no part yet, but what comes does not open the output
        if body and kind is not self._kind:
            # A text that opens the output keeps the blanks before it, which were held under no kind.
            self._held = self._held if self._kind is None and kind is Text else []
            if self._kind is not None or kind is not Text:
                event = kind(event.text.lstrip(_BLANKS))
                body = event.text.rstrip(_BLANKS)
            self._kind = kind
        if not body:
            if self._kind in (None, kind):
                self._held.append(event.text)
            return []
        text = "".join(self._held) + body
        self._held = [event.text[len(body) :]]
        return [kind(text)]
