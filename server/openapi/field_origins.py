"""Who knows a field of completions and chats, and where this server differs: the comparison in docs/api.md.

Not used while serving. Knowledge of OpenAI's API, as its package of the version below has it, and of vLLM 0.32, from
its own definitions of requests. Units: names of fields.
"""

from __future__ import annotations

OPENAI_PACKAGE = (3, 57)
# Of OpenAI's /v1/completions and /v1/chat/completions.
OPENAI = frozenset({
    "audio", "best_of", "echo", "frequency_penalty", "function_call", "functions", "logit_bias", "logprobs",
    "max_completion_tokens", "max_tokens", "messages", "metadata", "modalities", "model", "moderation", "n",
    "parallel_tool_calls", "prediction", "presence_penalty", "prompt", "prompt_cache_key", "prompt_cache_options",
    "prompt_cache_retention", "reasoning_effort", "response_format", "safety_identifier", "seed", "service_tier",
    "stop", "store", "stream", "stream_options", "suffix", "temperature", "tool_choice", "tools", "top_logprobs",
    "top_p", "user", "verbosity", "web_search_options",
})  # fmt: skip
# What vLLM adds to them, and what of them it lacks.
VLLM_MORE = frozenset({
    "add_generation_prompt", "add_special_tokens", "allowed_token_ids", "bad_words", "cache_salt", "chat_template",
    "chat_template_kwargs", "continue_final_message", "documents", "ec_transfer_params", "ignore_eos",
    "include_reasoning", "include_stop_str_in_output", "kv_transfer_params", "length_penalty", "logits_processors",
    "logprob_token_ids", "media_io_kwargs", "min_p", "min_tokens", "mm_processor_kwargs", "priority", "prompt_embeds",
    "prompt_logprobs", "repetition_detection", "repetition_penalty", "request_id", "return_mm_kwargs",
    "return_prompt_text", "return_token_ids", "return_token_offsets", "return_tokens_as_token_ids",
    "routed_experts_prompt_start", "session_id", "skip_special_tokens", "spaces_between_special_tokens",
    "stop_token_ids", "stream_interval", "structured_outputs", "thinking_token_budget", "top_k",
    "truncate_prompt_tokens", "truncation_side", "use_beam_search", "vllm_xargs", "watermarking",
})  # fmt: skip
VLLM_LACKS = frozenset({
    "audio", "best_of", "function_call", "functions", "metadata", "modalities", "moderation", "prediction",
    "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier", "service_tier", "store",
    "verbosity", "web_search_options",
})  # fmt: skip
# In older versions of vLLM alone, which others took over.
VLLM_OLD = frozenset({
    "guided_choice", "guided_decoding_backend", "guided_grammar", "guided_json", "guided_regex",
    "guided_whitespace_pattern",
})  # fmt: skip

DIFFERENCES = {
    "best_of": "OpenAI generates more and returns the best",
    "echo": "vLLM has it for chats too",
    "logprobs": "OpenAI up to 5, vLLM up to `--max-logprobs`",
    "max_completion_tokens": "with both names vLLM takes the newer one",
    "max_tokens": "vLLM's completions get 16 too",
    "model": "vLLM takes a request without it",
    "n": "vLLM refuses n > 1 with greedy sampling; here all choices are equal then",
    "parallel_tool_calls": "OpenAI tells its model; vLLM leaves out later calls as here",
    "priority": "vLLM refuses it likewise unless its policy is priority",
    "prompt_logprobs": "vLLM takes -1 for the whole vocabulary",
    "reasoning_effort": "vLLM hands it to every template, whether it reads it or not",
    "seed": "OpenAI: best effort",
    "stop": "OpenAI: up to 4 strings",
    "stream_options": "OpenAI has no `continuous_usage_stats`",
    "temperature": "OpenAI: up to 2",
    "tool_choice": "OpenAI's `allowed_tools` is not supported",
    "tools": "beside `response_format` with `tool_choice` auto: only with models whose calls a single token opens",
}

# Of chats, where it is another than that of completions; empty: none.
CHAT_DIFFERENCES = {
    "logprobs": "OpenAI: of the tokens of `content`; here, as with vLLM, of every generated token, those of marks, "
    "reasoning and calls too",
    "max_tokens": "",
    "top_logprobs": "vLLM up to `--max-logprobs`, and -1 for the whole vocabulary",
}
# Of objects inside bodies: those that are not OpenAI's, and fields that only one of the two has.
NOT_OPENAI_OBJECTS = frozenset({"StructuredOutputs", "TokenizeText", "TokenizeChat", "Detokenize"})
INNER_NOT_OPENAI = frozenset({
    ("ChatMessage", "reasoning"), ("ChatMessage", "reasoning_content"), ("StreamOptions", "continuous_usage_stats"),
})  # fmt: skip
INNER_NOT_VLLM = frozenset({("StreamOptions", "include_obfuscation")})
INNER_VLLM_OLD = frozenset({("ChatMessage", "reasoning_content"), ("StructuredOutputs", "disable_fallback")})
INNER_DIFFERENCES = {
    ("CalledFunction", "arguments"): "OpenAI: text alone",
    ("ContentPart", "type"): "OpenAI's and vLLM's images, audio and files are not read",
    ("Function", "strict"): "OpenAI holds calls to the schema; here `tool_choice` does that",
    ("JsonSchemaFormat", "name"): "OpenAI and vLLM demand it",
    ("JsonSchemaFormat", "strict"): "OpenAI keeps to it only with true",
}


def known_to(name: str) -> tuple[str, str]:
    """Return whether OpenAI and vLLM have a field, in words for a table."""
    vllm = name in VLLM_MORE or (name in OPENAI and name not in VLLM_LACKS)
    return "yes" if name in OPENAI else "no", "yes" if vllm else ("older" if name in VLLM_OLD else "no")


def difference_of(name: str, *, chat: bool) -> str:
    """Return what is different elsewhere about a field of a route, in words."""
    return CHAT_DIFFERENCES.get(name, DIFFERENCES.get(name, "")) if chat else DIFFERENCES.get(name, "")


def inner_known_to(schema: str, name: str) -> tuple[str, str]:
    """Return whether OpenAI and vLLM have a field of an object inside a body, in words for a table."""
    field = (schema, name)
    openai = schema not in NOT_OPENAI_OBJECTS and field not in INNER_NOT_OPENAI
    vllm = "older" if field in INNER_VLLM_OLD else ("no" if field in INNER_NOT_VLLM else "yes")
    return "yes" if openai else "no", vllm
