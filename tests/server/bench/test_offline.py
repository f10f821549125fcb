"""`bench latency` and `bench throughput` over a scripted session."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moewe.runtime.messages import Delta
from moewe.runtime.params import SamplingParams
from moewe.server.bench import offline
from moewe.server.flags.values import Settings


class FakeSession:
    """Gives every prompt as many tokens as asked, two at a time; prompt number `fails` ends with an error."""

    tokenizer = None
    max_model_len = 4096

    def __init__(self, fails: int | None = None, interrupt_after: int | None = None) -> None:
        config = SimpleNamespace(
            parallel=SimpleNamespace(device="cpu"),
            schedule=SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=64),
        )
        self.resolved = SimpleNamespace(
            config=config,
            model=SimpleNamespace(vocab_size=500, dtype="float32"),
            topology=SimpleNamespace(long=lambda: "EP1DP1[adp=1,atp=1,red=0]"),
        )
        self.calls: list[tuple[list[Sequence[int]], list[SamplingParams]]] = []
        self.fails = fails
        self.interrupt_after = interrupt_after
        self.preemptions = 0

    def num_preemptions(self) -> int:
        return self.preemptions

    def stream(self, prompts: Any, params: Any) -> Iterator[tuple[int, Delta]]:
        self.calls.append((list(prompts), list(params)))
        self.preemptions += 2
        for index, own in enumerate(params):
            if index == self.interrupt_after:
                raise KeyboardInterrupt
            left = own.max_tokens
            while left:
                count = min(2, left)
                left -= count
                reason = None if left else ("error" if index == self.fails else "length")
                yield index, Delta(request_id="x", token_ids=(1,) * count, text="", finish_reason=reason,
                                   error="not finite" if reason == "error" else None)  # fmt: skip


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    def go(command: Any, session: FakeSession, **tool: Any) -> tuple[int, dict[str, Any]]:
        monkeypatch.setattr(offline, "start", lambda settings: nullcontext(session))
        record = tmp_path / "r.json"
        settings = Settings(engine={"model": "m", "seed": 3}, http={}, sample={}, shared={},
                            tool={**tool, "output_json": str(record)})  # fmt: skip
        code = command(settings)
        return code, json.loads(record.read_text())

    return go


def test_latency_measures_batches_after_warm_ups(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    session = FakeSession()
    code, content = run(offline.bench_latency, session, num_iters=3, num_iters_warmup=2, batch_size=4,
                        random_input_len=6, random_output_len=5)  # fmt: skip
    results = content["results"]
    assert code == 0 and len(session.calls) == 5
    assert all(len(prompt) == 6 for prompts, _ in session.calls for prompt in prompts)
    assert all(
        own.max_tokens == 5 and own.ignore_eos and own.temperature == 0 for _, params in session.calls for own in params
    )
    assert (results["batches"], results["completed"], results["total_output_tokens"]) == (3, 12, 60)
    assert results["preemptions"] == 3 * 2, "those of the warm-ups do not count"
    assert results["total_input_tokens"] == 72 and results["max_concurrent_requests"] == 4
    assert results["tokens_per_piece"] == pytest.approx(5 / 3) and results["peak_memory_bytes"] > 1 << 20
    assert {"mean_batch_ms", "p99_batch_ms", "median_ttft_ms", "p95_tpot_ms", "mean_itl_ms"} <= set(results)
    assert content["server"]["topology"].startswith("EP1DP1") and content["settings"]["model"] == "m"
    assert "peak memory, all processes" in capsys.readouterr().out


def test_throughput_runs_all_at_once_and_counts_failures(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    session = FakeSession(fails=2)
    code, content = run(offline.bench_throughput, session, num_prompts=5, random_input_len=6, random_output_len=4)
    results = content["results"]
    assert code == 0 and len(session.calls) == 1 and len(session.calls[0][0]) == 5
    assert (results["completed"], results["failed"], results["errors"]) == (4, 1, {"not finite": 1})
    assert (results["total_input_tokens"], results["total_output_tokens"], results["preemptions"]) == (24, 16, 2)
    assert "1 failed: not finite" in capsys.readouterr().out


def test_the_seed_of_the_model_fixes_the_prompts(run: Any) -> None:
    sessions = [FakeSession(), FakeSession()]
    for session in sessions:
        run(offline.bench_throughput, session, num_prompts=3, random_input_len=6, random_output_len=1)
    assert sessions[0].calls[0][0] == sessions[1].calls[0][0]


def test_an_interruption_shows_what_had_ended(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    code, content = run(offline.bench_throughput, FakeSession(interrupt_after=2), num_prompts=5, random_input_len=6,
                        random_output_len=4)  # fmt: skip
    assert code == 130 and content["results"]["completed"] == 2
    assert "interrupted" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["num_iters", "batch_size"])
def test_nothing_to_measure_is_refused(run: Any, name: str) -> None:
    with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} 0"):
        run(offline.bench_latency, FakeSession(), **{name: 0})
