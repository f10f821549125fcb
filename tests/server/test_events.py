"""Events of a stream are the chunks of an answer, byte for byte, whether they are encoded whole or filled in."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from moewe.runtime.messages import Delta, LogprobEntry
from moewe.runtime.params import SamplingParams
from moewe.server.answers.answer import Answer, Shape
from moewe.server.answers.chat import ChatAnswer
from moewe.server.answers.chat_parts import Reading
from moewe.server.answers.completion import CompletionAnswer
from moewe.text.parsers import output_format
from tests.support.fake_replicas import FakeReplicas, make_state, says, tokenizer
from tests.support.tool_templates import TEMPLATES, TOOLS

TEXTS = [" a", "", 'say "x"\\', "\n\t\0\u2028", "Möwe 鳥🐦", "\ue000moewe\ue001", "</s>", "{}", " end"]
SHAPES: list[dict[str, Any]] = [
    {}, {"include_usage": True}, {"include_usage": True, "continuous_usage": True}, {"top": 0}, {"token_ids": True},
    {"n": 2}, {"echo": ("p",)}, {"echo": ("p",), "top": 0},
]  # fmt: skip


def answers(make: Any, shape: dict[str, Any], **options: Any) -> tuple[Answer, Answer]:
    """Two answers of one call."""
    state = make_state(FakeReplicas(tokenizer(), says("x")))

    async def open_call() -> Any:
        return state.hub.open([[1, 2, 3]], [SamplingParams(max_tokens=50)] * shape.get("n", 1))

    call = asyncio.run(open_call())
    fields = Shape(model='gu"ll', tokenizer=state.tokenizer, prompts=[[1, 2, 3]], **shape)
    first, second = make(call, fields, **options), make(call, fields, **options)
    second._head = first._head
    return first, second


def deltas(shape: dict[str, Any]) -> list[tuple[int, Delta]]:
    found = []
    for number, text in enumerate(TEXTS):
        entry = (LogprobEntry(token_id=5, logprob=-0.5, rank=1, decoded_token=None),)
        known = ((), entry, entry) if number == 0 and "top" in shape and "echo" in shape else ()
        for index in range(shape.get("n", 1)):
            reason = "length" if number == len(TEXTS) - 1 else None
            logprobs = (entry,) if "top" in shape else ()
            delta = Delta(request_id="", token_ids=(5,), text=text, logprobs=logprobs, prompt_logprobs=known,
                          finish_reason=reason)  # fmt: skip
            found.append((index, delta))
    return found


def encoded(chunks: Sequence[dict[str, Any]]) -> bytes:
    return b"".join(b"data: " + msgspec.json.encode(chunk) + b"\n\n" for chunk in chunks)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(shape) or "plain")
@pytest.mark.parametrize("make", [CompletionAnswer, ChatAnswer])
def test_events_are_the_chunks(make: Any, shape: dict[str, Any]) -> None:
    if make is ChatAnswer and "echo" in shape:
        shape = {key: value for key, value in shape.items() if key != "echo"}
    filled, whole = answers(make, shape)
    for index, delta in deltas(shape):
        assert filled.events(index, delta) == encoded(whole.chunks(index, delta))


def test_events_of_taken_apart_chats_are_the_chunks() -> None:
    formats = output_format("auto", "auto", TEMPLATES["hermes"])
    reading = Reading(make=lambda: formats.parser(tools=TOOLS))  # type: ignore[arg-type, return-value]
    filled, whole = answers(ChatAnswer, {}, reading=reading)
    filled._parts[0]._new_id = whole._parts[0]._new_id = lambda: "call_0"  # type: ignore[method-assign]
    said = '<think>\nhm\n</think>\n\nLook: \n<tool_call>\n{"name": "now", "arguments": {"a": "é"}}\n</tool_call> so'
    kinds = set()
    for start in range(0, len(said), 3):
        reason = "stop" if start + 3 >= len(said) else None
        delta = Delta(request_id="", token_ids=(5,), text=said[start : start + 3], finish_reason=reason)
        chunks = whole.chunks(0, delta)
        kinds.update(key for chunk in chunks for key in chunk["choices"][0]["delta"])
        assert filled.events(0, delta) == encoded(chunks)
    assert kinds >= {"content", "reasoning_content", "tool_calls"}
