"""Bodies and stream chunks of /v1/chat/completions, field for field what OpenAI clients read.

Not transport (server/http/streams.py) and not the parts of a message (server/answers/chat_parts.py). Units: tokens.
"""

from __future__ import annotations

from typing import Any

from ...runtime.messages import Delta
from .answer import Answer, Choice, event
from .chat_parts import ChatParts, Reading


class ChatAnswer(Answer):
    """Answers of /v1/chat/completions. `reading` says how outputs are taken apart; None leaves them text."""

    prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, *args: Any, reading: Reading | None = None) -> None:
        super().__init__(*args)
        self._reading = reading
        self._parts = [ChatParts(reading) for _ in self.choices]

    def body(self) -> dict[str, Any]:
        """Return the whole answer, once all choices ended."""
        body = super().body()
        if self.shape.prompt_top is not None:
            body["prompt_logprobs"] = self.prompt_logprobs(0)
        return {**body, **self._prompt_ids()}

    def add(self, index: int, delta: Delta) -> None:
        """Keep what a delta brought for the whole answer."""
        super().add(index, delta)
        self._parts[index].take(delta)

    def opening(self) -> list[dict[str, Any]]:
        """Return a chunk for each choice that names the role."""
        opening = {"role": "assistant", "content": ""}
        chunks = [self._choice_chunk(index, opening, None) for index in range(len(self.choices))]
        chunks[0] |= self._prompt_ids()
        return chunks

    def chunks(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        """Return a chunk for each new part, and an empty one with the reason at the end."""
        parts = self._parts[index]
        deltas = parts.take(delta)
        logprobs = self.shown.chat(delta.logprobs)
        if not deltas and (delta.logprobs or (self.shape.token_ids and delta.token_ids)):
            deltas = [{"content": ""}]  # the tokens are part of a mark, or of what waits
        chunks = [self._choice_chunk(index, part, None, None if i else logprobs) for i, part in enumerate(deltas)]
        if self.shape.token_ids and chunks:
            chunks[0]["choices"][0]["token_ids"] = list(delta.token_ids)
        if delta.finish_reason is not None:
            chunks.append(self._choice_chunk(index, {}, parts.finish_reason(delta.finish_reason)))
        return chunks

    def text_events(self, index: int, delta: Delta) -> bytes:
        """Return `events` of a delta within an answer whose chunks differ in their text alone."""
        if self._reading is None:  # nothing is taken apart, and nobody asks a streamed answer for its message
            return self._with_text(index, delta.text) if delta.text else b""
        parts = self._parts[index].take(delta)
        return b"".join(
            self._with_text(index, part["content"])
            if "content" in part
            else event(self._choice_chunk(index, part, None))
            for part in parts
        )

    def text_chunk(self, index: int, text: str) -> dict[str, Any]:
        """Return a chunk that brings a choice text and nothing else."""
        return self._choice_chunk(index, {"content": text}, None)

    def whole(self, index: int, choice: Choice) -> dict[str, Any]:
        """Return one finished choice."""
        body = {
            "index": index,
            "message": self._parts[index].message(),
            "logprobs": self.shown.chat(choice.entries),
            "finish_reason": self._parts[index].finish_reason(choice.finish_reason),
        }
        return {**body, "token_ids": choice.token_ids} if self.shape.token_ids else body

    def _prompt_ids(self) -> dict[str, Any]:
        return {"prompt_token_ids": list(self.prompt_of(0))} if self.shape.token_ids else {}

    def _usage(self) -> dict[str, Any]:
        if self._reading is None:
            return super()._usage()
        details = {"reasoning_tokens": sum(parts.reasoning_tokens for parts in self._parts)}
        return {**super()._usage(), "completion_tokens_details": details}

    def _choice_chunk(
        self, index: int, delta: dict[str, Any], reason: str | None, logprobs: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        return self._chunk([{"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}])
