"""Turns generated token ids into text as they come, whole characters only.

Not a stop matcher. Special tokens are not shown. Bytes that are no UTF-8 become U+FFFD as soon as that is certain; a
character whose last bytes never come is not text and is left out.
Units: token ids in, characters out; O(1) amortised a token.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from typing import Protocol

# A character has at most 4 bytes, so more tokens than this that end in U+FFFD do not wait for a missing byte.
_MAX_PENDING_TOKENS = 8
REPLACEMENT = "\ufffd"


class TokenTexts(Protocol):
    """What is asked of a tokenizer (text/tokenizer.py) to turn ids back into text."""

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of special tokens."""
        ...

    @property
    def strips_first_space(self) -> bool:
        """True when a text's first blank belongs to the encoding, not to the text."""
        ...

    @property
    def has_pieces(self) -> bool:
        """True when each token stands for bytes of its own."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token."""
        ...

    @property
    def whole_texts(self) -> Mapping[int, str | None]:
        """For each token the text that it is where a character begins; None for one with part of a character."""
        ...

    def decode_window(self, ids: list[int]) -> str:
        """Return the text of a few tokens, where tokens have no bytes of their own."""
        ...


class Detokenizer:
    """Text of one growing token sequence.

    Args:
        tokenizer: whose ids these are.
        continuation: the tokens go on from other text, so a blank at their start is part of the text.
        skip_special_tokens: leave special tokens out.
    """

    def __init__(self, tokenizer: TokenTexts, *, continuation: bool = False, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._texts = tokenizer.whole_texts
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = tokenizer.strips_first_space and not continuation
        self._between = tokenizer.has_pieces and not self._strip  # no character is begun, and the next byte is text
        self._emitted: list[int] = []  # last tokens whose text went out: the context of the pending ones
        self._pending: list[int] = []

    def add(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens; return the characters that became complete."""
        if self._between and len(token_ids) == 1:  # nearly all: one token after another, whole characters each
            token_id = token_ids[0]
            text = "" if token_id in self._skipped else self._texts[token_id]
            if text is not None:
                return text
        shown = [token_id for token_id in token_ids if token_id not in self._skipped]
        if not self._tokenizer.has_pieces:
            return "".join(self._add_through_window(token_id) for token_id in shown)
        data = b"".join(self._tokenizer.token_bytes(token_id) for token_id in shown)
        if self._strip and data:
            self._strip = False
            data = data.removeprefix(b" ")
        text = self._bytes.decode(data)
        self._between = not self._strip and not self._bytes.getstate()[0]
        return text

    def flush(self) -> str:
        """Return what is left at the end. An incomplete character is dropped."""
        self._bytes.reset()
        self._between = self._tokenizer.has_pieces and not self._strip
        pending, self._pending = self._pending, []
        if not pending:
            return ""
        return self._decode_pending(pending).rstrip(REPLACEMENT)

    def _add_through_window(self, token_id: int) -> str:
        self._pending.append(token_id)
        text = self._decode_pending(self._pending)
        if text.endswith(REPLACEMENT) and len(self._pending) < _MAX_PENDING_TOKENS:
            return ""
        self._emitted, self._pending = self._pending, []
        return text

    def _decode_pending(self, pending: list[int]) -> str:
        before = self._tokenizer.decode_window(self._emitted)
        return self._tokenizer.decode_window(self._emitted + pending)[len(before) :]
