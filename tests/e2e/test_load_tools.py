"""`bench serve` against a real server of the demo, and `bench latency`, `bench throughput` and `run-batch` with it.

Not a measurement: figures are counted, never held against a time.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.server_process import NAME, ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.spawn, pytest.mark.timeout(900)]
SMALL = ("--num-prompts", "4", "--random-input-len", "12", "--random-output-len", "5")


class WithKey(ServerProcess):
    """A server process that is asked with its key."""

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, headers={"authorization": "Bearer hush"}, timeout=20, verify=False)

    def count(self) -> float:
        """Return how many requests have ended well."""
        return self.counters().get("moewe_request_duration_seconds_count", 0.0)


def moewe(*words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENAI_API_KEY": "hush"}
    done = subprocess.run(
        [sys.executable, "-m", "moewe", *words],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        timeout=400,
    )
    assert done.returncode == code, done.stderr
    return done


def record(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    assert content["results"]["failed"] == 0, content["results"]
    return content


def test_bench_serve_counts_what_the_server_counts(tmp_path: Path) -> None:
    with WithKey("demo", "--api-key", "hush") as server:
        out = tmp_path / "completions.json"
        shown = moewe("bench", "serve", "--base-url", server.url, *SMALL, "--ignore-eos", "--output-json", str(out))
        content = record(out)
        results = content["results"]
        assert (results["completed"], results["total_input_tokens"], results["total_output_tokens"]) == (4, 48, 20)
        assert results["preemptions"] == 0 and results["weight_bytes"] > 0 and results["peak_kv_usage"] >= 0
        assert results["peak_memory_bytes"] > results["weight_bytes"]
        assert content["server"]["topology"]["topology"].startswith("EP2DP1") and content["settings"]["model"] == NAME
        assert "hush" not in shown.stdout + shown.stderr + out.read_text()

        trace = tmp_path / "trace.jsonl"
        trace.write_text("".join(
            json.dumps({"timestamp": 100 * n, "input_length": 40, "output_length": 3, "hash_ids": [1, n]}) + "\n"
            for n in range(3)
        ))  # fmt: skip
        out = tmp_path / "chat.json"
        moewe("bench", "serve", "--base-url", server.url, "--endpoint", "chat", "--dataset-name", "trace",
              "--dataset-path", str(trace), "--trace-block-size", "32", "--tokenizer", "demo",
              "--output-json", str(out))  # fmt: skip
        assert record(out)["results"]["completed"] == 3

        command = [sys.executable, "-m", "moewe", "bench", "serve", "--base-url", server.url, "--api-key", "hush",
                   "--num-prompts", "500", "--max-concurrency", "2", "--random-input-len", "4",
                   "--random-output-len", "2"]  # fmt: skip
        before = server.count()
        running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        while server.count() < before + 4:
            assert running.poll() is None
            time.sleep(0.2)
        running.send_signal(signal.SIGINT)
        text, errors = running.communicate(timeout=60)
        assert running.returncode == 130 and "requests completed" in text and "interrupted" in errors


def test_offline_tools_and_batches(tmp_path: Path) -> None:
    out = tmp_path / "l.json"
    common = ("demo", "--threads", "1")
    moewe("bench", "latency", *common, "--topology", "EP2DP1", "--input-len", "8", "--output-len", "3",
          "--batch-size", "2", "--num-iters", "2", "--num-iters-warmup", "1", "--output-json", str(out))  # fmt: skip
    results = record(out)["results"]
    assert (results["batches"], results["completed"], results["total_output_tokens"]) == (2, 4, 12)
    assert results["peak_memory_bytes"] > 1 << 28  # the weights alone are larger
    assert results["preemptions"] == 0
    moewe("bench", "throughput", *common, "--num-prompts", "3", "--input-len", "8", "--output-len", "3",
          "--output-json", str(out))  # fmt: skip
    assert record(out)["results"]["total_output_tokens"] == 9

    lines = [
        {"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions",
         "body": {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}},
        {"custom_id": "bad", "method": "POST", "url": "/v1/completions",
         "body": {"model": "demo", "max_tokens": 0, "prompt": "x"}},
    ] + [
        {"custom_id": str(n), "method": "POST", "url": "/v1/completions",
         "body": {"model": "demo", "prompt": "The sea", "max_tokens": 2, "temperature": 0}} for n in range(5)
    ]  # fmt: skip
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("not json\n" + "".join(json.dumps(line) + "\n" for line in lines))
    shown = moewe("run-batch", "-i", str(source), "-o", str(target), *common)
    answers = [json.loads(line) for line in target.read_text().splitlines()]
    assert len(answers) == 8 and "6 of 8 requests succeeded, 2 failed" in shown.stderr
    by_id = {answer["custom_id"]: answer for answer in answers}
    assert by_id[None]["error"]["code"] == "invalid_json_line"
    assert by_id["bad"]["response"]["status_code"] == 400
    assert by_id["chat"]["response"]["body"]["choices"][0]["message"]["content"]
    assert len({by_id[str(n)]["response"]["body"]["choices"][0]["text"] for n in range(5)}) == 1
