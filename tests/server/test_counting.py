"""P-OPS-02 and P-OPS-03 over scripted replicas: gauges after a mass abort, and each end under its own reason."""

from __future__ import annotations

import asyncio
import time

import httpx

from moewe.server.state import ServerState
from tests.support.asking import fake
from tests.support.fake_replicas import FakeReplicas, connect, make_state, on_the_wire, says, tokenizer, with_server
from tests.support.scraped import sums

GAUGES = ("moewe_requests_running", "moewe_requests_waiting", "moewe_kv_blocks_used", "moewe_kv_usage_ratio")


async def scrape(client: httpx.AsyncClient) -> dict[str, float]:
    """Return the metrics, summed over replicas and ranks; a reason or status stands after the name."""
    return sums((await client.get("/metrics")).text, "reason", "status")


async def hang_up_on(client: httpx.AsyncClient, state: ServerState, count: int) -> dict[str, float]:
    """Start `count` requests, streams and others, close their connections once all run; return the metrics of then."""
    before, writers = state.hub.num_live, []
    for number in range(count):
        _, writer = await connect(client)
        writer.write(on_the_wire({"model": "gull", "prompt": "a", "max_tokens": 2000, "stream": number % 2 == 0}))
        writers.append(writer)
    while state.hub.num_live < before + count:
        await asyncio.sleep(0.01)
    busy = await scrape(client)
    for writer in writers:
        writer.transport.abort()
    return busy


def test_gauges_are_zero_after_all_clients_went_away() -> None:
    state = make_state(FakeReplicas(tokenizer(), lambda prompt: [70] * 2000, pause=0.01), max_model_len=4096)

    async def run(client: httpx.AsyncClient) -> tuple[dict[str, float], dict[str, float], float]:
        busy = await hang_up_on(client, state, 20)
        gone = time.monotonic()
        while state.hub.num_live or state.hub.num_calls:
            await asyncio.sleep(0.01)
        return busy, await scrape(client), time.monotonic() - gone

    busy, idle, took = with_server(state, run)
    assert busy["moewe_requests_running"] > 0 and took < 3
    assert [idle[name] for name in GAUGES] == [0, 0, 0, 0]
    assert idle["moewe_requests_finished_total|abort"] == 20


def test_every_end_is_counted_under_its_reason() -> None:
    fakes = FakeReplicas(tokenizer(), says("the sea"), ends=True)
    slow = FakeReplicas(tokenizer(), lambda prompt: [70] * 2000, pause=0.01)
    state = make_state(fakes, max_model_len=4096)

    async def run(client: httpx.AsyncClient) -> tuple[dict[str, float], dict[str, float]]:
        first = await scrape(client)
        for limit in (2, 2, 2, 30, 30):
            body = {"model": "gull", "prompt": "a", "max_tokens": limit}
            reason = (await client.post("/v1/completions", json=body)).json()["choices"][0]["finish_reason"]
            assert reason == ("length" if limit == 2 else "stop")
        refused = await client.post("/v1/completions", json={"model": "gull", "prompt": "a", "max_tokens": 9999})
        assert refused.status_code == 400
        state.hub.replicas, slow.on_deltas = slow, state.hub.on_deltas
        await hang_up_on(client, state, 5)
        while state.hub.num_live:
            await asyncio.sleep(0.01)
        return first, await scrape(client)

    first, last = with_server(state, run)
    for reason, count in (("abort", 5), ("length", 3), ("stop", 2), ("error", 0)):
        assert first[f"moewe_requests_finished_total|{reason}"] == 0  # there before anything happened
        assert last[f"moewe_requests_finished_total|{reason}"] == count, reason
    assert last["moewe_request_errors_total|400"] == 1
    assert sum(value for name, value in last.items() if name.startswith("moewe_request_errors_total")) == 1


def test_requests_that_the_engine_ends_are_errors_and_no_aborts() -> None:
    slow = FakeReplicas(tokenizer(), lambda prompt: [70] * 2000, pause=0.01)
    state = make_state(slow, max_model_len=4096)

    async def run(client: httpx.AsyncClient) -> dict[str, float]:
        body = {"model": "gull", "prompt": "a", "max_tokens": 500}
        asked = [
            asyncio.ensure_future(client.post("/v1/completions", json=body | {"stream": s})) for s in (True, False)
        ]
        while state.hub.num_live < 2:
            await asyncio.sleep(0.01)
        state.hub.fail_all("rank 1 is lost")
        stream, whole = [await task for task in asked]
        assert '"error"' in stream.text and "[DONE]" not in stream.text and whole.status_code == 500
        return await scrape(client)

    values = with_server(state, run)
    assert values["moewe_requests_finished_total|error"] == 2 and values["moewe_requests_finished_total|abort"] == 0
    assert values["moewe_request_errors_total|500"] == 1


def test_counters_never_fall_between_scrapes() -> None:
    state = make_state(fake())

    async def run(client: httpx.AsyncClient) -> None:
        last: dict[str, float] = {}
        for _ in range(10):
            await client.post("/v1/completions", json={"model": "gull", "prompt": "a", "max_tokens": 2})
            now = await scrape(client)
            totals = {name: value for name, value in now.items() if "_total" in name or "_count" in name}
            assert all(value >= last.get(name, 0.0) for name, value in totals.items())
            last = totals

    with_server(state, run)
