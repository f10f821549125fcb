"""Many clients at once, some of whom leave: two replicas answer all others exactly and keep nothing."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import httpx
import psutil
import pytest

from tests.support.chain import chain
from tests.support.server_process import NAME, ServerProcess

pytestmark = [pytest.mark.spawn, pytest.mark.slow]

LETTERS = "abcdefghijklm"


async def ask(client: httpx.AsyncClient, number: int, seen: Counter[str]) -> None:
    """Send one random request; three in ten hang up early. The chain says the letters in a circle."""
    dice = random.Random(number)
    length, stream, leaves = dice.randint(1, 80), dice.random() < 0.5, dice.random() < 0.3
    body: dict[str, Any] = {
        "model": NAME, "prompt": "x" * dice.randint(1, 300), "max_tokens": 1500 if leaves else length, "stream": stream,
        "temperature": 0, "stream_options": {"include_usage": True} if stream else None,
    }  # fmt: skip
    if leaves:
        try:
            await asyncio.wait_for(client.post("/v1/completions", json=body), dice.uniform(0.1, 2.0))
        except TimeoutError:
            seen["left"] += 1
            return
        raise AssertionError("1500 tokens came too fast for this test")
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    expected = (LETTERS * 7)[:length]
    if stream:
        events = [line[6:] for line in response.text.split("\n\n") if line]
        assert events[-1] == "[DONE]"
        chunks = [httpx.Response(200, text=event).json() for event in events[:-1]]
        text = "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1])
        usage = chunks[-1]["usage"]
    else:
        text, usage = response.json()["choices"][0]["text"], response.json()["usage"]
    assert text == expected
    seen["length"] += 1
    seen["completion"] += usage["completion_tokens"]
    assert usage["completion_tokens"] == length


def test_random_requests_with_hang_ups_leave_nothing() -> None:
    model = chain(list(LETTERS), loop=True).path
    flags = ("--max-num-seqs", "8", "--kv-cache-memory-bytes", "1MiB")  # small pools: preemption happens
    with ServerProcess(model, *flags, topology="EP2DP2") as server:
        seen: Counter[str] = Counter()

        async def run() -> None:
            async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
                turn = asyncio.Semaphore(32)

                async def one(number: int) -> None:
                    async with turn:
                        await ask(client, number, seen)

                await asyncio.gather(*(one(number) for number in range(200)))

        process = psutil.Process(server.process.pid)
        descriptors, threads = process.num_fds(), process.num_threads()
        asyncio.run(run())
        server.wait_idle(within=3.0)
        after = server.counters()
        assert seen["left"] + seen["length"] == 200 and seen["left"] > 20
        assert after["moewe_requests_finished_total|length"] == seen["length"]
        assert after["moewe_requests_finished_total|error"] == after["moewe_requests_finished_total|stop"] == 0
        # A client that left before its request was submitted never came in (many, on a busy machine); all others were
        # aborted.
        assert 0 < after["moewe_requests_finished_total|abort"] <= seen["left"]
        assert after["moewe_generation_tokens_total"] >= seen["completion"]
        assert process.num_fds() <= descriptors + 2 and process.num_threads() <= threads + 4
        assert len(server.survivors(within=0.1)) == len(server.children), server.log()
