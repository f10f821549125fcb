"""Stages of benchmarks/gpu_check.py on a GPU without memory: all tensors lie there, and nothing is compiled late.

Shapes are those of the real run. Numbers are zeros: a comparison may say what it likes of them, if it can be made.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from unittest.mock import create_autospec

import pytest
import torch

from benchmarks import gpu_check_speed as speed
from benchmarks import gpu_check_steps as steps
from benchmarks.gpu_check_inputs import Place
from benchmarks.gpu_check_stages import cases, speeds, stage_launches
from moewe.native.gpu.compiling import launch_key
from tests.gpu.test_placement import Ranks
from tests.support import fake_gpu as fakes
from tests.support.fake_gpu import DEVICE, TARGET, FakeGpu, fake_gpu
from tests.support.setups import Setup

pytestmark = pytest.mark.slow
PLACE = Place(device=DEVICE)
CEILINGS = {"copy_bytes_per_second": 4e12, "matrix_flops_per_second": 8e14}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    monkeypatch.setattr(fakes, "MEMORY_BYTES", 141 << 30)
    with fake_gpu() as made:
        for name in ("graph", "empty_cache"):
            monkeypatch.setattr(torch.cuda, name, create_autospec(getattr(torch.cuda, name)))
        card = torch.cuda.get_device_properties(0)
        card.L2_cache_size = 50 << 20
        yield made


def late(stage: str, gpu: FakeGpu) -> set[str]:
    """Return what was launched and is not compiled beforehand."""
    return set(gpu.launches) - {launch_key(launch, TARGET) for launch in stage_launches(stage, TARGET)}


def test_values(gpu: FakeGpu) -> None:
    for case in cases(small=False):
        with suppress(AssertionError):
            case.run(PLACE, TARGET)
    assert gpu.launches and not late("values", gpu)


def test_speed(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own checks of types, strides and offsets of its grouped product among it."""
    monkeypatch.setattr(speed, "repeats_for", lambda floor: 1)
    monkeypatch.setattr(speed, "_MOST_COLD", 1)
    monkeypatch.setattr(speed, "_DECODES", speed._DECODES[:2])
    monkeypatch.setattr(speed, "held_experts", speed._Held())
    for one in speeds():
        if not one.name.endswith((", 1 tokens", ", 64 tokens")):
            assert "torch_error" not in one.run(PLACE, TARGET, CEILINGS), one.name
    assert gpu.launches and not late("speed", gpu)


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_engines(gpu: FakeGpu, batch_invariant: bool, tmp_path: Path) -> None:
    """What a rank of stage 3 launches while it warms up and captures; requests launch nothing else (test_placement)."""
    (tmp_path / "config.json").write_text(json.dumps(steps.raw_config(1)))
    options = steps.options_for_gpu()
    shared = ("device", "dtype", "max_model_len", "max_num_seqs", "max_num_batched_tokens")
    setup = Setup(
        **{name: options[name] for name in shared}, num_blocks=20_000, load_format="dummy", keep_logits=False,
        batch_invariant=batch_invariant,
    )  # fmt: skip
    Ranks(tmp_path, setup)
    assert len(gpu.captured) > 10 and not late("steps", gpu)
