"""How a real server ends: drained, forced, interrupted, or because a rank was lost; and that nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator

import httpx
import openai
import psutil
import pytest

from tests.support.chain import chain
from tests.support.server_process import NAME, ServerProcess

pytestmark = [pytest.mark.spawn, pytest.mark.slow]

ASKED = {"model": NAME, "prompt": "x", "temperature": 0, "stream": True}


@contextlib.contextmanager
def serving(*flags: str, topology: str = "EP2DP1") -> Iterator[ServerProcess]:
    model = chain(["a", "b", "c"], loop=True).path
    with ServerProcess(model, "--kv-cache-memory-bytes", "64MiB", *flags, topology=topology) as server:
        yield server


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return probe.bind(("127.0.0.1", port)) is None


def test_sigterm_lets_a_stream_finish_and_takes_no_more() -> None:
    with serving() as server:
        tokens, refused = 0, 0
        for chunk in server.client().completions.create(**ASKED, max_tokens=200):
            tokens += len(chunk.choices[0].text)
            if tokens == 20:
                server.signal(signal.SIGTERM)
                time.sleep(0.2)
                assert server.status("/ready") == 503
                with contextlib.suppress(openai.APIStatusError):
                    server.client().completions.create(model=NAME, prompt="x")
                refused = httpx.post(f"{server.url}/v1/completions", json={"model": NAME, "prompt": "x"}).status_code
        assert (tokens, refused, chunk.choices[0].finish_reason) == (200, 503, "length")
        assert server.exit_code(timeout=5) == 0, server.log()
        assert not server.survivors() and is_free(server.port)


@pytest.mark.parametrize("again", [True, False], ids=["told again", "time is up"])
def test_end_by_force_is_told_to_the_client(again: bool) -> None:
    with serving("--shutdown-timeout", "30" if again else "1", topology="EP2DP1" if again else "EP1DP1") as server:
        stream = iter(server.client().completions.create(**ASKED, max_tokens=4000))
        next(stream)
        server.signal(signal.SIGTERM)
        if again:
            time.sleep(0.3)
            server.signal(signal.SIGTERM)
        with pytest.raises(openai.APIError, match="shut down"):
            for _ in stream:
                pass
        assert server.exit_code(timeout=8) == 1, server.log()
        assert not server.survivors()


def test_interrupt_ends_at_once() -> None:
    with serving() as server:
        stream = iter(server.client().completions.create(**ASKED, max_tokens=4000))
        next(stream)
        server.signal(signal.SIGINT)
        assert server.exit_code(timeout=5) == 130, server.log()
        assert not server.survivors()


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_killed_rank_is_named_and_ends_the_server(busy: bool) -> None:  # busy: P-API-12
    lost, topology = (2, "EP4DP1") if busy else (1, "EP2DP1")
    with serving(topology=topology) as server:
        ranks = server.get("/v1/topology").json()["replicas"][0]["ranks"]
        stream = iter(server.client().completions.create(**ASKED, max_tokens=4000)) if busy else iter(())
        seen = [next(stream) for _ in range(5)] if busy else []
        os.kill(ranks[lost]["pid"], signal.SIGKILL)
        killed = time.monotonic()
        if busy:
            with pytest.raises(openai.APIError, match=f"rank {lost}"):
                seen.extend(stream)
            assert all(chunk.choices[0].finish_reason is None for chunk in seen)
        status = 200
        while status == 200 and time.monotonic() - killed < 10:
            status = server.status("/health")
            time.sleep(0.05)
        assert status == 503
        assert server.exit_code(timeout=10) == 3, server.log()
        assert f"rank {lost}" in server.log() and not server.survivors()


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_stopped_rank_is_named_and_ends_the_server(busy: bool) -> None:
    """A rank that stands still holds all others; at the default patience everything is over within ten seconds."""
    with serving() as server:
        ranks = server.get("/v1/topology").json()["replicas"][0]["ranks"]
        stream = iter(server.client().completions.create(**ASKED, max_tokens=4000)) if busy else iter(())
        if busy:
            next(stream)
        os.kill(ranks[1]["pid"], signal.SIGSTOP)
        stopped = time.monotonic()
        status = 200
        while status == 200:
            assert time.monotonic() - stopped < 10
            status = server.status("/health")
            time.sleep(0.05)
        assert status == 503
        if busy:
            with pytest.raises(openai.APIError, match="rank 1"):
                list(stream)
        assert server.exit_code(timeout=max(0.1, stopped + 10 - time.monotonic())) == 3, server.log()
        assert "rank 1" in server.log() and not server.survivors()


def test_killed_server_leaves_no_rank() -> None:
    with serving() as server:
        server.signal(signal.SIGKILL)
        server.exit_code(timeout=5)
        assert server.children and not server.survivors(within=5.0)


def test_sigterm_while_loading_ends_the_start() -> None:
    with ServerProcess(chain(["a"]).path, wait=False) as server:
        while server.status("/health") != 200:
            assert server.process.poll() is None, server.log()
            time.sleep(0.02)
        assert server.status("/ready") == 503
        server.signal(signal.SIGTERM)
        assert server.exit_code(timeout=10) == 0, server.log()
        assert "stopping: still loading" in server.log() and "may finish" not in server.log()


@pytest.mark.parametrize("after", [0.5, 1.5, 3.0])
def test_interrupt_while_loading_ends_at_once(after: float) -> None:
    """Twice at once, as impatient people do; importing, spawning or loading, there is nothing to save."""
    with ServerProcess(chain(["a"]).path, wait=False) as server:
        time.sleep(after)
        children = psutil.Process(server.process.pid).children(recursive=True)
        server.signal(signal.SIGINT)
        server.signal(signal.SIGINT)
        assert server.exit_code(timeout=2) == 130, server.log()
        server.children = children
        assert not server.survivors()
        log = server.log()
        assert (
            "Traceback" not in log and log.count("interrupted") + log.count("stopping") == 1 and "cache_hits" not in log
        )
