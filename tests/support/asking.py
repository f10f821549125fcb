"""One-line requests to the application over scripted replicas, and what tests read from its answers.

Not a server: no network is involved (tests/support/fake_replicas.py has one). Units: as OpenAI's API.
"""

from __future__ import annotations

import json
from typing import Any

import httpx

from moewe.server.state import ServerState
from tests.support.fake_replicas import FakeReplicas, ask, says, tokenizer

HI = {"model": "gull", "messages": [{"role": "user", "content": "hi"}]}


def fake(text: str = "the sea", **kwargs: Any) -> FakeReplicas:
    return FakeReplicas(tokenizer(), says(text), **kwargs)


def post(state: ServerState, path: str, body: Any, **kwargs: Any) -> httpx.Response:
    return ask(state, "POST", path, **({"content": body} if isinstance(body, bytes) else {"json": body}), **kwargs)


def get(state: ServerState, path: str, **kwargs: Any) -> httpx.Response:
    return ask(state, "GET", path, **kwargs)


def events(response: httpx.Response) -> list[Any]:
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    return [json.loads(line[6:]) if line != "data: [DONE]" else "DONE" for line in lines]


def error_of(response: httpx.Response) -> dict[str, Any]:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error
