"""Thinking that a model puts before its answer between two marks: `<think>...</think>`, `[THINK]...[/THINK]`.

Not a parser of calls: what follows the thinking is text here. Marks count once, at the beginning.
Units: characters.
"""

from __future__ import annotations

from .cursor import Parser, Steps
from .events import Reasoning


class MarkedReasoning(Parser):
    """Reasoning between two marks at the beginning.

    Args:
        start, end: the marks.
        opened: the output begins within the thinking: the prompt wrote the first mark, or the model never does.
    """

    def __init__(self, start: str, end: str, *, opened: bool) -> None:
        super().__init__()
        self._marks = (start, end)
        self.thinking = opened

    def _run(self) -> Steps[None]:
        cursor, (start, end) = self._cursor, self._marks
        blanks: list[str] = []
        yield from cursor.blanks(blanks.append)
        if (yield from cursor.accept(start)):
            self.thinking = True
        elif self.thinking:
            self._think("".join(blanks))
        else:
            self._text("".join(blanks))
        if self.thinking and (yield from cursor.until((end,), self._think)):
            self.thinking = False
            self._think("")  # where there was no thought, a seam is there all the same
        yield from cursor.rest(self._text)

    def _think(self, text: str) -> None:
        self.put(Reasoning(text))
