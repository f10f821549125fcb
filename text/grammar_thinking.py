"""A grammar for the answer of a model that may think first: the thinking is free, what follows it is held.

Not a parser of thinking (`parsers/`). Shapes: as in `grammar.py`; a mask of None allows every token.
"""

from __future__ import annotations

from collections.abc import Callable

from .grammar import Matcher
from .grammar_calls import AnswerOrCalls, allowing


class ThinkingMatcher:
    """Follows one text: at its beginning either the first mark or the answer, after the last mark the answer.

    Args:
        answer: follows what is not thinking.
        end: text after which the answer begins.
        opened: the text begins within the thinking.
        start_id: the token that begins it; where no single token does, a text can only begin within it.
        token_bytes: of a token.
    """

    def __init__(
        self,
        answer: Matcher | AnswerOrCalls,
        end: str,
        *,
        opened: bool,
        start_id: int | None,
        token_bytes: Callable[[int], bytes],
    ) -> None:
        self._answer = answer
        self._end = end.encode()
        self._start_id = start_id
        self._token_bytes = token_bytes
        self._thinks = opened
        self._may_start = not opened and start_id is not None
        self._tail = b""

    @property
    def finished(self) -> bool:
        """True when the answer is complete and nothing may follow."""
        return not self._thinks and self._answer.finished

    def accept(self, token_id: int) -> None:
        """Go on by one token; see `Matcher.accept`."""
        if self._thinks:
            seen = self._tail + self._token_bytes(token_id)
            self._thinks = self._end not in seen
            self._tail = seen[-(len(self._end) - 1) :] if len(self._end) > 1 else b""
        elif self._may_start and token_id == self._start_id:
            self._thinks = True
        else:
            self._answer.accept(token_id)
        self._may_start = False

    def mask(self, *, may_end: bool = True) -> bytes | None:
        """Return which tokens may come next; see `Matcher.mask`."""
        if self._thinks:
            return None
        mask = self._answer.mask(may_end=may_end)
        if mask is None or not self._may_start or self._start_id is None:
            return mask
        return allowing(mask, self._start_id)
