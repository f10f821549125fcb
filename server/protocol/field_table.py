"""Fields of requests that are no parameters of ours: those taken without effect, and those refused; and unknown names.

Not the fields that are honoured (server/protocol/requests.py). Nothing is dropped silently: what is in neither list is
an error.
Units: JSON values.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Iterable
from typing import Any

from ..errors import invalid

# They change no output: labels for the operator of another service, hints for caches, queues and billing, and which of
# its libraries another server shall use.
IGNORED = frozenset({
    "cache_salt", "guided_decoding_backend", "metadata", "prompt_cache_key", "prompt_cache_options",
    "prompt_cache_retention", "return_mm_kwargs", "return_token_offsets", "safety_identifier", "service_tier",
    "session_id", "store", "stream_interval", "user",
})  # fmt: skip
# Known to OpenAI or to other servers, not offered here. The values listed ask for nothing, so they are fine.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": (None,),
    "audio": (None,),
    "chat_template": (None,),
    "documents": (None, []),
    "ec_transfer_params": (None,),
    "function_call": (None, "none"),
    "functions": (None, []),
    "guided_whitespace_pattern": (None,),
    "include_reasoning": (None, True),
    "kv_transfer_params": (None,),
    "length_penalty": (None, 1),
    "logits_processors": (None, []),
    "logprob_token_ids": (None,),
    "media_io_kwargs": (None,),
    "mm_processor_kwargs": (None,),
    "modalities": (None, ["text"]),
    "moderation": (None,),
    "prediction": (None,),
    "prompt_embeds": (None,),
    "repetition_detection": (None,),
    "request_id": (None,),
    "return_prompt_text": (None, False),
    "routed_experts_prompt_start": (None, 0),
    "spaces_between_special_tokens": (None, True),
    "suffix": (None, ""),
    "thinking_token_budget": (None, -1),
    "truncate_prompt_tokens": (None,),
    "truncation_side": (None,),
    "use_beam_search": (None, False),
    "verbosity": (None,),
    "vllm_xargs": (None,),
    "watermarking": (None, False),
    "web_search_options": (None,),
}
# What to do instead, where leaving it out is not the whole answer.
INSTEAD = {
    "chat_template": "start the server with --chat-template, or render the prompt and use /v1/completions",
    "function_call": "use tool_choice",
    "functions": "use tools",
    "guided_whitespace_pattern": "leave it out: between the parts of JSON stands nothing, a space, or a line break "
    "with its indentation; guided_regex and guided_grammar fix every blank",
    "request_id": "send the header X-Request-Id",
    "suffix": "write the gap as the model's own fill-in-the-middle prompt",
}
# Fields of one route: on the other they are as unknown as any.
CHAT_ONLY = frozenset({
    "audio", "chat_template", "documents", "function_call", "functions", "include_reasoning", "media_io_kwargs",
    "mm_processor_kwargs", "modalities", "moderation", "prediction", "return_prompt_text", "verbosity",
    "web_search_options",
})  # fmt: skip
COMPLETIONS_ONLY = frozenset({"prompt_embeds", "suffix"})


def check_extra(extra: dict[str, Any], honoured: Iterable[str], *, chat: bool, other: Iterable[str] = ()) -> None:
    """Refuse what a route does not take among fields that are not its own.

    Args:
        extra: the fields with their values.
        honoured: names of the route's own fields, for a hint.
        chat: whether the route is that of chats.
        other: names of the other route's fields.
    """
    foreign = (COMPLETIONS_ONLY if chat else CHAT_ONLY) | set(other)
    for name, value in extra.items():
        if name in IGNORED or (name in foreign and value is None):  # load generators send both routes' fields
            continue
        if name in foreign:
            here, there = ("chats", "/v1/completions") if chat else ("completions", "/v1/chat/completions")
            raise invalid(f"{name} is not a field of {here}; leave it out or use {there}", name)
        if name not in UNSUPPORTED:
            raise unknown(name, [*honoured, *(set(UNSUPPORTED) - foreign)])
        if not is_harmless(name, value):
            fine = UNSUPPORTED[name][-1]
            fix = INSTEAD.get(name) or (f"leave it out or send {as_json(fine)}" if fine else "leave it out")
            raise invalid(f"{name}={as_json(value)} is not supported in this version; {fix}", name)


def is_harmless(name: str, value: Any) -> bool:
    """Return True when `value` asks nothing of an unsupported field."""
    return any(type(value) in (type(fine), float) and value == fine for fine in UNSUPPORTED[name])


def check_inner(names: Iterable[str], known: Collection[str], where: str) -> None:
    """Refuse unknown fields of an object inside a request, `where` with a dot at its end."""
    for name in names:
        if name not in known:
            raise unknown(name, known, where)


def unknown(name: str, known: Iterable[str], where: str = "") -> Exception:
    """Return the error for a name that nobody knows, with the nearest one that somebody does."""
    shown = name[:80]
    close = difflib.get_close_matches(shown, known, n=1)
    if not shown.strip() or not shown.isprintable():
        shown = json.dumps(shown)
    hint = f"did you mean {close[0]!r}?" if close else "leave it out"
    return invalid(f"{where}{shown} is not a field that this server knows; {hint}", f"{where}{name}"[:200])


def as_json(value: Any) -> str:
    """Return `value` as the client spelled it, shortened."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:77] + "..."
