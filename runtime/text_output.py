"""Text of one request as its tokens come: detokenised, cut at the first stop string.

Not a scheduler: it says `stopped`, the engine acts on it. Runs in the engine; works without a tokenizer on ids alone.
Units: token ids in, characters out.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..text import Detokenizer, StopMatcher, Tokenizer
from .params import SamplingParams


class TextOutput:
    """What one request has to show.

    Args:
        tokenizer: None gives no text at all.
        params: for its stop strings, and whether special tokens are text.
    """

    def __init__(self, tokenizer: Tokenizer | None, params: SamplingParams) -> None:
        if tokenizer is None and params.stop:
            raise ValueError(f"stop={params.stop!r} needs text, but the server works without a tokenizer; leave it out")
        self._detokenizer = (
            None
            if tokenizer is None
            else Detokenizer(tokenizer, continuation=True, skip_special_tokens=params.skip_special_tokens)
        )
        self._stop = StopMatcher(params.stop)

    def add(self, token_ids: Sequence[int], finish_reason: str | None) -> tuple[str, bool]:
        """Take new tokens; with a `finish_reason` they are the last ones, and for `stop` the very last is an end token.

        Returns:
            New text that may be shown, and whether a stop string is complete (then nothing follows).
        """
        if self._detokenizer is None:
            return "", False
        if finish_reason == "stop":
            token_ids = token_ids[:-1]
        shown, stopped = self._stop.add(self._detokenizer.add(token_ids))
        if finish_reason is None or stopped:
            return shown, stopped
        last, stopped = self._stop.add(self._detokenizer.flush())
        return shown + last + ("" if stopped else self._stop.flush()), stopped
