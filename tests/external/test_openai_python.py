"""The server through the openai package: each method and helper that it has for what this server offers, in one sweep.

Not the fields of a request (tests/e2e/test_server_fields.py) and not tools of a model that calls them
(tests/e2e/test_tools.py).
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pydantic
import pytest

from tests.support.server_process import NAME, ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.spawn]

MESSAGES: list[Any] = [{"role": "user", "content": "Name a bird."}]
CHAT: dict[str, Any] = {"model": NAME, "messages": MESSAGES, "temperature": 0, "max_tokens": 100}  # it ends before
TEXT: dict[str, Any] = {"model": NAME, "prompt": "The gull", "temperature": 0, "max_tokens": 8}


class Look(pydantic.BaseModel):
    """Look at a bird."""

    bird: str
    times: int


def test_models(server: ServerProcess) -> None:
    client = server.client()
    assert [card.id for card in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("tern")


def test_completions(server: ServerProcess) -> None:
    client = server.client()
    whole = client.completions.create(**TEXT, logprobs=2)
    assert whole.usage.completion_tokens == 8 == len(whole.choices[0].logprobs.tokens)
    pieces = list(client.completions.create(**TEXT, stream=True, stream_options={"include_usage": True}))
    assert "".join(piece.choices[0].text for piece in pieces if piece.choices) == whole.choices[0].text
    assert pieces[-1].usage == whole.usage
    many = client.completions.create(**{**TEXT, "prompt": ["The gull", "A tern"], "temperature": 1.0}, n=2, seed=5)
    assert [choice.index for choice in many.choices] == [0, 1, 2, 3]
    echo = client.completions.create(**{**TEXT, "max_tokens": 0}, echo=True, logprobs=1)
    assert echo.choices[0].text == "The gull" and echo.choices[0].logprobs.token_logprobs[0] is None
    ids = client.completions.create(**{**TEXT, "prompt": [1000, 1001, 1002]}, stop=["\n"], presence_penalty=0.5)
    assert ids.usage.prompt_tokens == 3


def test_chats_and_their_helpers(server: ServerProcess) -> None:
    client = server.client()
    raw = client.chat.completions.with_raw_response.create(
        **CHAT, logprobs=True, top_logprobs=3, user="u", metadata={"a": "b"}, extra_headers={"X-Request-Id": "gull-7"}
    )
    whole = raw.parse()
    assert raw.headers["x-request-id"] == "gull-7"
    assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens
    with client.chat.completions.stream(**CHAT, stream_options={"include_usage": True}) as stream:
        kinds = {event.type for event in stream}
        built = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert built.choices[0].message.content == whole.choices[0].message.content and built.usage == whole.usage
    two = client.chat.completions.create(**{**CHAT, "temperature": 1.0}, n=2, seed=3)
    assert len(two.choices) == 2


def test_parsed_answers_and_tools(server: ServerProcess) -> None:
    client = server.client()
    asked = {**CHAT, "max_tokens": 300}
    schema = Look.model_json_schema() | {"additionalProperties": False}
    schema["properties"]["bird"] |= {"maxLength": 8}
    schema["properties"]["times"] |= {"minimum": 0, "maximum": 9}
    format: Any = {"type": "json_schema", "json_schema": {"name": "look", "schema": schema, "strict": True}}
    answer = client.chat.completions.create(**asked, response_format=format)
    assert answer.choices[0].finish_reason == "stop"
    Look.model_validate_json(answer.choices[0].message.content)
    tool: Any = {"type": "function", "function": {"name": "look", "parameters": schema}}
    call = client.chat.completions.create(**asked, tools=[tool], tool_choice="required", parallel_tool_calls=False)
    function = call.choices[0].message.tool_calls[0].function
    assert function.name == "look" and Look.model_validate_json(function.arguments)
    with client.chat.completions.stream(**asked, tools=[tool], tool_choice="required") as stream:
        stream.until_done()
        streamed = stream.get_final_completion().choices[0].message.tool_calls[0].function
    assert json.loads(streamed.arguments) == json.loads(function.arguments)


def test_many_at_once_and_some_that_leave(server: ServerProcess) -> None:
    async def run() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:

            async def leave() -> None:
                async with await client.completions.create(**{**TEXT, "max_tokens": 400}, stream=True) as stream:
                    async for _ in stream:
                        return

            asked = [client.completions.create(**TEXT) for _ in range(8)]
            return await asyncio.gather(*asked, *(leave() for _ in range(4)))

    answers = asyncio.run(run())[:8]
    assert {answer.usage.completion_tokens for answer in answers} == {8}
    server.wait_idle(within=10.0)


def test_errors_are_those_of_the_package(server: ServerProcess) -> None:
    client = server.client()
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(**{**CHAT, "temperature": -1})
    assert bad.value.param == "temperature" and bad.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(**{**TEXT, "prompt": "gull " * 2000})
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as model:
        client.completions.create(**{**TEXT, "model": "tern"})
    assert model.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError) as refused:
        client.embeddings.create(model=NAME, input="gull")
    assert refused.value.code == "unsupported_endpoint"
