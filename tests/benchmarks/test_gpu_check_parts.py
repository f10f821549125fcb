"""Parts of benchmarks/gpu_check.py: what is launched and compiled beforehand, floors, comparisons."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import gpu_check_steps as steps
from benchmarks.gpu_check_device import repeats_for
from benchmarks.gpu_check_inputs import Place
from benchmarks.gpu_check_plan import GOALS
from benchmarks.gpu_check_stages import cases, speeds, stage_launches
from benchmarks.gpu_check_values import interval64, near, same
from moewe.native.gpu import TARGETS
from moewe.native.gpu.signature import signature_of
from moewe.runtime.config import EngineConfig, GraphOptions, ModelOptions, ParallelOptions
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
    of_engine = {launch.name for launch in stage_launches("steps", TARGETS[90])}
    assert of_engine < set(RULES) and "persistent_kernel" in of_engine


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


def test_graphs_are_captured_on_a_gpu_of_rows_that_are_asked_for() -> None:
    for device, rows in (("cuda", (1, 2)), ("cuda", ()), ("cpu", (1, 2))):
        config = EngineConfig(
            model=ModelOptions(model="m", path="m"),
            parallel=ParallelOptions(device=device),
            graphs=GraphOptions(graph_rows=rows),
        )
        assert steps.captures(config) == (device == "cuda" and rows == (1, 2))


def test_a_mode_that_the_engine_does_not_have_is_refused(tmp_path: Path) -> None:
    assert steps.unknown_options({"max_num_seqs": 3, "no_such_field": 1}) == ["no_such_field"]
    for mode in steps.MODES.values():
        assert steps.unknown_options(steps.options_for_gpu() | mode) == []
