"""The server through node's openai package: another language, another reader of server-sent events."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.server_process import NAME, ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.spawn]


def test_openai_of_node_reads_all_that_it_asks_for(
    server: ServerProcess, ask_node: Callable[[str], dict[str, Any]]
) -> None:
    seen = ask_node("openai_client.mjs")
    assert seen["models"] == [NAME]
    assert seen["whole"] and seen["streamed"] == {
        "text": seen["whole"], "role": "assistant", "usage": seen["usage"], "reasons": ["length"],
    }  # fmt: skip
    assert seen["usage"]["completion_tokens"] == 24
    assert seen["completion"]["whole"] and seen["completion"]["streamed"] == seen["completion"]["whole"]
    assert seen["call"]["name"] == "look" and json.loads(seen["call"]["arguments"])["bird"] in ("gull", "tern")
    assert seen["error"] == {
        "status": 400, "type": "invalid_request_error", "param": "temperature", "kind": "BadRequestError",
    }  # fmt: skip
    server.wait_idle(within=5.0)
