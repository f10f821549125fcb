"""benchmarks/gpu_check.py on a GPU that is not there: everything but the GPU runs, with torch's own signatures."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch

from benchmarks import gpu_check, gpu_check_device, gpu_check_linear, gpu_check_rows
from benchmarks import gpu_check_speed as speed
from benchmarks import gpu_check_steps as steps
from benchmarks.gpu_check_inputs import Place, shrunk
from benchmarks.gpu_check_plan import LeftOut, Record
from benchmarks.gpu_check_stages import Run, speed_stage, steps_stage
from moewe.models.published import published_config
from moewe.native.gpu import TARGETS
from moewe.native.gpu_counters import GpmCounter, open_counters
from moewe.topologies.kernel_work import Work
from tests.support.fake_cuda import fake_cuda

META = Place(device=torch.device("meta"))
# Of deepseek attention alone.
FORMATS = {"qwen3-30b-a3b": ("bf16", "fp8 128x128"), "deepseek-v3": (), "gpt-oss-120b": ("mxfp4",)}


def run_of(stage: str, out: Path, *, keep_errors: bool = False) -> Run:
    until = time.monotonic() + 300.0
    return Run(
        argparse.Namespace(stage=stage, out=out, seconds=300.0, until=until, keep_errors=keep_errors, layers=None)
    )


def small_speeds(patch: pytest.MonkeyPatch) -> None:
    for module in (speed, gpu_check_rows, gpu_check_linear):
        patch.setattr(module, "published_config", lambda model: shrunk(published_config(model)))
    patch.setattr(speed, "MODELS", FORMATS)
    for module, name, value in (
        (gpu_check_device, "_COPIED", 1 << 12), (gpu_check_device, "_SIDE", 16), (gpu_check_device, "_REPLAYS", 1),
        (speed, "repeats_for", lambda floor: 1), (speed, "_MOST_COLD", 1), (speed, "held_experts", speed._Held()),
        (speed, "_TOKENS", (2,)), (speed, "_INVARIANT_TOKENS", (2,)), (speed, "_COLD_BYTES", 1 << 15),
        (speed, "_DECODES", ((2, 20),)), (speed, "_PREFILLS", ((0, 10),)), (gpu_check_rows, "_TOKENS", (2,)),
        (gpu_check_rows, "_ROWS", (1,)), (gpu_check_linear, "_TOKENS", (2,)),
    ):  # fmt: skip
        patch.setattr(module, name, value)


@pytest.mark.slow
def test_everything_that_is_timed_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small_speeds(monkeypatch)
    monkeypatch.setattr(gpu_check_device, "interpreting", lambda: False)
    compiled: Callable[..., None] = create_autospec(gpu_check_device.compile_ahead)
    monkeypatch.setattr(gpu_check_device, "compile_ahead", compiled)
    with fake_cuda(monkeypatch):
        speed_stage(run_of("speed", tmp_path))
    compiled.assert_called_once()  # type: ignore[attr-defined]
    record = Record.read(tmp_path / "speed.json")
    assert record is not None and record.key["card"] == "fake"
    wrong = {name: one for name, one in record.results.items() if "error" in one or "torch_error" in one}
    assert not wrong and not record.left_out and record.finished
    with_torch = [name for name, one in record.results.items() if "torch_us" in one]
    assert any("experts" in name for name in with_torch) and any("decode" in name for name in with_torch)
    record.results["experts bf16, broken"] = {"us": 1.0, "torch_error": "RuntimeError: no"}
    del record.results["experts bf16, qwen3-30b-a3b, 2 tokens"]
    record.write()
    with fake_cuda(monkeypatch):
        speed_stage(run_of("speed", tmp_path, keep_errors=True))
    record = Record.read(tmp_path / "speed.json")
    assert record is not None and "torch_us" not in record.results["experts bf16, qwen3-30b-a3b, 2 tokens"]
    compiled.assert_called_once()  # type: ignore[attr-defined]
    gpu_check.printed("speed", record)
    printed = capsys.readouterr().out.splitlines()
    assert set(record.results) <= {line.split("  ")[0] for line in printed}
    assert any(line.startswith("batch invariance, experts fp8") for line in printed)


def test_what_does_not_fit_and_what_torch_cannot_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def one(**others: Any) -> Any:
        return speed.Speed(name="a", rank=0, work=Work(bytes=1e9), build=lambda *_: [[]], **others)

    def refuses() -> None:
        raise RuntimeError("needs sm_90")

    reached = {"copy_bytes_per_second": 1e12, "matrix_flops_per_second": 1e12}
    monkeypatch.setattr(gpu_check_device, "_failed_captures", [])
    with fake_cuda(monkeypatch):
        with pytest.raises(LeftOut, match="inputs of 99 GB do not fit"):
            one(input_bytes=99e9).run(META, TARGETS[90], reached)
        figures = one(baseline=lambda place, number: [refuses]).run(META, TARGETS[90], reached)
        assert gpu_check_device.is_sound()
        calls = iter([None])
        broken = one(baseline=lambda place, number: [lambda: next(calls)]).run(META, TARGETS[90], reached)
        assert broken["torch_error"].startswith("StopIteration") and not gpu_check_device.is_sound()  # while captured
    assert figures["torch_error"] == "RuntimeError: needs sm_90" and figures["us"] == 1000.0


def test_other_tokens_are_an_error() -> None:
    answers = [[1, 2, 3], [4, 5, 6]]
    assert steps.same_answers(answers, [[1, 2, 3], [4, 5, 6]], "alone") == {"said": "the same tokens as alone"}
    for other in ([4, 9, 6], [4]):
        with pytest.raises(AssertionError, match="prompt 1: token 1 is another than alone"):
            steps.same_answers(answers, [[1, 2, 3], other], "alone")


def test_without_a_counter_there_is_no_saturation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        steps, "open_counters", create_autospec(open_counters, return_value=SimpleNamespace(memory=None))
    )
    figures = steps.saturation_figures(None, steps.parsed(steps.raw_config()), 2, {}, "GPU-1")  # type: ignore[arg-type]
    assert figures["said"].startswith("no GPM counter")


@pytest.mark.slow
@pytest.mark.spawn
def test_whole_steps_are_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By an engine on the CPU; its counters beside those of a GPU."""
    small = {
        "num_hidden_layers": 2, "hidden_size": 64, "num_experts": 8, "num_experts_per_tok": 2, "vocab_size": 500,
        "moe_intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    }  # fmt: skip
    counter = create_autospec(GpmCounter, instance=True)
    counter.take.side_effect = [0.0, 1e9]
    opened = create_autospec(open_counters, return_value=SimpleNamespace(memory=counter))
    modes: dict[str, dict[str, Any]] = {
        "graphs": steps.MODES["graphs"], "eager": steps.MODES["eager"], "none": {"no_field": 1},
        "batch-invariant": steps.MODES["batch-invariant"],
    }  # fmt: skip
    for module, name, value in (
        (steps, "MODES", modes), (steps, "BATCHES", (2,)), (steps, "CONTEXT", 64), (steps, "PROMPT", 64),
        (steps, "_SHORT", 4), (steps, "_LONG", 24), (steps, "open_counters", opened),
        (steps, "captures", lambda _: True),
        (steps, "options_for_gpu", lambda: {"max_model_len": 256, "kv_cache_memory_bytes": 4 << 20}),
        (gpu_check_device, "_COPIED", 1 << 12), (gpu_check_device, "_SIDE", 16),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)
    raw = steps.raw_config() | small
    monkeypatch.setattr(steps, "raw_config", lambda layers: raw)
    monkeypatch.setattr(gpu_check_device, "compile_ahead", create_autospec(gpu_check_device.compile_ahead))
    with fake_cuda(monkeypatch):
        steps_stage(run_of("steps", tmp_path))
    record = Record.read(tmp_path / "steps.json")
    assert record is not None and not record.finished
    # A CPU has no such engine: one start fails, and no other is tried.
    failed = [name for name, one in record.results.items() if "error" in one]
    assert failed == ["decode, batch-invariant, batch 2"], record.results
    why = {name.split(", ")[1]: text.split(":")[0] for name, text in record.left_out.items()}
    assert why == {"none": "this version has no no_field", "batch-invariant": "the engine did not start"}
    assert record.results["decode, graphs, batch 2"]["goal"] is None
    assert record.results["prefill, eager, 64 tokens"]["times_floor"] > 0
    assert record.results["tokens, eager"]["said"] == "the same tokens as with graphs"
    counted = record.results["saturation, graphs, batch 32"]
    assert 0 < counted["counted_over_measured"] < 1 and "the engine counted" in counted["said"]
    opened.assert_called_once_with("GPU-0-1")
