"""The sending: order, limit, early end; and one request against streams that are broken in every way."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from moewe.server.bench.client import Client, connections
from moewe.server.bench.datasets import Sample
from moewe.server.bench.dialect import Dialect
from moewe.server.bench.load import run_load
from moewe.server.bench.records import RequestRecord
from tests.support.fake_openai import USAGE, FakeOpenAI, answer, event, serving, text_event

SAMPLES = [Sample(prompt=[n], prompt_len=1, output_len=3) for n in range(10)]


# --- load -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("limit", [None, 1, 3])
def test_all_are_sent_in_order_within_the_limit(limit: int | None) -> None:
    sent: list[Any] = []
    running = most = 0

    async def send(sample: Sample) -> RequestRecord:
        nonlocal running, most
        sent.append(sample.prompt)
        running += 1
        most = max(most, running)
        for _ in range(3):
            await asyncio.sleep(0)
        running -= 1
        return RequestRecord(started=1.0, ended=2.0)

    done: list[RequestRecord] = []
    result = asyncio.run(run_load(SAMPLES, [0.0] * 10, send, max_concurrency=limit, on_done=done.append))
    assert sent == [[n] for n in range(10)] and len(result.records) == 10 and not result.stopped
    assert most == (limit or 10) and done == result.records


def test_a_stop_ends_at_once_and_keeps_what_had_ended() -> None:
    cancelled: list[Any] = []

    async def run() -> Any:
        stop = asyncio.Event()

        async def send(sample: Sample) -> RequestRecord:
            if sample.prompt == [0]:
                return RequestRecord(started=1.0, ended=2.0)
            if sample.prompt == [2]:
                stop.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(sample.prompt)
                raise
            raise AssertionError

        return await run_load(SAMPLES, [0.0] * 3 + [1e6] * 7, send, stop=stop)

    result = asyncio.run(run())
    assert result.stopped and len(result.records) == 1 and sorted(cancelled) == [[1], [2]]


def test_a_bug_in_the_watcher_is_not_swallowed() -> None:
    async def send(sample: Sample) -> RequestRecord:
        return RequestRecord()

    def broken(record: RequestRecord) -> None:
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        asyncio.run(run_load(SAMPLES, [0.0] * 10, send, on_done=broken))


# --- one request ------------------------------------------------------------------------------------------------------
def ask(fake: FakeOpenAI, *, timeout: float | None = None) -> RequestRecord:
    async def run() -> RequestRecord:
        async with serving(fake), connections({"X-A": "b"}, timeout) as session:
            return await Client(session, f"{fake.url}/v1/completions", Dialect(chat=False, model="m")).send(SAMPLES[4])

    return asyncio.run(run())


def test_a_good_stream() -> None:
    fake = FakeOpenAI()
    record = ask(fake)
    assert record.error is None and record.counted
    assert (record.prompt_tokens, record.output_tokens, record.pieces, len(record.gaps)) == (5, 3, 3, 2)
    assert record.first is not None and record.started <= record.first <= record.last <= record.ended
    assert fake.headers[0]["x-a"] == "b" and fake.headers[0]["content-type"] == "application/json"
    assert fake.bodies == [Dialect(chat=False, model="m").body(SAMPLES[4])]


def test_several_tokens_in_a_piece_and_events_cut_anywhere() -> None:
    whole = b"".join(answer(" several tokens", " more", usage=USAGE))
    for size in (1, 7, len(whole)):
        fake = FakeOpenAI(stream=[whole[at : at + size] for at in range(0, len(whole), size)])
        record = ask(fake)
        assert record.error is None and (record.pieces, record.output_tokens) == (2, 3)


def test_without_usage_pieces_are_counted() -> None:
    record = ask(FakeOpenAI(stream=answer("a", "b")))
    assert record.error is None and not record.counted
    assert (record.prompt_tokens, record.output_tokens) == (1, 2)


@pytest.mark.parametrize(
    ("stream", "says"),
    [
        ([text_event("a"), event({"error": {"message": "engine lost"}})], "engine lost"),
        ([text_event("a")], "ended before the answer did"),
        ([], "ended before the answer did"),
        ([text_event("a"), event(b"{oops")], "not JSON"),
        ([text_event("", "stop"), event(b"[DONE]")], "no token"),
    ],
)
def test_broken_streams_are_failures_with_reasons(stream: Sequence[bytes], says: str) -> None:
    record = ask(FakeOpenAI(stream=stream))
    assert record.error is not None and says in record.error and record.ended >= record.started


@pytest.mark.parametrize(
    ("body", "says"),
    [(b'{"error": {"message": "no such model"}}', "HTTP 404: no such model"), (b"", "HTTP 404: no reason given"),
     (b"<h1>gone</h1>", "HTTP 404: <h1>gone</h1>")],
)  # fmt: skip
def test_error_statuses_are_failures_with_reasons(body: bytes, says: str) -> None:
    assert ask(FakeOpenAI(status=404, stream=[body])).error == says


def test_an_answer_that_is_no_stream_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeOpenAI(kind="application/json", stream=[b"{}"])
    assert ask(fake).error == "the answer is no stream of events but application/json"


def test_a_dead_server_and_one_that_takes_too_long() -> None:
    async def dead() -> RequestRecord:
        async with serving(FakeOpenAI()) as fake:
            pass
        async with connections({}, None) as session:
            return await Client(session, f"{fake.url}/v1/completions", Dialect(chat=False, model="m")).send(SAMPLES[0])

    assert (asyncio.run(dead()).error or "").startswith("no connection")

    async def held() -> RequestRecord:
        fake = FakeOpenAI(ends=0)
        async with serving(fake), connections({}, 0.2) as session:
            return await Client(session, f"{fake.url}/v1/completions", Dialect(chat=False, model="m")).send(SAMPLES[0])

    record = asyncio.run(held())
    assert record.error == "it took longer than the timeout" and record.pieces == 3
