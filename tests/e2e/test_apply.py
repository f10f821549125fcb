"""A real server changes its layout while clients ask: every answer is the one it was, and no old process is left."""

from __future__ import annotations

import itertools
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from moewe.runtime.config import CacheOptions, EngineConfig, ModelOptions, ParallelOptions
from moewe.runtime.resolve import resolve
from moewe.server.advise.apply import ChangeFailedError, apply
from moewe.server.advise.command import advise
from moewe.topologies.advisor.trace import read_trace
from moewe.topologies.hardware import host_memory_bytes
from tests.support.fixtures import checkpoint, random_prompt
from tests.support.server_process import NAME, ServerProcess

pytestmark = [pytest.mark.spawn, pytest.mark.slow, pytest.mark.timeout(600)]

PROMPTS = [random_prompt(length, seed=length) for length in (5, 19, 33)]
KV_BYTES, MODEL_LEN, TOKENS = 1 << 20, 256, 24
FLAGS = ("--skip-tokenizer-init", "--dtype", "float32", "--allow-apply")


class Clients:
    """Four clients that ask one after another, half of them for streams, and hold what comes against the first answer.

    Attributes:
        answered: how many answers have come.
        wrong: what was lost or differs.
    """

    def __init__(self, server: ServerProcess) -> None:
        self._client = server.client(timeout=240)
        self._expected = [self._whole(number) for number in range(len(PROMPTS))]
        self._done = threading.Event()
        self.answered, self.wrong = 0, list[str]()

    def _whole(self, number: int) -> list[int]:
        answer = self._client.completions.create(
            model=NAME, prompt=PROMPTS[number % len(PROMPTS)], max_tokens=TOKENS, temperature=0,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )  # fmt: skip
        return list(answer.choices[0].token_ids)  # type: ignore[attr-defined]

    def _stream(self, number: int) -> list[int]:
        chunks = self._client.completions.create(
            model=NAME, prompt=PROMPTS[number % len(PROMPTS)], max_tokens=TOKENS, temperature=0, stream=True,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )  # fmt: skip
        return [token for chunk in chunks for token in getattr(chunk.choices[0], "token_ids", None) or ()]

    def _keep_asking(self, ask: Callable[[int], list[int]], first: int) -> None:
        for number in itertools.count(first):
            if self._done.is_set():
                return
            try:
                found = ask(number)
            except Exception as error:
                self.wrong.append(f"{number}: {error}")
                return
            if found != self._expected[number % len(PROMPTS)]:
                self.wrong.append(f"{number}: {found}")
            self.answered += 1

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Let them ask meanwhile; then everything that was asked must have been answered as before."""
        asks = (self._whole, self._stream, self._whole, self._stream)
        threads = [threading.Thread(target=self._keep_asking, args=pair) for pair in zip(asks, range(4), strict=True)]
        before = self.answered
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._done.set()
            for thread in threads:
                thread.join()
            self._done.clear()
        assert not self.wrong and self.answered > before + len(threads)


def test_clients_do_not_notice_a_change_of_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "advice.jsonl"
    flags = (*FLAGS, "--advice-log", str(log), "--advice-interval", "1")
    with ServerProcess(checkpoint("T-QW3"), *flags, topology="EP2DP1") as server:
        with Clients(server).asking():
            assert apply({"url": (server.url,), "topology": "EP1DP2"}) == 0
            time.sleep(3)  # windows of the new layout
        assert "from EP2DP1 to EP1DP2, beside\nEP1DP2 runs after" in capsys.readouterr().out.replace(server.url, "")
        assert not server.survivors(within=10), "ranks of the old layout are gone"
        check_runs(server, "EP1DP2")
        assert server.get("/v1/topology/advice").json()["topology"].startswith("EP1DP2")
    records = [type(line).__name__ for _, line in read_trace(log)]
    assert records[0] == "FactsLine" and records.count("FactsLine") == 2 and records.count("AppliedLine") == 1
    assert advise({"trace": str(log)}) == 0


def test_replicas_change_places_in_turns_while_clients_ask(capsys: pytest.CaptureFixture[str]) -> None:
    """Memory for one layout and a quarter: to more ranks, to as many, back after a loss, and Ctrl-C in the middle."""
    share = 1.25 * bytes_of("EP2DP2") / host_memory_bytes()
    flags = (*FLAGS, "--gpu-memory-utilization", f"{share:.6f}", "--kv-cache-memory-bytes", str(KV_BYTES),
             "--max-model-len", str(MODEL_LEN))  # fmt: skip
    with ServerProcess(checkpoint("T-QW3"), *flags, topology="EP1DP2") as server:
        clients = Clients(server)

        with clients.asking():
            killer = threading.Thread(target=kill_what_begins_in_turn, args=(server, 2))
            killer.start()
            with pytest.raises(ChangeFailedError, match=r"EP1DP2 goes on: replica 1: the engine is lost"):
                apply({"url": (server.url,), "topology": "EP2DP2"})
            killer.join()
        check_runs(server, "EP1DP2")
        assert server.counters()["moewe_topology_changes_total"] == 1

        for before, after in (("EP1DP2", "EP2DP2"), ("EP2DP2", "EP1DP4")):
            old = psutil.Process(server.process.pid).children(recursive=True)
            with clients.asking():
                assert apply({"url": (server.url,), "topology": after}) == 0
            assert f"from {before} to {after}, in turns\n{after} runs after" in capsys.readouterr().out
            assert not psutil.wait_procs(old, timeout=10)[1], "engines and ranks of the old layout are gone"
            check_runs(server, after)

        httpx.post(f"{server.url}/v1/topology/apply?topology=EP2DP2").raise_for_status()
        begin = {child.pid for child in psutil.Process(server.process.pid).children()}
        while begin >= {child.pid for child in psutil.Process(server.process.pid).children()}:
            time.sleep(0.05)
        children = psutil.Process(server.process.pid).children(recursive=True)
        server.signal(signal.SIGINT)
        assert server.exit_code(30) == 130
        assert not psutil.wait_procs(children, timeout=10)[1]
        assert "Traceback" not in server.log()


def bytes_of(topology: str) -> int:
    """Return what all ranks of a layout take by their budget."""
    model = ModelOptions(model=NAME, path=str(checkpoint("T-QW3")), max_model_len=MODEL_LEN, dtype="float32")
    cache = CacheOptions(kv_cache_memory_bytes=KV_BYTES)
    resolved = resolve(EngineConfig(model=model, cache=cache, parallel=ParallelOptions(topology=topology, threads=1)))
    return resolved.budget.total * resolved.topology.num_ranks


def kill_what_begins_in_turn(server: ServerProcess, turn: int) -> None:
    """Kill the first engine that a change starts in a turn."""
    known: set[int] = set()
    while True:
        change = server.get("/v1/topology/apply").json()["change"]
        engines = psutil.Process(server.process.pid).children()
        if change is not None and change["turn"] == turn:
            if begun := [engine for engine in engines if engine.pid not in known]:
                assert change["state"] == "running" and change["seconds"] > 0
                begun[0].kill()
                return
        else:
            known |= {engine.pid for engine in engines}
        time.sleep(0.02)


def check_runs(server: ServerProcess, topology: str) -> None:
    """Every rank of the layout lives, and no request has failed."""
    view = server.get("/v1/topology").json()
    assert view["topology"].startswith(topology) and len(view["replicas"]) == view["dp"]
    assert all(psutil.pid_exists(rank["pid"]) for replica in view["replicas"] for rank in replica["ranks"])
    assert server.counters()["moewe_requests_finished_total|error"] == 0
