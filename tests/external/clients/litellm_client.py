"""Asks a server through LiteLLM and prints what it got as JSON: `python litellm_client.py BASE_URL`.

Run by tests/external/test_litellm.py in an environment of its own; nothing of moewe is imported.
"""

import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # no look at the network for prices

import litellm

ASKED = {"api_base": sys.argv[1], "api_key": "none", "max_retries": 0, "timeout": 120}
CHAT, TEXT = "openai/gull", "text-completion-openai/gull"
MESSAGES = [{"role": "user", "content": "Name a bird."}]
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look at a bird",
        "parameters": {
            "type": "object",
            "properties": {"bird": {"enum": ["gull", "tern"]}},
            "required": ["bird"],
            "additionalProperties": False,
        },
    },
}


def main() -> None:
    """Ask for everything once."""
    seen = {}
    plain = {"model": CHAT, "messages": MESSAGES, "max_tokens": 24, "temperature": 0, **ASKED}
    whole = litellm.completion(**plain)
    seen["whole"], seen["usage"] = whole.choices[0].message.content, whole.usage.completion_tokens

    chunks = list(litellm.completion(**plain, stream=True, stream_options={"include_usage": True}))
    built = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    seen["streamed"], seen["streamed_usage"] = built.choices[0].message.content, built.usage.completion_tokens
    seen["num_chunks"] = len(chunks)

    text = {"model": TEXT, "prompt": "The gull", "max_tokens": 16, "temperature": 0, **ASKED}
    seen["completion"] = litellm.text_completion(**text).choices[0].text
    pieces = litellm.text_completion(**text, stream=True)
    seen["completion_streamed"] = "".join(piece.choices[0].text or "" for piece in pieces)

    forced = {"type": "function", "function": {"name": "look"}}
    tools = {**plain, "max_tokens": 64, "tools": [TOOL], "tool_choice": forced}
    seen["call"] = litellm.completion(**tools).choices[0].message.tool_calls[0].function.model_dump()
    chunks = list(litellm.completion(**tools, stream=True))
    built = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    seen["call_streamed"] = built.choices[0].message.tool_calls[0].function.model_dump()

    number = {"type": "integer", "minimum": 0, "maximum": 9}
    schema = {"type": "object", "properties": {"n": number}, "required": ["n"], "additionalProperties": False}
    named = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    seen["json"] = litellm.completion(**{**plain, "max_tokens": 64}, response_format=named).choices[0].message.content
    try:
        litellm.completion(**{**plain, "temperature": -1})
    except litellm.BadRequestError as error:
        seen["error"] = error.status_code
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
