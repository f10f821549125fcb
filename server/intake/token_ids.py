"""From a checked request to token ids: tokenises off the event loop and holds lengths against the model's limits.

Not the check of single fields (server/protocol/requests.py). One rule of length for both routes: a prompt and its
`max_tokens` must fit the context, else 400 with both numbers; without `max_tokens` a chat gets the model's
`max_new_tokens` or all there is, a completion 16, each no more than fits.
Units: tokens; token ids below the rows of the embedding.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ...runtime.checked_params import checked_params
from ...runtime.params import SamplingParams
from ...runtime.prompts import check_token_ids
from ...text import Tokenizer
from ..answers.chat_parts import Reading
from ..errors import ApiError, invalid
from ..protocol.field_table import as_json
from ..protocol.requests import ChatRequest, CompletionRequest, GenerationRequest
from ..protocol.strict import whole_numbers
from ..state import ServerState
from .chat_prompt import render, template_of, template_options
from .structured import check_structure, with_calls, with_thinking
from .tool_plan import ToolPlan, tool_plan

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
        echo: texts of the prompts, which answers begin with; empty without echo.
    """

    prompts: list[list[int]]
    params: SamplingParams
    priority: int
    reading: Reading | None = None
    echo: tuple[str, ...] = ()


async def completion_intake(state: ServerState, request: CompletionRequest) -> Intake:
    """Return the prompts of a completion request as token ids, with their sampling parameters."""
    if request.prompt is None:
        raise invalid("prompt is missing; send text, token ids, or a list of either", "prompt")
    parts = _split(request.prompt)
    if len(parts) > MOST_PROMPTS:
        raise invalid(f"prompt holds {len(parts)} prompts; send at most {MOST_PROMPTS} at once", "prompt")
    special = request.add_special_tokens is not False

    def prompt_of(position: int, part: Any) -> list[int]:
        where = "prompt" if part is request.prompt else f"prompt.{position}"
        if isinstance(part, str):
            ids = encode_text(state, part, special, "prompt")
        else:
            ids = _checked_ids(part, state, where)
        if not ids:
            raise invalid(f"prompt.{position} holds no token; send at least one character or token id", "prompt")
        return ids

    prompts = await in_thread(lambda: [prompt_of(position, part) for position, part in enumerate(parts)])
    intake = await _intake(state, request, prompts, DEFAULT_COMPLETION_TOKENS)
    await check_structure(state, intake.params, _structure_field(request))
    if not request.echo:
        return intake
    pairs = zip(parts, prompts, strict=True)
    texts = await in_thread(lambda: tuple(_shown_prompt(state, part, ids, intake.params) for part, ids in pairs))
    return replace(intake, echo=texts)


def _shown_prompt(state: ServerState, part: Any, ids: list[int], params: SamplingParams) -> str:
    """The text of a prompt as it was sent, or of its ids."""
    if isinstance(part, str):
        return part
    return "" if state.tokenizer is None else state.tokenizer.decode(ids, params.skip_special_tokens)


async def chat_intake(state: ServerState, request: ChatRequest) -> Intake:
    """Return the conversation as token ids, with its sampling parameters."""
    template = template_of(state)

    def encode() -> tuple[ToolPlan, str, list[int]]:
        messages = [turn.check(position) for position, turn in enumerate(request.messages)]
        options = template_options(template, request.chat_template_kwargs, request.reasoning_effort)
        plan = tool_plan(state, request)
        text = render(template, messages, request, options, plan.tools)
        # The template has written every special token itself, the first one included.
        return plan, text, encode_text(state, text, bool(request.add_special_tokens), "messages")

    plan, text, prompt = await in_thread(encode)
    if not prompt:
        raise invalid("messages give an empty prompt; send some text", "messages")
    intake = await _intake(state, request, [prompt], None)
    params, field = intake.params, _structure_field(request)
    if plan.forced:
        await check_structure(
            state, params, field
        )  # a call has no text to hold, but what is wrong is told all the same
    elif plan.tools:
        params = with_calls(params, plan.formats, state.tokenizer, field)
    params = plan.sampling(with_thinking(params, plan.formats, text))
    await check_structure(state, params, "tools" if plan.forced else field)
    return replace(intake, params=params, reading=plan.reading(text))


def _structure_field(request: GenerationRequest) -> str:
    asked = request.structure
    return "structured" if asked is None else asked.field


async def _intake(
    state: ServerState, request: GenerationRequest, prompts: list[list[int]], default: int | None
) -> Intake:
    field, asked = request.asked_tokens()
    limit = state.max_model_len
    longest = max(len(prompt) for prompt in prompts)
    least = 0 if getattr(request, "echo", False) else 1
    if asked is not None and asked < least:
        only = "" if field != "max_tokens" or default is None else " (0 only with echo)"
        raise invalid(f"{field}={asked} is not allowed; use an integer of at least {least}{only}", field)
    if longest > limit or (longest == limit and asked != 0) or (asked is not None and longest + asked > limit):
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
    if (request.n or 1) > state.options.max_n:
        raise invalid(f"n={request.n} is not allowed; use at most {state.options.max_n} (--max-n sets it)", "n")
    params = request.sampling(max_tokens, state.defaults.sampling)

    def check() -> SamplingParams:
        return checked_params(params, state.tokenizer, state.model_config.vocab_size)

    try:  # only the spelling of words takes time
        checked = await in_thread(check) if params.bad_words else check()
    except ValueError as error:
        raise request.worded(error) from None
    return Intake(prompts=prompts, params=checked, priority=request.priority or 0)


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


def _checked_ids(part: Any, state: ServerState, where: str) -> list[int]:
    if not isinstance(part, list):
        raise invalid(f"{where} must be text or token ids, got {type(part).__name__}", "prompt")
    if len(part) > state.max_model_len:
        return part  # refused for its length; looking at millions of ids would be for nothing
    return checked_token_ids(part, state, where, "prompt")


def checked_token_ids(values: list[Any], state: ServerState, where: str, param: str) -> list[int]:
    """Return the token ids that a request sent, or refuse them by place and value."""
    ids = whole_numbers(values)
    for position, value in enumerate(ids):
        if type(value) is not int:
            raise invalid(f"{where}.{position} is not a token id (an integer), got {as_json(value)}", param)
    try:
        check_token_ids(ids, state.model_config.vocab_size, name=where)
    except ValueError as error:
        raise invalid(str(error), param) from None
    return ids


def encode_text(state: ServerState, text: str, add_special_tokens: bool, param: str) -> list[int]:
    """Return the token ids of a text of a request, or refuse it."""
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


async def in_thread(function: Callable[[], _Result]) -> _Result:
    """Run a piece of work on text beside the event loop."""
    return await asyncio.get_running_loop().run_in_executor(_THREADS, function)
