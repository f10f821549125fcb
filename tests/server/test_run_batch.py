"""`moewe run-batch`: lines in, lines out, every mistake on its own line, the routes' own checks."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moewe.server.commands.run_batch import Outcome, _files, answer_all
from moewe.server.http.app import build_app
from moewe.server.http.in_process import post
from moewe.server.protocol.batch_lines import LineError, read_line
from tests.support.asking import fake
from tests.support.asking import post as post_over_http
from tests.support.fake_replicas import make_state


def line(custom_id: Any = "a", url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "gull", "max_tokens": 2, **body}}


def run(
    lines: list[Any], poster: Callable[..., Any] | None = None, *, most: int = 4, stop_after: int | None = None
) -> tuple[dict[Any, dict[str, Any]], Outcome]:
    """Return the answers by custom_id (or by id, where there is none), and the counts."""
    text = b"\n".join(each if isinstance(each, bytes) else json.dumps(each).encode() for each in lines)
    out, outcome = io.BytesIO(), Outcome()

    async def go() -> None:
        halt, app = asyncio.Event(), build_app(make_state(fake()))
        seen = 0

        def done() -> None:
            nonlocal seen
            seen += 1
            if seen == stop_after:
                halt.set()

        await answer_all(io.BytesIO(text), out, poster or (lambda url, body: post(app, url, body)), outcome, most=most,
                         halt=halt, on_done=done)  # fmt: skip

    asyncio.run(go())
    made = [json.loads(each) for each in out.getvalue().splitlines()]
    assert all(set(each) == {"id", "custom_id", "response", "error"} for each in made)
    return {each["custom_id"] or each["id"]: each for each in made}, outcome


def test_both_urls_are_answered_as_the_server_answers() -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    answers, outcome = run([line("a", prompt="hi"), b"", line("b", "/v1/chat/completions", **chat)])
    assert (outcome.succeeded, outcome.failed) == (2, 0) and set(answers) == {"a", "b"}
    response = answers["a"]["response"]
    assert response["status_code"] == 200 and answers["a"]["error"] is None
    assert response["request_id"] == response["body"]["id"] and response["body"]["object"] == "text_completion"
    assert response["body"]["usage"]["completion_tokens"] == 2
    assert answers["b"]["response"]["body"]["object"] == "chat.completion"


@pytest.mark.parametrize(
    "body",
    [{"prompt": "hi", "max_tokens": 0}, {"prompt": [9999]}, {"prompt": "hi", "model": "x"}, {"prompts": "hi"}, {}],
)
def test_refusals_are_word_for_word_those_of_the_server(body: dict[str, Any]) -> None:
    asked = line(**body)
    want = post_over_http(make_state(fake()), "/v1/completions", asked["body"])
    answers, outcome = run([asked])
    response = answers["a"]["response"]
    assert (response["status_code"], response["body"]) == (want.status_code, want.json())
    assert want.status_code >= 400 and (outcome.succeeded, outcome.failed) == (0, 1)


def test_a_line_that_is_no_request_is_told_and_the_rest_goes_on() -> None:
    answers, outcome = run([b"nonsense", b"\xff", line("a", prompt="x"), line("a", prompt="y"), line("b", prompt="z")])
    assert {answers[f"batch_req_{n}"]["error"]["code"] for n in (1, 2)} == {"invalid_json_line"}
    assert answers["b"]["response"]["status_code"] == 200
    assert (outcome.succeeded, outcome.failed) == (2, 3)


@pytest.mark.parametrize(
    ("entry", "code"),
    [
        ([1], "invalid_json_line"),
        (line(None), "invalid_custom_id"),
        (line(""), "invalid_custom_id"),
        (line(7), "invalid_custom_id"),
        ({**line(), "method": "GET"}, "invalid_method"),
        (line(url="/v1/embeddings"), "invalid_url"),
        ({**line(), "body": "x"}, "invalid_body"),
        ({**line(), "bodi": 1}, "unknown_field"),
        (line(stream=True), "stream_not_supported"),
    ],
)
def test_what_is_no_request(entry: Any, code: str) -> None:
    with pytest.raises(LineError) as refused:
        read_line(json.dumps(entry).encode())
    assert refused.value.code == code and "\n" not in str(refused.value)


def test_a_line_without_end_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moewe.server.protocol.batch_lines.MAX_LINE_BYTES", 10)
    with pytest.raises(LineError, match="at most 10"):
        read_line(json.dumps(line()).encode())


def test_a_full_queue_is_waited_out_but_not_alone() -> None:
    running = most = 0

    async def busy(url: str, body: bytes) -> tuple[int, bytes]:
        nonlocal running, most
        if running >= 2:
            return 429, b'{"error": {}}'
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return 200, b"{}"

    answers, outcome = run([line(str(n), prompt="x") for n in range(9)], busy, most=5)
    assert (outcome.succeeded, outcome.failed, most) == (9, 0, 2)

    async def full(url: str, body: bytes) -> tuple[int, bytes]:
        return 429, b'{"error": {"message": "full"}}'

    answers, outcome = run([line("a", prompt="x")], full)
    assert answers["a"]["response"]["status_code"] == 429 and outcome.failed == 1


def test_only_so_many_run_at_once() -> None:
    running = most = 0

    async def count(url: str, body: bytes) -> tuple[int, bytes]:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return 200, b"{}"

    run([line(str(n), prompt="x") for n in range(20)], count, most=3)
    assert most <= 3


def test_a_stop_keeps_what_is_written() -> None:
    async def one_then_never(url: str, body: bytes) -> tuple[int, bytes]:
        if b'"first"' not in body:
            await asyncio.Event().wait()
        return 200, b"{}"

    answers, outcome = run([line("a", prompt="first"), *(line(str(n), prompt="x") for n in range(9))], one_then_never,
                           stop_after=1)  # fmt: skip
    assert set(answers) == {"a"} and (outcome.succeeded, outcome.failed) == (1, 0)


def test_what_is_not_of_one_line_ends_the_run() -> None:
    async def broken(url: str, body: bytes) -> tuple[int, bytes]:
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        run([line(str(n), prompt="x") for n in range(3)], broken)


def test_a_bug_of_a_route_is_a_500_on_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(state: Any, request: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("moewe.server.http.app.completion_intake", broken)
    answers, _ = run([line("a", prompt="x")])
    assert answers["a"]["response"]["status_code"] == 500


def test_files_are_checked_before_anything_loads(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("")
    good = {"input_file": str(source), "output_file": str(tmp_path / "out.jsonl")}
    assert _files(good) == (source, tmp_path / "out.jsonl")
    for wrong, says in (
        ({"output_file": "x"}, "-i"),
        ({"input_file": str(source)}, "-o"),
        ({**good, "input_file": str(tmp_path / "no")}, "not a file"),
        ({**good, "output_file": str(tmp_path / "no" / "x")}, "--output-file"),
        ({**good, "output_file": str(source)}, "is the input file"),
    ):
        with pytest.raises(ValueError, match=says):
            _files(wrong)
