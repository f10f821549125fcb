"""Log-probabilities in the shapes of answers: of completions, of chats, and of prompts as vLLM shows them.

Not their computation (runtime/ranks). Units: natural logarithms, -9999.0 for minus infinity, which JSON cannot say;
characters for offsets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ...runtime.messages import LogprobEntry
from ...text import Detokenizer, Tokenizer

LEAST_LOGPROB = -9999.0
Positions = Sequence[tuple[LogprobEntry, ...]]


def finite(logprob: float) -> float:
    """Return `logprob`, or the least number that OpenAI shows where it is minus infinity or not a number."""
    return logprob if math.isfinite(logprob) else LEAST_LOGPROB


class Shown:
    """How tokens are named.

    Args:
        tokenizer: for texts and bytes; None names tokens by their ids.
        top: alternatives a token, None when no log-probabilities were asked.
        as_ids: name all tokens by their ids.
        skip_special_tokens: special tokens have no place in the text.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, top: int | None, *, as_ids: bool = False, skip_special_tokens: bool = True
    ) -> None:
        self.top = top
        self._tokenizer = tokenizer
        self._as_ids = as_ids
        self._skip_special_tokens = skip_special_tokens

    def name(self, token_id: int) -> str:
        """Return the name of a token."""
        if self._as_ids or self._tokenizer is None:
            return f"token_id:{token_id}"
        return self._tokenizer.token_text(token_id)

    def offsets(self) -> Offsets:
        """Return a fresh count of characters."""
        return Offsets(self._tokenizer, self._skip_special_tokens)

    def completion(self, positions: Positions, offsets: Offsets, first: int | None = None) -> dict[str, Any] | None:
        """Return the four lists of /v1/completions.

        Args:
            positions: of the tokens; one without entries is the first of a prompt.
            offsets: of the text so far.
            first: id of the first token of a prompt, of which nothing but its text is known.
        """
        if self.top is None:
            return None
        ids = [entries[0].token_id if entries else (first or 0) for entries in positions]
        alternatives = [self._by_token(entries) if entries else None for entries in positions]
        return {
            "tokens": [self.name(token_id) for token_id in ids],
            "token_logprobs": [finite(entries[0].logprob) if entries else None for entries in positions],
            "top_logprobs": alternatives if self.top else None,
            "text_offset": [offsets.next(token_id) for token_id in ids],
        }

    def chat(self, positions: Positions) -> dict[str, Any] | None:
        """Return the entries of /v1/chat/completions."""
        if self.top is None:
            return None
        content = [
            {**self._entry(entries[0]), "top_logprobs": [self._entry(entry) for entry in self._likeliest(entries)]}
            for entries in positions
        ]
        return {"content": content, "refusal": None}

    def _by_token(self, entries: tuple[LogprobEntry, ...]) -> dict[str, float]:
        """The most likely tokens and the chosen one; of ids with the same text the likelier counts."""
        shown: dict[str, float] = {}
        for entry in [*self._likeliest(entries), entries[0]]:
            shown.setdefault(self.name(entry.token_id), finite(entry.logprob))
        return shown

    def _likeliest(self, entries: tuple[LogprobEntry, ...]) -> list[LogprobEntry]:
        ordered = sorted(entries, key=lambda entry: (-entry.logprob, entry.rank))
        return ordered[: self.top or 0]

    def _entry(self, entry: LogprobEntry) -> dict[str, Any]:
        token = self.name(entry.token_id)
        data = self._tokenizer.token_bytes(entry.token_id) if self._tokenizer is not None else token.encode()
        return {"token": token, "logprob": finite(entry.logprob), "bytes": list(data)}


class Offsets:
    """Where in a text its tokens begin; a part of a character begins where the character does.

    Args:
        tokenizer: None counts the names of tokens.
        skip_special_tokens: they take no place.
    """

    def __init__(self, tokenizer: Tokenizer | None, skip_special_tokens: bool) -> None:
        self._detokenizer = (
            None
            if tokenizer is None
            else Detokenizer(tokenizer, continuation=True, skip_special_tokens=skip_special_tokens)
        )
        self._length = 0

    def next(self, token_id: int) -> int:
        """Return where the next token begins."""
        begin = self._length
        if self._detokenizer is not None:
            self._length += len(self._detokenizer.add([token_id]))
        else:
            self._length += len(f"token_id:{token_id}")
        return begin


def prompt_table(positions: Positions, shown: Shown) -> list[dict[str, Any] | None]:
    """Return `prompt_logprobs`: null for the first token, then token id -> logprob, rank and text."""
    return [
        {
            str(entry.token_id): {
                "logprob": finite(entry.logprob), "rank": entry.rank, "decoded_token": shown.name(entry.token_id),
            } for entry in entries
        } if entries else None
        for entries in positions
    ]  # fmt: skip
