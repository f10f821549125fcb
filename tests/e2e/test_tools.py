"""Calls and reasoning from a real engine to a real OpenAI client (P-API-10), and the turn after them (P-TOK-07)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.chain import chain
from tests.support.server_process import NAME, ServerProcess
from tests.support.tool_templates import ARGUMENTS, TEMPLATES, TOOLS, assistant, output_of

pytestmark = [pytest.mark.spawn, pytest.mark.slow]

CALLS = [("find_birds", ARGUMENTS), ("now", {})]
OUTPUT = output_of(TEMPLATES["hermes"], assistant(CALLS, "Let me look.", "Birds, hm."))
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    script = chain([OUTPUT[at : at + 3] for at in range(0, len(OUTPUT), 3)], chat_template=TEMPLATES["hermes"])
    with ServerProcess(script.path, "--max-num-seqs", "2", "--kv-cache-memory-bytes", "64MiB") as server:
        yield server


def test_calls_reach_an_openai_client_in_both_modes_and_go_back(server: ServerProcess) -> None:
    client = server.client()
    asked: Any = {"model": NAME, "messages": HI, "tools": TOOLS, "temperature": 0, "max_tokens": 1000}
    whole = client.chat.completions.create(**asked)
    with client.chat.completions.stream(**asked) as stream:
        indices = [
            call.index
            for event in stream if event.type == "chunk"
            for call in event.chunk.choices[0].delta.tool_calls or []
        ]  # fmt: skip
        added_up = stream.get_final_completion()
    assert sorted(set(indices)) == [0, 1] and indices == sorted(indices)
    for choice in (whole.choices[0], added_up.choices[0]):
        assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me look."
        calls = choice.message.tool_calls or []
        assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == CALLS
    assert whole.choices[0].message.model_extra["reasoning_content"] == "Birds, hm."
    assert 0 < whole.usage.completion_tokens_details.reasoning_tokens < whole.usage.completion_tokens
    message = whole.choices[0].message.model_dump()
    turns: list[Any] = [*HI, message | {"content": None}]
    turns += [{"role": "tool", "tool_call_id": call["id"], "content": "gulls"} for call in message["tool_calls"]]
    again = client.chat.completions.create(**asked | {"messages": turns, "max_tokens": 5})
    assert again.usage.prompt_tokens > whole.usage.prompt_tokens
