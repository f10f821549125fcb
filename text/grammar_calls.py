"""A grammar for the answer of a model that may call tools instead: a call is free, an answer is held.

Not a parser of calls (`parsers/`) and not a grammar of them. Shapes: as in `grammar.py`; a mask of None allows every
token.
"""

from __future__ import annotations

import numpy as np

from .grammar import Matcher


class AnswerOrCalls:
    """Follows one text: its first token either begins calls, after which all is free, or the answer.

    Args:
        answer: follows what is no call.
        start_id: the token that begins calls.
    """

    def __init__(self, answer: Matcher, start_id: int) -> None:
        self._answer = answer
        self._start_id = start_id
        self._at_start = True
        self._calls = False

    @property
    def finished(self) -> bool:
        """True when the answer is complete and nothing may follow; calls end with an end token."""
        return not self._calls and self._answer.finished

    def accept(self, token_id: int) -> None:
        """Go on by one token; see `Matcher.accept`."""
        if self._at_start:
            self._calls = token_id == self._start_id
            self._at_start = False
        if not self._calls:
            self._answer.accept(token_id)

    def mask(self, *, may_end: bool = True) -> bytes | None:
        """Return which tokens may come next; see `Matcher.mask`."""
        if self._calls:
            return None
        mask = self._answer.mask(may_end=may_end)
        return allowing(mask, self._start_id) if self._at_start else mask


def allowing(mask: bytes, token_id: int) -> bytes:
    """Return a mask that allows one more token."""
    words = np.frombuffer(mask, "<u4").copy()
    words[token_id // 32] |= np.uint32(1 << token_id % 32)
    return words.tobytes()
