"""Ten minutes of 32 clients who ask for anything, give up, and are wrong: no error that nobody asked for, no growth.

One more client asks for the same all the time, with a seed, and must always get the same tokens.

    pytest -m soak -n 0 -s tests/e2e/test_soak.py

MOEWE_SOAK_SECONDS sets another length for each topology, MOEWE_SOAK_OUT a folder for the records.
Units: seconds, bytes.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.support.server_process import ServerProcess
from tests.support.soak_requests import SoakClient, SteadyClient
from tests.support.tool_templates import TEMPLATES

SECONDS = float(os.environ.get("MOEWE_SOAK_SECONDS", "600"))
CLIENTS = 32
GAUGES = ("moewe_requests_running", "moewe_requests_waiting", "moewe_rank_requests_running", "moewe_kv_blocks_used",
          "moewe_kv_usage_ratio")  # fmt: skip
HANGING_S = 400.0  # of silence; 80 choices may wait here for 16 places on two busy cores
# Of each process above its second fifth; the first warms everything up. A short run is still warming up then.
MOST_GROWTH = 0.05 if SECONDS >= 300 else 0.15
MOST_GROWTH_BYTES = 64 << 20  # what the C library keeps for later comes and goes by this much
# The soak rests this often: idle ranks give free memory back, and what then grows is a leak.
ROUNDS = 5
REST_S = 4.0
MOST_SLOPE = 1.0  # MiB a minute at rest
# In bf16, where native kernels give a request the same bits whatever else runs; torch alone would not. Small steps and
# a long stall timeout because others may keep the machine busy, where one layer of many rows takes seconds. So little
# KV that all of it is soon in use: pages of a pool take memory when they are first written to, which looks like a leak.
FLAGS = (
    "--kv-cache-memory-bytes", "48MiB", "--max-model-len", "512", "--max-num-seqs", "16", "--dtype", "bfloat16",
    "--max-num-batched-tokens", "256", "--stall-timeout", "60",
)  # fmt: skip

pytestmark = [pytest.mark.soak, pytest.mark.spawn, pytest.mark.timeout(SECONDS + 900)]


async def watch(processes: list[psutil.Process], until: float) -> list[dict[int, int]]:
    """Return the resident bytes of each process, second by second."""
    samples = []
    while asyncio.get_running_loop().time() < until:
        samples.append({process.pid: process.memory_info().rss for process in processes})
        await asyncio.sleep(1.0)
    return samples


async def soak(server: ServerProcess) -> tuple[list[SoakClient], list[dict[int, int]], list[dict[int, int]]]:
    """Run all clients; return them, the one who repeats itself last, the memory meanwhile, and that of each rest."""
    limits = httpx.Limits(max_connections=CLIENTS * 4)
    async with httpx.AsyncClient(base_url=server.url, timeout=HANGING_S, limits=limits) as client:
        clients = [*(SoakClient(number, client) for number in range(CLIENTS)), SteadyClient(CLIENTS, client)]
        processes = [psutil.Process(server.process.pid), *server.children]
        await clients[-1].warm_up()
        await asyncio.gather(*(one.warm_up() for one in clients[:8]))
        samples, rests = [], []
        for _ in range(ROUNDS):
            until = asyncio.get_running_loop().time() + SECONDS / ROUNDS
            *_, more = await asyncio.gather(*(one.run(until) for one in clients), watch(processes, until))
            samples += more
            await asyncio.sleep(REST_S)
            rests.append({process.pid: process.memory_info().rss for process in processes})
    return clients, samples, rests


def growth(samples: list[dict[int, int]]) -> dict[int, tuple[float, float]]:
    """Return, for each process, the median of its second fifth and of its last one."""
    fifth = max(1, len(samples) // 5)
    early, late = samples[fifth : 2 * fifth], samples[-fifth:]
    return {
        pid: (statistics.median(s[pid] for s in early), statistics.median(s[pid] for s in late)) for pid in samples[0]
    }


def slopes(rests: list[dict[int, int]]) -> dict[int, float]:
    """Return, for each process, the slope of a line through its rests but the first, in MiB a minute."""
    minutes = [SECONDS / ROUNDS / 60 * number for number in range(1, ROUNDS)]
    return {
        pid: statistics.linear_regression(minutes, [rest[pid] / 2**20 for rest in rests[1:]]).slope for pid in rests[0]
    }


@pytest.mark.parametrize("topology", ["EP2DP1", "EP2DP2"])
def test_ten_minutes_of_everything(topology: str, tmp_path: Path) -> None:
    template = tmp_path / "hermes.jinja"
    template.write_text(TEMPLATES["hermes"])
    template_flags = ("--chat-template", str(template))
    with ServerProcess("demo", *FLAGS, *template_flags, topology=topology, wait=False) as server:
        server.wait_ready(within=300.0)  # others may be busy
        process = psutil.Process(server.process.pid)
        descriptors = process.num_fds()
        try:
            clients, samples, rests = asyncio.run(soak(server))
        except BaseException:
            print(server.log()[-4000:])
            raise
        server.wait_idle(within=5.0)
        left = {name: server.counters()[name] for name in GAUGES}
        counted, log, fds = server.counters(), server.log(), process.num_fds()
    seen: Counter[str] = sum((client.seen for client in clients), Counter())
    tokens: Counter[str] = sum((client.tokens for client in clients), Counter())
    problems = [problem for client in clients for problem in client.problems]
    memory = growth(samples)
    found = {"seen": seen, "tokens": tokens, "counted": figures(counted), "memory": memory, "slopes": slopes(rests)}
    at_rest = {pid: [round(rest[pid] / 2**20) for rest in rests] for pid in rests[0]}
    record(
        topology,
        {**found, "at_rest": at_rest, "longest": sorted((client.longest for client in clients), reverse=True)[:5]},
    )
    assert not any(left.values()), left
    assert seen["again"] > 0
    assert not problems, (len(problems), problems[:10])
    assert "Traceback" not in log and " ERROR " not in log, log[-4000:]
    assert seen["stop"] > 0 < seen["length"] and seen["left"] > 0
    check_counts(counted, seen, tokens)
    assert fds <= descriptors + 8
    for pid, (early, late) in memory.items():
        if SECONDS >= 300:
            assert found["slopes"][pid] <= MOST_SLOPE, found["slopes"]
        assert late <= early + max(MOST_GROWTH * early, MOST_GROWTH_BYTES), (pid, memory)


def check_counts(counted: dict[str, float], seen: Counter[str], tokens: Counter[str]) -> None:
    """Compare the server's metrics with what its clients saw. Choices that were given up may have ended, or not come
    in at all."""
    ended = {reason: counted[f"moewe_requests_finished_total|{reason}"] for reason in ("stop", "length", "abort")}
    assert counted["moewe_requests_finished_total|error"] == 0
    assert ended["stop"] >= seen["stop"] and ended["length"] >= seen["length"]
    assert ended["stop"] + ended["length"] + ended["abort"] <= seen["stop"] + seen["length"] + seen["left"]
    assert ended["abort"] > 0
    assert counted["moewe_request_errors_total"] == sum(n for name, n in seen.items() if name.startswith("error"))
    for name, kind in (("moewe_generation_tokens_total", "completion"), ("moewe_prompt_tokens_total", "prompt")):
        assert counted[name] >= tokens[kind], name
    assert counted["moewe_generation_tokens_total"] <= tokens["completion"] + tokens["left"]
    assert counted["moewe_unowned_expert_ids_total"] == 0


def figures(counted: dict[str, float]) -> dict[str, float]:
    names = ("requests_finished", "request_errors", "tokens_total", "preemptions", "steps_total")
    return {key: value for key, value in counted.items() if any(name in key for name in names)}


def record(topology: str, found: dict[str, Any]) -> None:
    text = json.dumps({"topology": topology, "seconds": SECONDS, "clients": CLIENTS, **found}, indent=2)
    print(text)
    if folder := os.environ.get("MOEWE_SOAK_OUT"):
        Path(folder, f"soak-{topology}.json").write_text(text + "\n")
