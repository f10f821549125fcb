"""Bodies and stream chunks of both routes, built from deltas. Field for field what OpenAI clients read.

Not transport (server/streams.py). One id, created and model over all chunks of an answer.
Units: tokens; natural logarithms, -9999.0 for minus infinity, which JSON cannot say.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from ..runtime.messages import Delta, LogprobEntry
from ..text import Tokenizer
from .chat_parts import ChatParts, Reading
from .hub import Call

_LEAST_LOGPROB = -9999.0


@dataclass
class Choice:
    """What one prompt has produced so far.

    Attributes:
        text: characters up to now.
        entries: log-probabilities of the tokens, when asked.
        text_offset: characters of the tokens whose log-probabilities went out.
    """

    text: list[str] = field(default_factory=list)
    entries: list[tuple[LogprobEntry, ...]] = field(default_factory=list)
    finish_reason: str | None = None
    text_offset: int = 0


class Answer(ABC):
    """The shape of one answer; `CompletionAnswer` and `ChatAnswer` fill it in.

    Args:
        call: whose answer.
        model: the name that the client used.
        tokenizer: for texts and bytes of tokens.
        top: alternatives a token, None when no log-probabilities were asked.
        include_usage: chunks carry `usage`.
    """

    prefix = ""
    kind = ""
    chunk_kind = ""

    def __init__(
        self, call: Call, model: str, tokenizer: Tokenizer | None, top: int | None, include_usage: bool = False
    ) -> None:
        self.call = call
        self.top = top
        self._tokenizer = tokenizer
        self._include_usage = include_usage
        self._head = {"id": f"{self.prefix}-{call.call_id}", "created": int(time.time()), "model": model}
        self.choices = [Choice() for _ in call.num_tokens]

    def body(self) -> dict[str, Any]:
        """Return the whole answer, once all prompts ended."""
        choices = [self.whole(index, choice) for index, choice in enumerate(self.choices)]
        return {**self._head, "object": self.kind, "choices": choices, "usage": self._usage()}

    def add(self, index: int, delta: Delta) -> None:
        """Keep what a delta brought for the whole answer."""
        choice = self.choices[index]
        choice.text.append(delta.text)
        choice.entries.extend(delta.logprobs)
        choice.finish_reason = delta.finish_reason

    def opening(self) -> list[dict[str, Any]]:
        """Return the chunks that come before any text."""
        return []

    @abstractmethod
    def chunks(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        """Return the chunks that tell what a delta brought; none when there is nothing to show yet."""

    def closing(self) -> list[dict[str, Any]]:
        """Return the chunk of totals, when asked."""
        return [{**self._chunk([]), "usage": self._usage()}] if self._include_usage else []

    @abstractmethod
    def whole(self, index: int, choice: Choice) -> dict[str, Any]:
        """Return one finished choice."""

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._head, "object": self.chunk_kind, "choices": choices}
        return {**chunk, "usage": None} if self._include_usage else chunk

    def _usage(self) -> dict[str, Any]:
        prompt, completion = self.call.num_prompt_tokens, sum(self.call.num_tokens)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def _token(self, entry: LogprobEntry) -> str:
        if self._tokenizer is not None:
            return self._tokenizer.token_text(entry.token_id)
        return f"token_id:{entry.token_id}" if entry.decoded_token is None else entry.decoded_token

    def _most_likely(self, entries: tuple[LogprobEntry, ...]) -> list[LogprobEntry]:
        ordered = sorted(entries, key=lambda entry: (-entry.logprob, entry.rank))
        return ordered[: self.top or 0]


class CompletionAnswer(Answer):
    """Answers of /v1/completions."""

    prefix = "cmpl"
    kind = chunk_kind = "text_completion"

    def chunks(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        """Return one chunk with new text, its log-probabilities and perhaps the end."""
        if not (delta.text or delta.finish_reason or delta.logprobs):
            return []
        choice = self.choices[index]
        choice_body = {
            "index": index,
            "text": delta.text,
            "logprobs": self._logprobs(choice, list(delta.logprobs)),
            "finish_reason": delta.finish_reason,
        }
        return [self._chunk([choice_body])]

    def whole(self, index: int, choice: Choice) -> dict[str, Any]:
        """Return one finished choice."""
        return {
            "index": index,
            "text": "".join(choice.text),
            "logprobs": self._logprobs(choice, choice.entries),
            "finish_reason": choice.finish_reason,
        }

    def _logprobs(self, choice: Choice, positions: list[tuple[LogprobEntry, ...]]) -> dict[str, Any] | None:
        if self.top is None:
            return None
        tokens = [self._token(entries[0]) for entries in positions]
        offsets = []
        for token in tokens:
            offsets.append(choice.text_offset)
            choice.text_offset += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [finite(entries[0].logprob) for entries in positions],
            "top_logprobs": [self._top(entries) for entries in positions] if self.top else None,
            "text_offset": offsets,
        }

    def _top(self, entries: tuple[LogprobEntry, ...]) -> dict[str, float]:
        """The most likely tokens and the chosen one; of ids with the same text the likelier counts."""
        shown: dict[str, float] = {}
        for entry in [*self._most_likely(entries), entries[0]]:
            shown.setdefault(self._token(entry), finite(entry.logprob))
        return shown


class ChatAnswer(Answer):
    """Answers of /v1/chat/completions."""

    prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, *args: Any, reading: Reading | None = None) -> None:
        super().__init__(*args)
        self._reading = reading
        self._parts = [ChatParts(reading) for _ in self.choices]

    def add(self, index: int, delta: Delta) -> None:
        """Keep what a delta brought for the whole answer."""
        super().add(index, delta)
        self._parts[index].take(delta)

    def opening(self) -> list[dict[str, Any]]:
        """Return the chunk that names the role."""
        return [self._choice_chunk(0, {"role": "assistant", "content": ""}, None)]

    def chunks(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        """Return a chunk for each new part, and an empty one with the reason at the end."""
        parts = self._parts[index]
        deltas = parts.take(delta)
        logprobs = self._logprobs(list(delta.logprobs))
        if delta.logprobs and not deltas:
            deltas = [{"content": ""}]  # the tokens are part of a mark, or of what waits
        chunks = [self._choice_chunk(index, part, None, None if i else logprobs) for i, part in enumerate(deltas)]
        if delta.finish_reason is not None:
            chunks.append(self._choice_chunk(index, {}, parts.finish_reason(delta.finish_reason)))
        return chunks

    def whole(self, index: int, choice: Choice) -> dict[str, Any]:
        """Return one finished choice."""
        return {
            "index": index,
            "message": self._parts[index].message(),
            "logprobs": self._logprobs(choice.entries),
            "finish_reason": self._parts[index].finish_reason(choice.finish_reason),
        }

    def _usage(self) -> dict[str, Any]:
        if self._reading is None:
            return super()._usage()
        details = {"reasoning_tokens": sum(parts.reasoning_tokens for parts in self._parts)}
        return {**super()._usage(), "completion_tokens_details": details}

    def _choice_chunk(
        self, index: int, delta: dict[str, Any], reason: str | None, logprobs: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        return self._chunk([{"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}])

    def _logprobs(self, positions: list[tuple[LogprobEntry, ...]]) -> dict[str, Any] | None:
        if self.top is None:
            return None
        content = [
            {**self._entry(entries[0]), "top_logprobs": [self._entry(entry) for entry in self._most_likely(entries)]}
            for entries in positions
        ]
        return {"content": content, "refusal": None}

    def _entry(self, entry: LogprobEntry) -> dict[str, Any]:
        token = self._token(entry)
        data = self._tokenizer.token_bytes(entry.token_id) if self._tokenizer is not None else token.encode()
        return {"token": token, "logprob": finite(entry.logprob), "bytes": list(data)}


def finite(logprob: float) -> float:
    """Return `logprob`, or the least number that OpenAI shows where it is minus infinity or not a number."""
    return logprob if math.isfinite(logprob) else _LEAST_LOGPROB
