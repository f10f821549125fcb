"""`moewe bench serve` from the command line to table, JSON and picture, against a scripted server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from moewe.server.bench.online import measure, prepare
from moewe.server.bench.scrape import Peaks, Samples
from moewe.server.cli import main as cli
from tests.support.fake_openai import FakeOpenAI, answer, serving

MODELS = json.dumps({"object": "list", "data": [{"id": "gull", "max_model_len": 64, "owned_by": "moewe"}]})
TOPOLOGY = json.dumps({"topology": "EP2DP1[adp=2,atp=1,red=0]", "num_ranks": 2, "replicas": [1, 2, 3]})
METRICS = """# TYPE moewe_preemptions_total counter
moewe_preemptions_total{replica="0"} 3.0
moewe_preemptions_total{replica="1"} 4.0
# TYPE moewe_kv_usage_ratio gauge
moewe_kv_usage_ratio{rank="0"} 0.25
moewe_kv_usage_ratio{rank="1"} 0.5
"""
ROUTES = {"/v1/models": MODELS, "/version": '{"version": "9"}', "/v1/topology": TOPOLOGY, "/metrics": METRICS}
SMALL = ("--random-input-len", "4", "--random-output-len", "3")


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Iterator[Callable[..., tuple[int, str, str]]]:
    """Run the command against a scripted server that lives in a thread of its own."""
    before = signal.getsignal(signal.SIGINT)

    def go(fake: FakeOpenAI, *words: str) -> tuple[int, str, str]:
        ready, loop = threading.Event(), asyncio.new_event_loop()

        async def live() -> None:
            async with serving(fake):
                ready.set()
                await end.wait()

        end = asyncio.Event()
        thread = threading.Thread(target=loop.run_until_complete, args=(live(),))
        thread.start()
        ready.wait()
        try:
            with pytest.raises(SystemExit) as left:
                cli.main(["bench", "serve", "--base-url", fake.url, *words])
        finally:
            loop.call_soon_threadsafe(end.set)
            thread.join()
            loop.close()
        out, err = capfd.readouterr()
        assert isinstance(left.value.code, int)
        return left.value.code, out, err

    yield go
    signal.signal(signal.SIGINT, before)


def test_table_json_and_picture(run: Any, tmp_path: Path) -> None:
    fake = FakeOpenAI(routes=ROUTES)
    record, picture = tmp_path / "r.json", tmp_path / "p.png"
    code, out, err = run(
        fake, *SMALL, "--num-prompts", "6", "--num-warmups", "2", "--api-key", "hush-hush", "--header", "X-Secret=psst",
        "--goodput", "ttft:60000", "tpot:60000", "--output-json", str(record), "--plot", str(picture), "--seed", "5",
    )  # fmt: skip
    assert (code, err) == (0, "")
    assert len(fake.bodies) == 8 and all(body["model"] == "gull" for body in fake.bodies)
    assert all(headers["authorization"] == "Bearer hush-hush" for headers in fake.headers)
    content = json.loads(record.read_text())
    results, settings = content["results"], content["settings"]
    assert (results["completed"], results["failed"], results["total_output_tokens"]) == (6, 0, 18)
    assert results["preemptions"] == 0 and results["peak_kv_usage"] == 0.5
    assert results["request_goodput"] == results["request_throughput"] > 0
    assert {
        f"{point}_{name}_ms" for point in ("mean", "median", "p95", "p99") for name in ("ttft", "tpot", "itl", "e2el")
    } <= set(results)
    assert settings["goodput_ms"] == {"ttft": 60000, "tpot": 60000} and settings["request_rate"] == "inf"
    assert settings["headers"] == ["X-Secret"] and settings["seed"] == 5
    server = content["server"]
    assert (server["version"], server["topology"]["num_ranks"]) == ("9", 2) and "replicas" not in server["topology"]
    for text in (out, record.read_text()):
        assert "hush" not in text and "psst" not in text
    assert "time to first token" in out and "requests completed" in out and "p99" in out
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_server_with_nothing_but_completions(run: Any, tmp_path: Path) -> None:
    record = tmp_path / "r.json"
    code, out, _ = run(FakeOpenAI(stream=answer("a", "b")), *SMALL, "--model", "m", "--num-prompts", "2",
                       "--output-json", str(record))  # fmt: skip
    content = json.loads(record.read_text())
    assert code == 0 and content["server"] == {} and "preemptions" not in content["results"]
    assert "did not count tokens" in out


def test_a_warm_up_that_fails_ends_the_run_with_the_servers_words(run: Any) -> None:
    fake = FakeOpenAI(status=401, stream=[b'{"error": {"message": "wrong key"}}'])
    code, out, err = run(fake, "--model", "m", "--api-key", "hush")
    assert code == 1 and out == "" and len(fake.bodies) == 1
    assert "HTTP 401: wrong key" in err and "hush" not in err and len(err.splitlines()) == 1


def test_failures_are_counted_by_reason_and_no_success_is_exit_code_one(run: Any) -> None:
    fake = FakeOpenAI(status=503, stream=[b'{"error": {"message": "busy"}}'])
    code, out, _ = run(fake, *SMALL, "--model", "m", "--num-prompts", "3", "--num-warmups", "0")
    assert code == 1 and "3 failed: HTTP 503: busy" in out


def test_no_model_is_said(run: Any) -> None:
    code, _, err = run(FakeOpenAI(), *SMALL)
    assert code == 1 and "--model" in err


def test_concurrency_is_held(run: Any) -> None:
    fake = FakeOpenAI(routes=ROUTES)
    assert run(fake, *SMALL, "--num-prompts", "9", "--max-concurrency", "2")[0] == 0
    assert fake.most <= 2 and len(fake.bodies) == 10


def test_ctrl_c_shows_what_was_measured() -> None:
    async def go() -> Any:
        fake = FakeOpenAI(ends=1)
        async with serving(fake):
            tool = {"base_url": fake.url, "model": "m", "num_warmups": 0, "num_prompts": 3, "max_concurrency": 1,
                    "random_input_len": 2, "random_output_len": 3}  # fmt: skip
            job = asyncio.ensure_future(measure(prepare(tool, {}), Console(quiet=True)))
            while len(fake.bodies) < 2:
                await asyncio.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)
            return await job

    load, figures, _ = asyncio.run(go())
    assert load.stopped and figures["interrupted"] and (figures["completed"], figures["failed"]) == (1, 0)


@pytest.mark.parametrize(
    ("tool", "says"),
    [
        ({"max_concurrency": 0}, "--max-concurrency 0"),
        ({"num_warmups": -1}, "--num-warmups -1"),
        ({"seed": -1}, "--seed -1"),
        ({"timeout": 0.0}, "--timeout 0"),
        ({"temperature": -1.0}, "--temperature -1"),
        ({"request_rate": 0.0}, "--request-rate 0"),
        ({"endpoint": "chat", "prompt_form": "ids"}, "--prompt-form 'ids'"),
        ({"vocab_size": 5}, "--vocab-size 5"),
        ({"dataset_name": "trace", "dataset_path": "x", "request_rate": 2.0}, "its own times"),
        ({"tokenizer": "./nowhere/at/all"}, "nowhere"),
    ],
)
def test_mistakes_are_known_before_anything_is_sent(tool: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        prepare(tool, {})


def test_peaks_keep_the_greatest_and_preemptions_count_from_the_first_scrape() -> None:
    peaks = Peaks()
    for preempted, usage in ((3, 0.5), (5, 0.9), (4, 0.1)):
        peaks.add(Samples(f"vllm:num_preemptions_total {preempted}\nvllm:kv_cache_usage_perc {usage}\n"))
    assert peaks.figures() == {"preemptions": 2.0, "peak_kv_usage": 0.9}
    assert Peaks().figures() == {}
