"""Bodies and stream chunks of /v1/completions, field for field what OpenAI clients read.

Not transport (server/http/streams.py). With `echo` the text of each choice begins with its prompt, and so do the
log-probabilities; in a stream nothing of a choice goes out before its prompt did.
Units: tokens, characters.
"""

from __future__ import annotations

from typing import Any

from ...runtime.messages import Delta
from .answer import Answer, Choice


class CompletionAnswer(Answer):
    """Answers of /v1/completions."""

    prefix = "cmpl"
    kind = chunk_kind = "text_completion"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._waits = bool(self.shape.echo) and self.shape.top is not None
        # By prompt, until its log-probabilities are here.
        self._waiting: dict[int, list[tuple[int, Delta]]] = {
            prompt: [] for prompt in range(len(self.shape.prompts)) if self._waits
        }

    def opening(self) -> list[dict[str, Any]]:
        """Return the chunks of the prompts, where there is nothing to wait for."""
        if not self.shape.echo or self._waits:
            return []
        return [self._echo(index) for index in range(len(self.choices))]

    def chunks(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        """Return one chunk with new text, its log-probabilities and perhaps the end."""
        prompt = index // self.shape.n
        if prompt not in self._waiting:
            return self._new(index, delta)
        first = self.choices[index - index % self.shape.n]
        if index % self.shape.n == 0:
            first.prompt_entries.extend(entries for entries in delta.prompt_logprobs if entries)
        self._waiting[prompt].append((index, delta))
        ended = index % self.shape.n == 0 and delta.finish_reason is not None
        if len(first.prompt_entries) < len(self.prompt_of(index)) - 1 and not ended:
            return []
        chunks = [self._echo(prompt * self.shape.n + choice) for choice in range(self.shape.n)]
        return chunks + [chunk for waiting in self._waiting.pop(prompt) for chunk in self._new(*waiting)]

    def text_events(self, index: int, delta: Delta) -> bytes:
        """Return `events` of a delta within an answer whose chunks differ in their text alone."""
        return self._with_text(index, delta.text) if delta.text else b""

    def text_chunk(self, index: int, text: str) -> dict[str, Any]:
        """Return a chunk that brings a choice text and nothing else."""
        return self._chunk([self._body(index, text, None, Delta(request_id=""))])

    def whole(self, index: int, choice: Choice) -> dict[str, Any]:
        """Return one finished choice."""
        echo, positions, first = "", choice.entries, None
        if self.shape.echo:
            echo = self.shape.echo[index // self.shape.n]
        if self._waits:
            positions, first = [*self.prompt_positions(index), *choice.entries], self.prompt_of(index)[0]
        body = {
            "index": index,
            "text": echo + "".join(choice.text),
            "logprobs": self.shown.completion(positions, choice.offsets, first),
            "finish_reason": choice.finish_reason,
        }
        if self.shape.prompt_top is not None:
            body["prompt_logprobs"] = self.prompt_logprobs(index)
        if self.shape.token_ids:
            body |= {"prompt_token_ids": list(self.prompt_of(index)), "token_ids": choice.token_ids}
        return body

    def _echo(self, index: int) -> dict[str, Any]:
        """The chunk of a choice that shows its prompt."""
        choice, logprobs = self.choices[index], None
        if self._waits:
            prompt = self.prompt_of(index)
            logprobs = self.shown.completion(self.prompt_positions(index), choice.offsets, prompt[0])
        return self._chunk([self._body(index, self.shape.echo[index // self.shape.n], logprobs, Delta(request_id=""))])

    def _new(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        if not (delta.text or delta.finish_reason or delta.logprobs or (self.shape.token_ids and delta.token_ids)):
            return []
        logprobs = self.shown.completion(delta.logprobs, self.choices[index].offsets)
        return [self._chunk([self._body(index, delta.text, logprobs, delta)])]

    def _body(self, index: int, text: str, logprobs: dict[str, Any] | None, delta: Delta) -> dict[str, Any]:
        body = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": delta.finish_reason}
        if self.shape.token_ids:
            body["token_ids"] = list(delta.token_ids)
            if not self.choices[index].opened:
                body["prompt_token_ids"] = list(self.prompt_of(index))
        self.choices[index].opened = True
        return body
