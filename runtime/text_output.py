"""Text of one request as its tokens come: detokenised, cut at the first stop string.

Not a scheduler: it says `stop`, the engine acts on it. Runs in the engine; works without a tokenizer on ids alone.
Units: token ids in, characters out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..text import Detokenizer, StopMatcher, Tokenizer
from .params import SamplingParams


class Shown(NamedTuple):
    """What came of new tokens.

    Attributes:
        text: what may be shown now.
        stop: the stop string that is complete, then nothing follows; or None.
        num_tokens: how many of the tokens count: those behind a stop string do not.
    """

    text: str
    stop: str | None
    num_tokens: int


class TextOutput:
    """What one request has to show.

    Args:
        tokenizer: None gives no text at all.
        params: for its stop strings, and what of the end and of special tokens is text.
    """

    def __init__(self, tokenizer: Tokenizer | None, params: SamplingParams) -> None:
        if tokenizer is None and params.stop:
            raise ValueError(f"stop={params.stop!r} needs text, but the server works without a tokenizer; leave it out")
        self._detokenizer = (
            None
            if tokenizer is None
            else Detokenizer(tokenizer, continuation=True, skip_special_tokens=params.skip_special_tokens)
        )
        self._shows_end = params.include_stop_str_in_output
        self._stop = StopMatcher(params.stop, include=self._shows_end)
        self._one_by_one = bool(params.stop)
        self._min_tokens = params.min_tokens
        self._num_tokens = 0

    def add(self, token_ids: Sequence[int], finish_reason: str | None) -> Shown:
        """Take new tokens; with a `finish_reason` they are the last ones, and for `stop` the very last is an end token.

        Whatever is complete first ends the text: a stop string before a token that comes behind it. One that ends
        within the first `min_tokens` tokens does not count.
        """
        if self._detokenizer is None:
            return Shown("", None, len(token_ids))
        if finish_reason is None and not self._one_by_one:
            return Shown(self._detokenizer.add(token_ids), None, len(token_ids))
        num_text = len(token_ids) - (finish_reason == "stop" and not self._shows_end)
        shown = ""
        pieces = [token_ids[i : i + 1] for i in range(num_text)] if self._one_by_one else [token_ids[:num_text]]
        for number, piece in enumerate(pieces, start=1):
            self._num_tokens += len(piece)
            text, stopped = self._stop.add(self._detokenizer.add(piece), counts=self._num_tokens > self._min_tokens)
            shown += text
            if stopped:
                return Shown(shown, self._stop.found, number)
        if finish_reason is not None:
            text, stopped = self._stop.add(self._detokenizer.flush(), counts=self._num_tokens > self._min_tokens)
            shown += text if stopped else text + self._stop.flush()
        return Shown(shown, self._stop.found, len(token_ids))
