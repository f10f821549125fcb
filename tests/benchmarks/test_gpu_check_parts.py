"""Stages of benchmarks/gpu_check.py that time a GPU, as far as they go without one: what they launch, floors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import gpu_check_speed as speed
from benchmarks import gpu_check_steps as steps
from benchmarks.gpu_check import cases, speeds
from benchmarks.gpu_check_device import repeats_for
from benchmarks.gpu_check_inputs import Place, shrunk
from benchmarks.gpu_check_plan import GOALS, LeftOut
from benchmarks.gpu_check_values import interval64, near, same
from moewe.models.published import published_config
from moewe.native.gpu import TARGETS
from moewe.native.gpu.signature import signature_of
from tests.support.compiled import RULES

META = Place(device=torch.device("meta"))
CEILINGS = {"copy_bytes_per_second": 1e10, "matrix_flops_per_second": 1e12}


def test_names_are_of_their_own_and_goals_are_known() -> None:
    measured = speeds()
    for made in (measured, cases(small=True), cases(small=False)):
        names = [one.name for one in made]
        assert len(names) == len(set(names)) and names
        assert [one.rank for one in made] == sorted(one.rank for one in made)
    assert {one.goal for one in measured} - {None} == set(GOALS) - {"decode step"}
    assert all(one.work.bytes > 0 for one in measured)


@pytest.mark.slow
def test_everything_that_is_timed_can_be_launched() -> None:
    """Over tensors without memory, as the processes do that compile beforehand."""
    timed = {one.name: one.launches(TARGETS[90]) for one in speeds()}
    tried = {case.name: case.make(META, TARGETS[90]).launches for case in cases(small=False)}
    for made in (timed, tried):
        assert all(made.values()) and {launch.name for some in made.values() for launch in some} == set(RULES)
        assert all(signature_of(launch).types for some in made.values() for launch in some)


@pytest.mark.slow
def test_what_is_timed_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small, in the interpreter: rows, experts and blocks are ones that kernels and torch's own functions take."""
    monkeypatch.setattr(speed, "published_config", lambda model: shrunk(published_config(model)))
    monkeypatch.setattr(speed, "_COLD_BYTES", 1 << 16)
    place = Place(device=torch.device("cpu"), small=True)
    for model, held in (("qwen3-30b-a3b", "bf16"), ("deepseek-v3", "fp8")):
        for runs in ([(20, 1), (33, 1)], [(5, 4)]):
            for launches in speed._attention(model, held, 0, runs, place, TARGETS[90], 2):
                for launch in launches:
                    launch.run()
    for model, held in (("qwen3-30b-a3b", "bf16"), ("gpt-oss-120b", "mxfp4")):
        (launches,) = speed._expert_launches(model, held, 3, False, place, TARGETS[90], 1)
        for launch in launches:
            launch.run()
    (call,) = speed._grouped_mm("qwen3-30b-a3b", 5, place, 1)
    assert call().shape == (5 * 4, 128)
    for rows, context in ((1, 40), (24, 24)):
        calls = speed._sdpa("qwen3-30b-a3b", 2, rows, context, place, 3)
        assert [call().shape[2] for call in calls] == [rows] * 3


def test_a_graph_holds_as_many_repetitions_as_events_can_tell() -> None:
    assert [repeats_for(seconds) for seconds in (1e-9, 1e-6, 2e-4, 1e-3, 1.0)] == [20, 20, 10, 2, 2]


def test_a_wrong_number_is_noticed() -> None:
    expected = torch.linspace(1, 2, 64, dtype=torch.float64)
    assert near(expected.bfloat16(), expected, "bfloat16")["max_error"] > 0
    for wrong in (expected * 1.02, expected.where(expected > 1.01, torch.nan)):
        with pytest.raises(AssertionError, match=r"relative error|not finite"):
            near(wrong.bfloat16(), expected, "bfloat16")
    with pytest.raises(AssertionError, match="1 of 2 ids differ"):
        same(torch.tensor([1, 2]), torch.tensor([1, 3]), "ids")


def test_the_interval_of_a_token() -> None:
    logits = torch.tensor([0.1, 0.4, 0.3, 0.2], dtype=torch.float64).log()
    assert interval64(logits, 1, 1.0, 0.0, 0, 1.0) == pytest.approx((0.1, 0.5))
    assert interval64(logits, 2, 1.0, 0.0, 2, 1.0) == pytest.approx((4 / 7, 1.0))
    assert interval64(logits, 3, 1.0, 0.0, 0, 0.8) == pytest.approx((7 / 9, 1.0))
    assert interval64(logits, 0, 1.0, 0.3, 0, 1.0)[0] == interval64(logits, 0, 1.0, 0.3, 0, 1.0)[1]


def test_the_floor_of_a_step() -> None:
    config = steps.parsed(steps.raw_config())
    one, many = (steps.decode_work(config, batch, 1024) for batch in (1, 64))
    # 3.35 B of 30.5 B numbers take part in a token; the embedding is looked up.
    assert one.bytes == pytest.approx(2 * (3.35e9 - 151_936 * 2048) + 1024 * 98_304, rel=0.01)
    assert 2 * 28e9 < many.bytes < 2 * 30.5e9 + 64 * 1024 * 98_304
    prompt = steps.prefill_work(config, 4096)
    assert prompt.flops == pytest.approx(4096 * 2 * (3.35e9 - 2 * 151_936 * 2048) + 48 * 4096**2 * 32 * 256, rel=0.02)


def test_a_mode_that_the_engine_does_not_have_is_refused(tmp_path: Path) -> None:
    assert steps.unknown_options({"max_num_seqs": 3, "no_such_field": 1}) == ["no_such_field"]


@pytest.mark.slow
@pytest.mark.spawn
def test_steps_are_measured_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing about speed: that the engine runs what the stage asks, and figures come of it."""
    small = {
        "num_hidden_layers": 2, "hidden_size": 64, "num_experts": 8, "num_experts_per_tok": 2, "vocab_size": 500,
        "moe_intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    }  # fmt: skip
    modes = {"plain": {}, "graphs": {"enforce_eager": False}, "unknown": {"no_such_field": 1}}
    monkeypatch.setattr(steps, "MODES", modes)
    monkeypatch.setattr(steps, "BATCHES", (2,))
    monkeypatch.setattr(steps, "CONTEXT", 64)
    monkeypatch.setattr(steps, "_SHORT", 4)
    monkeypatch.setattr(steps, "_LONG", 24)
    raw = steps.raw_config() | small
    engines = steps.Engines(tmp_path, raw, {"max_model_len": 256, "kv_cache_memory_bytes": 4 << 20})
    made = {item.name: item for item in steps.items(engines, CEILINGS, "GPU-none", most_tokens=64)}
    try:
        assert made["decode, plain, batch 2"].run()["tokens_per_second"] != 0
        assert made["prefill, plain, 64 tokens"].run()["times_floor"] > 0
        assert "no GPM counter" in made["saturation, plain, batch 32"].run()["said"]
        for mode, why in (("unknown", "no no_such_field"), ("graphs", "captures no CUDA graphs")):
            with pytest.raises(LeftOut, match=why):
                made[f"decode, {mode}, batch 2"].run()
    finally:
        engines.close()
