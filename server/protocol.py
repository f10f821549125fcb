"""What OpenAI clients may ask of /v1/completions and /v1/chat/completions, checked field by field.

Not a check against the model (server/intake.py) and not an answer (server/answers.py). A field that we do not know, or
know but cannot honour, is refused by name; none is dropped silently but those in IGNORED, which change no output.
Units: tokens, probabilities; JSON bytes in.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..runtime.params import SamplingParams
from .errors import ApiError, invalid
from .tool_fields import ToolChoice, checked_calls, checked_choice, checked_tools

# They change no output: labels for the operator of another service, hints for caches and billing.
IGNORED = frozenset({
    "metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier",
    "service_tier", "store", "user",
})  # fmt: skip
# Known to OpenAI or to other servers, not offered yet. The values listed ask for nothing, so they are fine.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (None,),
    "best_of": (None, 1),
    "chat_template": (None,),
    "documents": (None, []),
    "echo": (None, False),
    "frequency_penalty": (None, 0),
    "function_call": (None, "none"),
    "functions": (None, []),
    "guided_json": (None,),
    "logit_bias": (None, {}),
    "min_p": (None, 0),
    "min_tokens": (None, 0),
    "modalities": (None, ["text"]),
    "n": (None, 1),
    "prediction": (None,),
    "presence_penalty": (None, 0),
    "prompt_logprobs": (None,),
    "reasoning_effort": (None,),
    "repetition_penalty": (None, 1),
    "response_format": (None, {"type": "text"}),
    "skip_special_tokens": (None, True),
    "stop_token_ids": (None, []),
    "suffix": (None, ""),
    "verbosity": (None,),
    "web_search_options": (None,),
}

# Fields of chats: on the other route they are as unknown as any.
CHAT_ONLY = frozenset({"function_call", "functions", "parallel_tool_calls", "tool_choice", "tools"})


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class StreamOptions(_Strict):
    """`stream_options`: `include_usage` asks for a last chunk with totals."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class GenerationRequest(_Strict):
    """What both routes share."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = Field(default=None, ge=-(2**31), lt=2**31)
    add_special_tokens: bool | None = None

    def check(self) -> None:
        """Refuse what cannot be honoured."""
        _check_extra(type(self), self.model_extra or {})
        if self.stream_options is not None:
            _check_extra(StreamOptions, self.stream_options.model_extra or {}, "stream_options.")
            if not self.stream:
                raise invalid(
                    "stream_options is only allowed with stream=true; set it or leave it out", "stream_options"
                )

    @property
    def include_usage(self) -> bool:
        """True when a stream ends with a chunk of totals."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def asked_tokens(self) -> tuple[str, int | None]:
        """Return the field that limits the output and its value."""
        return "max_tokens", self.max_tokens

    def asked_logprobs(self) -> int | None:
        """Return how many alternatives a token are asked for, None for no log-probabilities at all."""
        return None

    def sampling(self, max_tokens: int | None, defaults: Mapping[str, Any]) -> SamplingParams:
        """Return the sampling parameters: what was sent, else the model's `defaults`.

        The limit on tokens was resolved against the context.
        """
        given: dict[str, Any] = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "seed": _signed(self.seed),
            "ignore_eos": self.ignore_eos,
            "logprobs": self.asked_logprobs(),
        }
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        sent = {name: value for name, value in given.items() if value is not None}
        try:
            return SamplingParams(**{**defaults, **sent, "max_tokens": max_tokens, "stop": stop})
        except ValueError as error:
            raise self._worded(error) from None

    def _worded(self, error: ValueError) -> ApiError:
        """Say what SamplingParams refuses with the name and the value that the client sent."""
        name, _, rest = str(error).partition("=")
        fix = rest.partition(" is not allowed; ")[2]
        shown = name
        if name == "logprobs" and "top_logprobs" in type(self).model_fields:
            shown = "top_logprobs"
        if name == "seed":
            fix = "use an integer from -2^63 to 2^64-1"
        if not fix or shown not in type(self).model_fields:
            return invalid(str(error), shown)
        return invalid(f"{shown}={as_json(getattr(self, shown))} is not allowed; {fix}", shown)


class CompletionRequest(GenerationRequest):
    """Body of /v1/completions. `prompt` is checked in server/intake.py, where the vocabulary is known."""

    prompt: Any = None
    logprobs: int | None = None

    def asked_logprobs(self) -> int | None:
        """Return `logprobs`."""
        return self.logprobs


class ChatMessage(_Strict):
    """One turn; `content` is text or a list of text parts."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Any = None
    name: str | None = None
    tool_calls: list[Any] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    def check(self, position: int) -> dict[str, Any]:
        """Return the message as a template reads it; raise ApiError for what is not text."""
        where = f"messages.{position}."
        extra = {k: v for k, v in (self.model_extra or {}).items() if v not in (None, [])}
        _check_extra(type(self), extra, where)
        content = self.content
        if content is None and self.role == "assistant":
            content = ""  # so clients send back a turn that held no text
        if isinstance(content, list):
            content = [_text_part(part, f"{where}content.{i}") for i, part in enumerate(content)]
        elif not isinstance(content, str):
            got = "nothing" if content is None else type(content).__name__
            raise invalid(f"{where}content must be text or a list of text parts, got {got}", f"{where}content")
        message = {"role": self.role, "content": content, **self._of_tools(where)}
        return message if self.name is None else {**message, "name": self.name}

    def _of_tools(self, where: str) -> dict[str, Any]:
        """Return calls, their results and reasoning of earlier turns as templates read them."""
        found: dict[str, Any] = {}
        if self.role != "tool" and self.tool_call_id is not None:
            raise invalid(f"{where}tool_call_id is only for role tool; leave it out", f"{where}tool_call_id")
        if self.role == "tool":
            if not self.tool_call_id:
                raise invalid(f"{where}tool_call_id is missing; send the id of the call", f"{where}tool_call_id")
            found["tool_call_id"] = self.tool_call_id
        if self.tool_calls and self.role != "assistant":
            raise invalid(f"{where}tool_calls is only for role assistant; leave it out", f"{where}tool_calls")
        if self.tool_calls:
            found["tool_calls"] = checked_calls(self.tool_calls, f"{where}tool_calls")
        reasoning = self.reasoning_content or self.reasoning
        if reasoning and self.role == "assistant":
            found |= {"reasoning_content": reasoning, "reasoning": reasoning}
            if not (self.tool_calls and self.content):  # its name with gpt-oss, which refuses both at once
                found["thinking"] = reasoning
        return found


class ChatRequest(GenerationRequest):
    """Body of /v1/chat/completions."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None

    def asked_tools(self) -> tuple[list[dict[str, Any]], ToolChoice]:
        """Return the tools and what `tool_choice` asks, checked."""
        tools = checked_tools(self.tools)
        return tools, checked_choice(self.tool_choice, tools)

    def check(self) -> None:
        """Refuse what cannot be honoured."""
        super().check()
        self.asked_tools()
        if not self.messages:
            raise invalid("messages is empty; send at least one message", "messages")
        if self.top_logprobs is not None and not self.logprobs:
            raise invalid("top_logprobs needs logprobs=true; set it or leave top_logprobs out", "top_logprobs")
        both = self.max_tokens is not None and self.max_completion_tokens is not None
        if both and self.max_tokens != self.max_completion_tokens:
            raise invalid(
                f"max_tokens={self.max_tokens} and max_completion_tokens={self.max_completion_tokens} differ; "
                "give one of them", "max_completion_tokens",
            )  # fmt: skip

    def asked_tokens(self) -> tuple[str, int | None]:
        """Return the newer field when it is given."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return super().asked_tokens()

    def asked_logprobs(self) -> int | None:
        """Return `top_logprobs` when `logprobs` is true."""
        return (self.top_logprobs or 0) if self.logprobs else None


def as_json(value: Any) -> str:
    """Return `value` as the client spelled it, shortened."""
    return shorten(json.dumps(value, ensure_ascii=False, default=str))


def shorten(text: str) -> str:
    """Return at most 80 characters of `text`."""
    return text if len(text) <= 80 else text[:77] + "..."


def _signed(seed: int | None) -> int | None:
    """A seed from 2^63 to 2^64-1 is the number of the same 64 bits below 0."""
    return seed - 2**64 if seed is not None and 2**63 <= seed < 2**64 else seed


Body = TypeVar("Body", bound=GenerationRequest)


def parse(body: type[Body], data: bytes) -> Body:
    """Return the checked request, or raise ApiError that names the field."""
    try:
        request = body.model_validate_json(data)
    except ValidationError as error:
        raise _readable(error) from None
    request.check()
    return request


def _readable(error: ValidationError) -> ApiError:
    """The first mistake in one line."""
    first = error.errors(include_url=False)[0]
    message = str(first["msg"])
    if first["type"] == "json_invalid":
        hint = "; it may hold a lone surrogate, which is no Unicode text" if "hex escape" in message else ""
        return invalid(f"request body: {message}{hint}")
    if not first["loc"]:
        return invalid("request body must be a JSON object")
    path = ".".join(str(part) for part in first["loc"] if part not in ("str", "list[str]"))
    got = "" if first["type"] == "missing" else f", got {as_json(first['input'])}"
    return invalid(f"{path}: {message}{got}", path)


def _check_extra(model: type[BaseModel], extra: dict[str, Any], where: str = "") -> None:
    for name, value in extra.items():
        if name in IGNORED:
            continue
        foreign = name in CHAT_ONLY and not issubclass(model, ChatRequest)
        if name not in UNSUPPORTED or where or foreign:
            if foreign and not where:
                raise invalid(f"{name} is not a field of completions; leave it out or use /v1/chat/completions", name)
            close = difflib.get_close_matches(name, [*model.model_fields, *([] if where else UNSUPPORTED)], n=1)
            hint = f"did you mean {close[0]!r}?" if close else "leave it out"
            raise invalid(f"{where}{name} is not a field that this server knows; {hint}", f"{where}{name}"[:200])
        if not any(type(value) in (type(fine), float) and value == fine for fine in UNSUPPORTED[name]):
            fine = UNSUPPORTED[name][-1]
            fix = f"leave it out or send {as_json(fine)}" if fine else "leave it out"
            raise invalid(f"{name}={as_json(value)} is not supported in this version; {fix}", name)


def _text_part(part: Any, where: str) -> dict[str, str]:
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        raise invalid(f"{where} is {kind!r}; this server reads only parts of the form type 'text' with a 'text'", where)
    return {"type": "text", "text": part["text"]}
