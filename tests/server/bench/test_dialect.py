"""What is sent to a server, what its chunks mean, and where it is; keys stay secret."""

from __future__ import annotations

import json
from typing import Any

import pytest

from moewe.server.bench.datasets import Sample
from moewe.server.bench.dialect import Chunk, Dialect, error_message, read_chunk
from moewe.server.client.target import read_extra_body, read_target

SAMPLE = Sample(prompt=[1, 2], prompt_len=2, output_len=7)


def test_bodies() -> None:
    body = Dialect(chat=False, model="m", ignore_eos=True, temperature=0.0, extra={"top_p": 0.5}).body(SAMPLE)
    assert body == {
        "model": "m", "prompt": [1, 2], "max_tokens": 7, "stream": True, "stream_options": {"include_usage": True},
        "temperature": 0.0, "ignore_eos": True, "top_p": 0.5,
    }  # fmt: skip
    body = Dialect(chat=True, model="m", extra={"model": "n"}).body(Sample(prompt="hi", prompt_len=1, output_len=7))
    assert body == {
        "model": "n", "messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 7, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("body", "chunk"),
    [
        ({"choices": [{"text": " a", "finish_reason": None}]}, Chunk(tokens=True)),
        ({"choices": [{"text": "", "logprobs": {"tokens": ["x"]}}]}, Chunk(tokens=True)),
        ({"choices": [{"text": "", "finish_reason": "length"}]}, Chunk(finished=True)),
        ({"choices": [{"delta": {"role": "assistant", "content": ""}}]}, Chunk()),
        ({"choices": [{"delta": {"content": "x"}}]}, Chunk(tokens=True)),
        ({"choices": [{"delta": {"reasoning_content": "x", "content": None}}]}, Chunk(tokens=True)),
        ({"choices": [{"delta": {"tool_calls": [{"index": 0}]}}]}, Chunk(tokens=True)),
        ({"choices": [{"delta": {}, "finish_reason": "stop"}]}, Chunk(finished=True)),
        ({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}, Chunk(usage=(3, 2))),
        ({"choices": [{"text": "x"}], "usage": None}, Chunk(tokens=True)),
        ({"choices": None, "usage": {"completion_tokens": "2"}}, Chunk()),
        ({"choices": [None, {"delta": None}]}, Chunk()),
        ({"error": {"message": "too\n long"}}, Chunk(error="too long")),
        ({"object": "error", "message": "gone", "code": 500}, Chunk(error="gone")),
        ({"error": "plain"}, Chunk(error="plain")),
        ([1], Chunk(error="the stream holds an event that is not an object")),
    ],
)
def test_chunks(body: Any, chunk: Chunk) -> None:
    assert read_chunk(json.dumps(body).encode()) == chunk


def test_the_end_and_what_is_not_json() -> None:
    assert read_chunk(b" [DONE] ").done
    assert read_chunk(b"{nonsense").error == read_chunk(b"\xff").error == "the stream holds an event that is not JSON"


def test_reasons_are_one_short_line() -> None:
    assert error_message({"detail": "Not Found"}) == "Not Found"
    assert len(error_message({"error": {"message": "x" * 999}})) == 200
    assert error_message("<html>\nbad gateway") == "<html> bad gateway"


# --- target -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("base", "endpoint", "root", "url"),
    [
        ("http://h:8000", "completions", "http://h:8000", "http://h:8000/v1/completions"),
        ("http://h:8000/v1/", "chat", "http://h:8000", "http://h:8000/v1/chat/completions"),
        ("https://h/api/v1", "chat", "https://h/api", "https://h/api/v1/chat/completions"),
        ("http://[::1]:80", "/x/completions", "http://[::1]:80", "http://[::1]:80/x/completions"),
    ],
)
def test_where_a_server_is(base: str, endpoint: str, root: str, url: str) -> None:
    target = read_target({"base_url": base, "endpoint": endpoint}, {})
    assert (target.root, target.api, target.url) == (root, f"{root}/v1", url)
    assert target.chat is ("chat" in url) and target.headers == {} and target.local is ("::1" in base)


@pytest.mark.parametrize(
    "base", ["h:8000", "ftp://h", "http://", "http://h:x", "http://[", "http://u:hush@h", "http://h?x=hush"]
)
def test_other_urls_are_refused_without_showing_them(base: str) -> None:
    with pytest.raises(ValueError, match="--base-url") as refused:
        read_target({"base_url": base}, {})
    assert "hush" not in str(refused.value)


def test_an_unknown_endpoint_is_refused() -> None:
    with pytest.raises(ValueError, match="--endpoint 'embeddings'"):
        read_target({"endpoint": "embeddings"}, {})


def test_keys_come_from_flag_or_environment_and_are_not_shown() -> None:
    environment = {"OPENAI_API_KEY": "hush-env"}
    target = read_target({"api_key": "hush", "header": ("X-Team=a=b", "Accept-Language: de")}, environment)
    assert target.headers == {"Authorization": "Bearer hush", "X-Team": "a=b", "Accept-Language": "de"}
    assert "hush" not in repr(target)
    assert read_target({}, environment).headers == {"Authorization": "Bearer hush-env"}
    both = {**environment, "MOEWE_API_KEY": "ours"}
    assert read_target({}, both).headers == {"Authorization": "Bearer ours"}
    for wrong in ({"header": ("hush",)}, {"header": ("=hush",)}, {"api_key": "hush\n"}, {"header": ("a=\u1234hush",)}):
        with pytest.raises(ValueError, match="--") as refused:
            read_target(wrong, {})
        assert "hush" not in str(refused.value)


def test_extra_fields() -> None:
    assert read_extra_body(None) == {} and read_extra_body('{"top_p": 1, "stream": true}') == {
        "top_p": 1,
        "stream": True,
    }
    for text in ("{", "[]", '{"stream": false}', '{"n": 2}', "[" * 100_000):
        with pytest.raises(ValueError, match="--extra-body"):
            read_extra_body(text)
