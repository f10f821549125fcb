"""The server through LiteLLM, which many programs ask servers through."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.spawn]


def test_litellm_reads_all_that_it_asks_for(ask_python: Callable[[str, str], dict[str, Any]]) -> None:
    seen = ask_python("litellm", "litellm_client.py")
    assert seen["whole"] and seen["streamed"] == seen["whole"]
    assert seen["usage"] == seen["streamed_usage"] > 4 and seen["num_chunks"] > 4
    assert seen["completion"] and seen["completion_streamed"] == seen["completion"]
    for call in (seen["call"], seen["call_streamed"]):
        assert call["name"] == "look" and json.loads(call["arguments"])["bird"] in ("gull", "tern")
    assert isinstance(json.loads(seen["json"])["n"], int)
    assert seen["error"] == 400
