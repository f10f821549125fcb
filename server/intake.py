"""From a checked request to token ids: tokenises off the event loop and holds lengths against the model's limits.

Not the check of single fields (server/protocol.py). One rule of length for both routes: a prompt and its `max_tokens`
must fit the context, else 400 with both numbers; without `max_tokens` a chat gets the model's `max_new_tokens` or all
there is, a completion 16, each no more than fits.
Units: tokens; token ids below the rows of the embedding.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ..runtime.params import SamplingParams
from ..runtime.prompts import check_token_ids
from ..text import TemplateError, Tokenizer, check_template_kwargs
from .chat_parts import Reading
from .errors import ApiError, invalid
from .protocol import ChatRequest, CompletionRequest, GenerationRequest
from .state import ServerState
from .structured import check_structure, with_thinking
from .tool_plan import tool_plan

MOST_PROMPTS = 2048
DEFAULT_COMPLETION_TOKENS = 16
# Tokenising and rendering are short; two threads keep one long prompt from holding up the others.
_THREADS = ThreadPoolExecutor(max_workers=2, thread_name_prefix="moewe-text")
_Result = TypeVar("_Result")


@dataclass(frozen=True, kw_only=True)
class Intake:
    """A request ready for an engine.

    Attributes:
        prompts: token ids of each prompt.
        params: for all of them.
        priority: lower runs first.
        reading: how outputs are taken apart; None leaves them text.
    """

    prompts: list[list[int]]
    params: SamplingParams
    priority: int
    reading: Reading | None = None


async def completion_intake(state: ServerState, request: CompletionRequest) -> Intake:
    """Return the prompts of a completion request as token ids, with their sampling parameters."""
    if request.prompt is None:
        raise invalid("prompt is missing; send text, token ids, or a list of either", "prompt")
    parts = _split(request.prompt)
    if len(parts) > MOST_PROMPTS:
        raise invalid(f"prompt holds {len(parts)} prompts; send at most {MOST_PROMPTS} at once", "prompt")
    checked: list[list[int] | str] = []
    for position, part in enumerate(parts):
        where = "prompt" if part is request.prompt else f"prompt.{position}"
        checked.append(part if isinstance(part, str) else _checked_ids(part, state.model_config.vocab_size, where))
    texts = [part for part in checked if isinstance(part, str)]
    special = request.add_special_tokens is not False
    encoded = iter(
        await _in_thread(lambda: [_encode(state, text, special, "prompt") for text in texts]) if texts else []
    )
    prompts = [next(encoded) if isinstance(part, str) else part for part in checked]
    for position, prompt in enumerate(prompts):
        if not prompt:
            raise invalid(f"prompt.{position} holds no token; send at least one character or token id", "prompt")
    intake = _intake(state, request, prompts, DEFAULT_COMPLETION_TOKENS)
    await check_structure(state, intake.params, _structure_field(request))
    return intake


async def chat_intake(state: ServerState, request: ChatRequest) -> Intake:
    """Return the conversation as token ids, with its sampling parameters."""
    template = state.template
    messages = [message.check(position) for position, message in enumerate(request.messages)]
    if state.tokenizer is None:
        raise invalid("the server runs without a tokenizer (--skip-tokenizer-init); use /v1/completions with token ids")
    if template is None:
        raise invalid(
            "this model has no chat template; start the server with --chat-template FILE, or use /v1/completions",
            code="no_chat_template",
        )
    try:
        options = check_template_kwargs(request.chat_template_kwargs or {})
    except ValueError as error:
        raise invalid(str(error), "chat_template_kwargs") from None

    plan = tool_plan(state.output_format, request)

    def encode() -> tuple[str, list[int]]:
        add_prompt = request.add_generation_prompt is not False
        try:
            text = template.render(messages, add_generation_prompt=add_prompt, tools=plan.tools or None, **options)
        except TemplateError as error:
            raise invalid(str(error), "messages", "chat_template_error") from None
        # The template has written every special token itself, the first one included.
        return text, _encode(state, text, bool(request.add_special_tokens), "messages")

    text, prompt = await _in_thread(encode)
    if not prompt:
        raise invalid("messages give an empty prompt; send some text", "messages")
    intake = _intake(state, request, [prompt], None)
    if intake.params.structured is not None and plan.tools:
        raise invalid(
            f"{_structure_field(request)} and tools exclude each other: an answer that keeps to a grammar is no call; "
            "leave one of them out, or send tool_choice none", "tools",
        )  # fmt: skip
    params = plan.sampling(with_thinking(intake.params, plan.formats, text))
    await check_structure(state, params, "tools" if plan.forced else _structure_field(request))
    return replace(intake, params=params, reading=plan.reading(text))


def _structure_field(request: GenerationRequest) -> str:
    asked = request.structure
    return "structured" if asked is None else asked.field


def _intake(state: ServerState, request: GenerationRequest, prompts: list[list[int]], default: int | None) -> Intake:
    field, asked = request.asked_tokens()
    limit = state.max_model_len
    longest = max(len(prompt) for prompt in prompts)
    if asked is not None and asked < 1:
        raise invalid(f"{field}={asked} is not allowed; use an integer of at least 1", field)
    if longest >= limit or (asked is not None and longest + asked > limit):
        source = "messages" if default is None else "prompt"
        raise _too_long(state, longest, (source, field), asked)
    max_tokens = asked
    if default is None:
        default = state.defaults.sampling.get("max_tokens")
    if asked is None and default is not None:
        max_tokens = min(default, limit - longest)
    policy = state.config.schedule.policy
    if request.priority and policy != "priority":
        raise invalid(
            f"priority={request.priority} has no effect with the policy {policy!r}; start the server with "
            "--schedule-policy priority, or leave it out", "priority",
        )  # fmt: skip
    if request.stop and state.tokenizer is None:
        raise invalid("stop needs text, but the server runs without a tokenizer; leave it out", "stop")
    return Intake(
        prompts=prompts, params=request.sampling(max_tokens, state.defaults.sampling), priority=request.priority or 0
    )


def _too_long(state: ServerState, prompt: int, fields: tuple[str, str], asked: int | None) -> ApiError:
    """Name what to change: the output where lowering it helps, else the prompt and how long it may be."""
    (source, field), limit = fields, state.max_model_len
    total = (
        f"{prompt} tokens" if asked is None else f"{prompt + asked} tokens ({prompt} in the prompt, {field}={asked})"
    )
    fix = (
        f"lower {field} to at most {limit - prompt}"
        if prompt < limit
        else f"shorten {source} to at most {limit - min(asked or 1, limit - 1)} tokens"
    )
    return invalid(
        f"{_context(state)}; this request has {total}; {fix}",
        field if prompt < limit else source, "context_length_exceeded",
    )  # fmt: skip


def _context(state: ServerState) -> str:
    """The limit and, where the KV pool sets it, why."""
    text = f"the context holds {state.max_model_len} tokens, prompt and output"
    for ready in state.ready:
        if ready.num_blocks * ready.block_size == state.max_model_len < state.model_config.max_position_embeddings:
            return f"{text} (a rank has {ready.num_blocks} KV blocks of {ready.block_size} tokens, none reserved)"
    return text


def _split(prompt: Any) -> list[Any]:
    """One prompt or several, each text or a list of ids."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list):
        raise invalid(f"prompt must be text, token ids, or a list of either, got {type(prompt).__name__}", "prompt")
    if not prompt:
        raise invalid("prompt is an empty list; send at least one token id or text", "prompt")
    return prompt if isinstance(prompt[0], (str, list)) else [prompt]


def _checked_ids(part: Any, vocab_size: int, where: str) -> list[int]:
    if not isinstance(part, list):
        raise invalid(f"{where} must be text or token ids, got {type(part).__name__}", "prompt")
    try:
        check_token_ids(part, vocab_size, name=where)
    except ValueError as error:
        raise invalid(str(error), "prompt") from None
    return part


def _encode(state: ServerState, text: str, add_special_tokens: bool, param: str) -> list[int]:
    tokenizer: Tokenizer | None = state.tokenizer
    if tokenizer is None:
        raise invalid("the server runs without a tokenizer (--skip-tokenizer-init); send token ids", param)
    if (fewest := tokenizer.fewest_tokens(text)) >= state.max_model_len:
        raise invalid(
            f"{_context(state)}; this prompt of {len(text)} characters has at least {fewest} tokens; shorten it",
            param, "context_length_exceeded",
        )  # fmt: skip
    try:
        ids = tokenizer.encode(text, add_special_tokens)
    except ValueError as error:
        raise invalid(str(error), param) from None
    if ids and max(ids) >= state.model_config.vocab_size:
        raise invalid(
            f"the tokenizer gives id {max(ids)}, but the model has {state.model_config.vocab_size} rows; "
            "this text holds a token that the model does not know", param,
        )  # fmt: skip
    return ids


async def _in_thread(function: Callable[[], _Result]) -> _Result:
    return await asyncio.get_running_loop().run_in_executor(_THREADS, function)
