"""How a request is put to an OpenAI-compatible server, and what a chunk of its stream says.

Not the connection (server/bench/client.py). Reads what vLLM, SGLang, llama.cpp, OpenAI and moewe send.
Units: tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ...text.one_line import shorten
from .datasets import Sample

_TEXTS = ("content", "reasoning_content", "reasoning", "refusal")
MOST_REASON_CHARS = 200


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """What all requests of a run share.

    Attributes:
        chat: chat completions, else completions.
        model: name that requests ask for.
        ignore_eos: go on past the end token (an extension of OpenAI's API, sent only when set).
        temperature: None leaves it to the server.
        extra: further fields of the body; they win over all others.
    """

    chat: bool
    model: str
    ignore_eos: bool = False
    temperature: float | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def body(self, sample: Sample) -> dict[str, Any]:
        """Return the body of a request."""
        body: dict[str, Any] = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}}
        if self.chat:
            body |= {
                "messages": [{"role": "user", "content": sample.prompt}],
                "max_completion_tokens": sample.output_len,
            }
        else:
            body |= {"prompt": sample.prompt, "max_tokens": sample.output_len}
        if self.temperature is not None:
            body["temperature"] = self.temperature
        if self.ignore_eos:
            body["ignore_eos"] = True
        return body | dict(self.extra)


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """What one event of a stream says.

    Attributes:
        tokens: it brought tokens.
        done: it is the `[DONE]` of the end.
        finished: a choice gave its reason to end.
        usage: (prompt tokens, output tokens), when told.
        error: the server's own words for a failure.
    """

    tokens: bool = False
    done: bool = False
    finished: bool = False
    usage: tuple[int, int] | None = None
    error: str | None = None


def read_chunk(data: bytes) -> Chunk:
    """Return what an event says; one that cannot be read is an error, as a client would have it."""
    if data.strip() == b"[DONE]":
        return Chunk(done=True)
    try:
        body = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return Chunk(error="the stream holds an event that is not JSON")
    if not isinstance(body, dict):
        return Chunk(error="the stream holds an event that is not an object")
    if body.get("error") is not None or body.get("object") == "error":
        return Chunk(error=error_message(body))
    choices = [choice for choice in body.get("choices") or () if isinstance(choice, dict)]
    return Chunk(
        tokens=any(map(_has_tokens, choices)),
        finished=any(choice.get("finish_reason") is not None for choice in choices),
        usage=_usage(body.get("usage")),
    )


def error_message(body: Any) -> str:
    """Return the words of an error object, in one short line."""
    error = body.get("error") if isinstance(body, dict) and body.get("error") is not None else body
    message = error.get("message") or error.get("detail") if isinstance(error, dict) else error
    text = " ".join(str(message if message is not None else error).split())
    return shorten(text, MOST_REASON_CHARS)


def _has_tokens(choice: dict[str, Any]) -> bool:
    """True for text of any kind, and for log-probabilities: a server without a tokenizer has nothing else to show."""
    if choice.get("text") or choice.get("logprobs"):
        return True
    delta = choice.get("delta")
    return isinstance(delta, dict) and bool(delta.get("tool_calls") or any(delta.get(name) for name in _TEXTS))


def _usage(usage: Any) -> tuple[int, int] | None:
    if not isinstance(usage, dict):
        return None
    prompt, output = usage.get("prompt_tokens"), usage.get("completion_tokens")
    return (prompt or 0, output) if isinstance(output, int) and isinstance(prompt or 0, int) else None
