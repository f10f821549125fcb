"""What OpenAI clients may ask of /v1/completions and /v1/chat/completions, checked field by field.

Not a check against the model (server/intake/token_ids.py) and not an answer (server/answers/answer.py). A field that we
do not know, or know but cannot honour, is refused by name (server/protocol/field_table.py). What is said of each field
here is what the OpenAPI document and docs/api.md say.
Units: tokens, probabilities; JSON bytes in.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from ...runtime.params import (
    MAX_BAD_WORDS,
    MAX_CHOICES,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
    SamplingParams,
)
from ..errors import ApiError, invalid
from .chat_messages import ChatMessage
from .field_table import as_json, check_extra, check_inner
from .strict import Body, Integer, Strict, described
from .structured_fields import FIELDS as STRUCTURED_FIELDS
from .structured_fields import AskedStructure, asked_structure
from .tool_fields import ToolChoice, checked_choice, checked_tools

# Fields that are parameters of sampling under the same name; null leaves them to the model's defaults.
SAMPLING_FIELDS = (
    "n", "min_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "logit_bias", "stop_token_ids", "bad_words", "ignore_eos", "include_stop_str_in_output",
    "skip_special_tokens", "prompt_logprobs",
)  # fmt: skip
# Beyond these a body is not looked at: it would hold up others.
MOST_MESSAGES = 16_384
MOST_CHOICES = 65_536
MOST_TOOLS = 1024
REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")


class StreamOptions(Strict):
    """`stream_options`."""

    include_usage: bool | None = described("a last chunk with totals; earlier ones have `usage: null`")
    continuous_usage_stats: bool | None = described("with `include_usage`: every chunk tells the usage so far")
    include_obfuscation: bool | None = described("taken without effect: no padding is added")


class GenerationRequest(Body):
    """What both routes share."""

    model: str | None = described("one of the served names; missing or another is a 404")
    max_tokens: Integer | None = described(
        "most tokens to generate; prompt and output must fit the context. Without it completions get 16, chats the "
        "model's `max_new_tokens` or all there is", minimum=0,
    )  # fmt: skip
    min_tokens: Integer | None = described("so many tokens before an end token or a stop counts; default 0", minimum=0)
    temperature: float | None = described("0 is greedy; default the model's, else 1", minimum=0, maximum=100)
    top_p: float | None = described("keep the likeliest tokens that reach this; default the model's, else 1",
                                    exclusiveMinimum=0, maximum=1)  # fmt: skip
    top_k: Integer | None = described("keep so many; 0 or -1 all; default the model's, else 0", minimum=-1,
                                  maximum=2**31 - 1)  # fmt: skip
    min_p: float | None = described("keep tokens at least this likely compared with the likeliest; default 0",
                                    minimum=0, maximum=1)  # fmt: skip
    presence_penalty: float | None = described("off the logits of tokens in the output, once; default 0",
                                               minimum=-2, maximum=2)  # fmt: skip
    frequency_penalty: float | None = described("off the logits of tokens in the output, each time; default 0",
                                                minimum=-2, maximum=2)  # fmt: skip
    repetition_penalty: float | None = described(
        "divides positive and multiplies negative logits of tokens in prompt or output; default 1",
        minimum=0.01, maximum=100,
    )  # fmt: skip
    logit_bias: dict[str, float] | None = described(
        "token id (as text) -> number from -100 to 100 added to its logit",
        most=MAX_LOGIT_BIAS,
        maxProperties=MAX_LOGIT_BIAS,
    )
    seed: Integer | None = described(
        "fixes the random choices, whatever else runs; choice 0 of n has it, the others have seeds derived from it",
        minimum=-(2**63), maximum=2**64 - 1,
    )  # fmt: skip
    n: Integer | None = described("choices for each prompt; `--max-n` sets the limit; default 1", minimum=1,
                              maximum=MAX_CHOICES)  # fmt: skip
    stop: str | list[str] | None = described(
        "strings at whose first appearance the text ends, before them", minLength=1, maxItems=MAX_STOP_STRINGS,
        items={"minLength": 1},
    )  # fmt: skip
    stop_token_ids: list[Integer] | None = described(
        "tokens that end the text as end tokens do", most=MAX_STOP_TOKENS, maxItems=MAX_STOP_TOKENS
    )
    bad_words: list[str] | None = described(
        "words that are not generated", most=MAX_BAD_WORDS, maxItems=MAX_BAD_WORDS, items={"pattern": r"\S"}
    )
    ignore_eos: bool | None = described("go on past end tokens; default false")
    include_stop_str_in_output: bool | None = described("the text ends with what stopped it; default false")
    skip_special_tokens: bool | None = described("leave special tokens out of the text; default true")
    prompt_logprobs: Integer | None = described(
        "alternatives to report for each token of the prompt; not with `stream`", minimum=0, maximum=MAX_LOGPROBS
    )
    stream: bool | None = described("answer as server-sent events; default false")
    stream_options: StreamOptions | None = described("only with `stream`")
    priority: Integer | None = described("lower runs first; any but 0 only with `--schedule-policy priority`",
                                     minimum=-(2**31), maximum=2**31 - 1)  # fmt: skip
    add_special_tokens: bool | None = described(
        "let the tokenizer add its BOS; default true for completions and false for chats, whose template writes it"
    )
    return_token_ids: bool | None = described("tell `prompt_token_ids` and each choice's `token_ids`; default false")
    return_tokens_as_token_ids: bool | None = described(
        "log-probabilities name tokens `token_id:ID`, which is exact where texts are not; default false"
    )

    response_format: Any = described("the form of the text: `text`, `json_object`, or `json_schema` with a schema",
                                     types=["object", "null"])  # fmt: skip
    structured_outputs: dict[str, Any] | None = described(
        "as vLLM: one of `json`, `regex`, `choice`, `grammar`, `json_object`"
    )
    guided_json: Any = described("a JSON schema (as an object or text) that the text keeps to",
                                 types=["object", "string", "boolean", "null"])  # fmt: skip
    guided_regex: str | None = described("a regular expression that the whole text matches")
    guided_choice: list[str] | None = described(
        "the text is one of these", most=MOST_CHOICES, minItems=1, maxItems=MOST_CHOICES, items={"minLength": 1}
    )
    guided_grammar: str | None = described("a context-free grammar that the text keeps to")

    def check(self) -> None:
        """Refuse what cannot be honoured."""
        _ = self.structure  # raises
        chat = isinstance(self, ChatRequest)
        own, other = type(self).model_fields, (CompletionRequest if chat else ChatRequest).model_fields
        check_extra(self.model_extra or {}, own, chat=chat, other=set(other) - set(own))
        if self.priority is not None and not -(2**31) <= self.priority < 2**31:
            raise invalid(f"priority={self.priority} is not allowed; use an integer from -2^31 to 2^31-1", "priority")
        if self.stream_options is not None:
            check_inner(self.stream_options.model_extra or {}, StreamOptions.model_fields, "stream_options.")
            if not self.stream:
                raise invalid(
                    "stream_options is only allowed with stream=true; set it or leave it out", "stream_options"
                )
        if self.stream and self.prompt_logprobs is not None:
            raise invalid("prompt_logprobs is not possible with stream=true; leave one of them out", "prompt_logprobs")

    @property
    def include_usage(self) -> bool:
        """True when a stream ends with a chunk of totals."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """True when every chunk of a stream tells the usage so far."""
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def asked_tokens(self) -> tuple[str, int | None]:
        """Return the field that limits the output and its value."""
        return "max_tokens", self.max_tokens

    def asked_logprobs(self) -> int | None:
        """Return how many alternatives a token are asked for, None for no log-probabilities at all."""
        return None

    def asked_prompt_logprobs(self) -> int | None:
        """Return the same for the prompt."""
        return self.prompt_logprobs

    @cached_property
    def structure(self) -> AskedStructure | None:
        """Return what the text shall look like, None when it is free."""
        return asked_structure(**{name: getattr(self, name) for name in STRUCTURED_FIELDS})

    def sampling(self, max_tokens: int | None, defaults: Mapping[str, Any]) -> SamplingParams:
        """Return the sampling parameters: what was sent, else the model's `defaults`.

        The limit on tokens was resolved against the context.
        """
        structure = self.structure
        given: dict[str, Any] = {name: getattr(self, name) for name in SAMPLING_FIELDS} | {
            "structured": None if structure is None else structure.spec,
            "seed": _signed(self.seed),
            "logprobs": self.asked_logprobs(),
            "prompt_logprobs": self.asked_prompt_logprobs(),
        }
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        sent = {name: value for name, value in given.items() if value is not None}
        try:
            return SamplingParams(**{**defaults, **sent, "max_tokens": max_tokens, "stop": stop})
        except ValueError as error:
            raise self.worded(error) from None

    def worded(self, error: ValueError) -> ApiError:
        """Say what sampling refuses with the name and the value that the client sent."""
        name = re.match(r"\w*", str(error))[0]  # type: ignore[index]
        if name == "structured" and (asked := self.structure) is not None:
            return invalid(str(error).replace(f"{name}={asked.spec!r}", asked.field), asked.field)
        fix = str(error).partition(" is not allowed; ")[2]
        shown = name
        if name == "logprobs" and "top_logprobs" in type(self).model_fields:
            shown = "top_logprobs"
        if name == "seed":
            fix = "use an integer from -2^63 to 2^64-1"
        if not fix or not str(error).startswith(f"{name}=") or shown not in type(self).model_fields:
            return invalid(str(error), shown)
        return invalid(f"{shown}={as_json(getattr(self, shown))} is not allowed; {fix}", shown)


class CompletionRequest(GenerationRequest):
    """Body of /v1/completions. `prompt` is checked in server/intake/token_ids.py, where the vocabulary is known."""

    prompt: Any = described("text, token ids, or a list of either: `n` choices each", types=["string", "array"])
    logprobs: Integer | None = described("alternatives to report for each token; 0 gives the chosen ones alone",
                                     minimum=0, maximum=MAX_LOGPROBS)  # fmt: skip
    echo: bool | None = described("the text begins with the prompt, `logprobs` too; allows `max_tokens` 0")
    best_of: Integer | None = described("only the value of `n`: nothing is generated to be thrown away", minimum=1)

    def check(self) -> None:
        """Refuse what cannot be honoured."""
        super().check()
        if self.best_of is not None and self.best_of != (self.n or 1):
            fix = "leave it out, use n and choose among the answers"
            raise invalid(f"best_of={self.best_of} is not supported unless it is n; {fix}", "best_of")

    def asked_logprobs(self) -> int | None:
        """Return `logprobs`."""
        return self.logprobs

    def asked_prompt_logprobs(self) -> int | None:
        """Return `prompt_logprobs`, or what `echo` needs."""
        asked = self.prompt_logprobs
        if self.echo and self.logprobs is not None:
            return self.logprobs if asked is None else max(asked, self.logprobs)
        return asked


class OpenTurn(Strict):
    """How a conversation ends: with the opening of the assistant's turn, or within one."""

    messages: list[ChatMessage] = described("the turns", ..., most=MOST_MESSAGES, minItems=1, maxItems=MOST_MESSAGES)
    add_generation_prompt: bool | None = described("open the assistant's turn; default true")
    continue_final_message: bool | None = described(
        "leave the last message open and go on with it; default false; not with `add_generation_prompt` true"
    )
    chat_template_kwargs: dict[str, Any] | None = described("further variables of the template, plain JSON")
    tools: list[Any] | None = described("functions that the model may call", most=MOST_TOOLS, maxItems=MOST_TOOLS)

    def check_turns(self) -> None:
        """Refuse to leave a turn open and to open one after it."""
        if not self.messages:
            raise invalid("messages is empty; send at least one message", "messages")
        if not self.continue_final_message:
            return
        field = "continue_final_message"
        if self.add_generation_prompt:
            raise invalid(f"{field} and add_generation_prompt exclude each other; send one of them as true", field)
        if self.messages[-1].role != "assistant":
            raise invalid(f"{field} needs a last message of role assistant; add one or leave it out", field)


class ChatRequest(OpenTurn, GenerationRequest):
    """Body of /v1/chat/completions."""

    max_completion_tokens: Integer | None = described("the newer name of `max_tokens`; both only when equal", minimum=1)
    logprobs: bool | None = described("report log-probabilities of the tokens; default false")
    top_logprobs: Integer | None = described("alternatives to report for each token; needs `logprobs`",
                                         minimum=0, maximum=MAX_LOGPROBS)  # fmt: skip
    reasoning_effort: str | None = described(
        "for templates that read a variable of this name, which get it; a 400 with others",
        enum=[*REASONING_EFFORTS, None],
    )  # fmt: skip
    tool_choice: Any = described("`none`, `auto`, `required`, or a named function",
                                 types=["string", "object", "null"])  # fmt: skip
    parallel_tool_calls: bool | None = described("false leaves out calls after the first; default true")

    @cached_property
    def asked_tools(self) -> tuple[list[dict[str, Any]], ToolChoice]:
        """Return the tools and what `tool_choice` asks, checked."""
        tools = checked_tools(self.tools)
        return tools, checked_choice(self.tool_choice, tools)

    def check(self) -> None:
        """Refuse what cannot be honoured."""
        super().check()
        _ = self.asked_tools  # raises
        self.check_turns()
        if self.top_logprobs is not None and not self.logprobs:
            raise invalid("top_logprobs needs logprobs=true; set it or leave top_logprobs out", "top_logprobs")
        if self.reasoning_effort is not None and self.reasoning_effort not in REASONING_EFFORTS:
            shown, fix = as_json(self.reasoning_effort), f"use one of {', '.join(REASONING_EFFORTS)}"
            raise invalid(f"reasoning_effort={shown} is not allowed; {fix}", "reasoning_effort")
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


def _signed(seed: int | None) -> int | None:
    """A seed from 2^63 to 2^64-1 is the number of the same 64 bits below 0."""
    return seed - 2**64 if seed is not None and 2**63 <= seed < 2**64 else seed
