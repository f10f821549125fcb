"""What the answers of both routes have in common: identity, choices, usage; and the shape that a request asked for.

Not transport (server/http/streams.py) and not the fields of one route (server/answers/completion.py,
server/answers/chat.py). One id, created and model over all chunks of an answer. Choice i of prompt p has the index p *
n + i.
Units: tokens.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ...runtime.messages import Delta, LogprobEntry
from ...text import Tokenizer
from ..hub import Call
from .logprobs import Offsets, Positions, Shown, prompt_table

_ENCODE = msgspec.json.Encoder().encode
# Stands for the text in a chunk that is encoded once and then filled in; no JSON of a chunk contains it otherwise.
_MARK = "\ue000moewe\ue001"


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a client wants to see.

    Attributes:
        model: the name that the client used.
        tokenizer: for texts and bytes of tokens.
        prompts: token ids.
        echo: texts of the prompts, which answers begin with; empty without echo.
        n: choices for each prompt.
        top: alternatives a token, None when no log-probabilities were asked.
        prompt_top: the same for `prompt_logprobs`.
        include_usage, continuous_usage: chunks carry `usage`: the last one, or all.
        token_ids: tell ids of prompts and outputs.
        tokens_as_ids: name tokens by their ids.
        skip_special_tokens: they are not in the text.
    """

    model: str
    tokenizer: Tokenizer | None
    prompts: Sequence[Sequence[int]]
    echo: Sequence[str] = ()
    n: int = 1
    top: int | None = None
    prompt_top: int | None = None
    include_usage: bool = False
    continuous_usage: bool = False
    token_ids: bool = False
    tokens_as_ids: bool = False
    skip_special_tokens: bool = True


@dataclass
class Choice:
    """What one choice has produced so far.

    Attributes:
        offsets: of the tokens whose log-probabilities went out.
        text: characters up to now.
        entries: log-probabilities of the tokens, when asked.
        prompt_entries: of the prompt's tokens but the first; only the first choice of a prompt has them.
        token_ids: of the output.
        opened: a chunk of it went out.
    """

    offsets: Offsets
    text: list[str] = field(default_factory=list)
    entries: list[tuple[LogprobEntry, ...]] = field(default_factory=list)
    prompt_entries: list[tuple[LogprobEntry, ...]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    opened: bool = False


def event(content: Any) -> bytes:
    """Return one server-sent event."""
    return b"data: " + _ENCODE(content) + b"\n\n"


class Piece:
    """The event of a chunk that differs from others only in its text: encoded once, filled in for each token.

    Args:
        make: makes the chunk with a text.
    """

    def __init__(self, make: Callable[[str], dict[str, Any]]) -> None:
        self._before, self._after = event(make(_MARK)).split(_ENCODE(_MARK))

    def with_text(self, text: str) -> bytes:
        """Return the event with `text`."""
        return self._before + _ENCODE(text) + self._after


class Answer(ABC):
    """The shape of one answer; `CompletionAnswer` and `ChatAnswer` fill it in.

    Args:
        call: whose answer.
        shape: what to show.
    """

    prefix = ""
    kind = ""
    chunk_kind = ""

    def __init__(self, call: Call, shape: Shape) -> None:
        self.call = call
        self.shape = shape
        self.shown = Shown(
            shape.tokenizer, shape.top, as_ids=shape.tokens_as_ids, skip_special_tokens=shape.skip_special_tokens
        )
        self._head = {"id": f"{self.prefix}-{call.call_id}", "created": int(time.time()), "model": shape.model}
        self.choices = [Choice(self.shown.offsets()) for _ in call.num_tokens]
        self._pieces: dict[int, Piece] = {}
        # Chunks within an answer differ in their text alone, so that they need not be encoded each.
        self._only_text = shape.top is None and not shape.token_ids and not shape.continuous_usage

    def body(self) -> dict[str, Any]:
        """Return the whole answer, once all choices ended."""
        choices = [self.whole(index, choice) for index, choice in enumerate(self.choices)]
        return {**self._head, "object": self.kind, "choices": choices, "usage": self._usage()}

    def add(self, index: int, delta: Delta) -> None:
        """Keep what a delta brought for the whole answer."""
        choice = self.choices[index]
        choice.text.append(delta.text)
        choice.entries.extend(delta.logprobs)
        choice.prompt_entries.extend(entries for entries in delta.prompt_logprobs if entries)
        if self.shape.token_ids:
            choice.token_ids.extend(delta.token_ids)
        choice.finish_reason = delta.finish_reason

    def opening(self) -> list[dict[str, Any]]:
        """Return the chunks that come before any output."""
        return []

    @abstractmethod
    def chunks(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        """Return the chunks that tell what a delta brought; none when there is nothing to show yet."""

    def events(self, index: int, delta: Delta) -> bytes:
        """Return `chunks` as events."""
        if self._only_text and delta.finish_reason is None:
            return self.text_events(index, delta)
        return b"".join(map(event, self.chunks(index, delta)))

    @abstractmethod
    def text_events(self, index: int, delta: Delta) -> bytes:
        """Return `events` of a delta within an answer whose chunks differ in their text alone."""

    def closing(self) -> list[dict[str, Any]]:
        """Return the chunk of totals, when asked."""
        return [{**self._chunk([]), "usage": self._usage()}] if self.shape.include_usage else []

    @abstractmethod
    def text_chunk(self, index: int, text: str) -> dict[str, Any]:
        """Return a chunk that brings a choice text and nothing else."""

    @abstractmethod
    def whole(self, index: int, choice: Choice) -> dict[str, Any]:
        """Return one finished choice."""

    def _with_text(self, index: int, text: str) -> bytes:
        """Return the event of a choice's chunk with nothing but text."""
        piece = self._pieces.get(index)
        if piece is None:
            piece = self._pieces[index] = Piece(lambda mark: self.text_chunk(index, mark))
        return piece.with_text(text)

    def prompt_of(self, index: int) -> Sequence[int]:
        """Return the prompt of a choice."""
        return self.shape.prompts[index // self.shape.n]

    def prompt_positions(self, index: int) -> Positions:
        """Return the log-probabilities of a choice's prompt: nothing for the first token, then all that are known."""
        return [(), *self.choices[index - index % self.shape.n].prompt_entries]

    def prompt_logprobs(self, index: int) -> list[dict[str, Any] | None]:
        """Return the table of a choice's prompt, no longer than asked."""
        most = self.shape.prompt_top or 0
        kept = [
            tuple(entry for place, entry in enumerate(entries) if place == 0 or entry.rank <= most)
            for entries in self.prompt_positions(index)
        ]
        return prompt_table(kept, self.shown)

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._head, "object": self.chunk_kind, "choices": choices}
        if not self.shape.include_usage:
            return chunk
        return {**chunk, "usage": self._usage() if self.shape.continuous_usage else None}

    def _usage(self) -> dict[str, Any]:
        """A prompt counts once, however many choices it has."""
        prompt, completion = sum(map(len, self.shape.prompts)), sum(self.call.num_tokens)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
