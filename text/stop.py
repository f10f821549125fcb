"""Finds stop strings in text that arrives in pieces, and never lets out the beginning of one.

Not a detokenizer and not a reason to end a request: the caller decides what `stopped` means.
Units: characters. Cost is O(characters x stops) whatever the split, by one prefix automaton a stop string.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Passes text through up to the first stop string to be completed; of those that end together the longest counts.

    The outcome depends on the text alone, not on how it was split.

    Args:
        stops: non-empty strings; none at all lets everything through.
        include: the text ends behind the stop string, not before it.

    Attributes:
        found: the stop string that is complete, or None.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self.found: str | None = None
        self._include = include
        self._stops = tuple(stops)
        self._borders = tuple(_borders(stop) for stop in self._stops)
        self._matched = [0] * len(self._stops)  # characters of each stop that the text so far ends with
        self._held = ""
        self._stopped = False

    def add(self, text: str, *, counts: bool = True) -> tuple[str, bool]:
        """Take the next piece of text; with `counts` false, stop strings that end in it are text like any other.

        Returns:
            Text that may be shown now, and whether a stop string is complete. After that nothing comes out any more.
        """
        if self._stopped:
            return "", True
        if not self._stops:
            return text, False
        for position, character in enumerate(text):
            found = self._advance(character)
            if found and counts:
                self._stopped = True
                shown, self._held = self._held + text[: position + 1], ""
                self.found = shown[-found:]
                return shown if self._include else shown[:-found], True
        held_back = max(self._matched)
        whole = self._held + text
        cut = len(whole) - held_back
        self._held = whole[cut:]
        return whole[:cut], False

    def flush(self) -> str:
        """Return what was held back, at the end of a text without a stop string."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return held

    def _advance(self, character: str) -> int:
        """Feed one character to every automaton; return the length of the longest stop that is now complete, or 0."""
        found = 0
        for i, stop in enumerate(self._stops):
            matched = self._matched[i]
            while matched and stop[matched] != character:
                matched = self._borders[i][matched - 1]
            if stop[matched] == character:
                matched += 1
            if matched == len(stop):
                found = max(found, matched)
                matched = self._borders[i][matched - 1]
            self._matched[i] = matched
        return found


def _borders(stop: str) -> list[int]:
    """For each prefix of `stop`: the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(stop)
    length = 0
    for i in range(1, len(stop)):
        while length and stop[i] != stop[length]:
            length = borders[length - 1]
        if stop[i] == stop[length]:
            length += 1
        borders[i] = length
    return borders
