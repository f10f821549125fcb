"""Single experts read while a model serves: bit by bit what the start loaded, from every format; or a clear refusal."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from moewe.models.config import ConfigError
from moewe.models.expert_reader import ExpertReader
from moewe.models.families import load_config
from moewe.models.loading import LoadOptions, load_weights
from moewe.quant import weight_scheme
from tests.support.fixtures import checkpoint, copy_checkpoint
from tests.support.native import needs_native
from tests.support.numerics import assert_same
from tests.support.quantised import fp8_checkpoint, mxfp4_checkpoint


def check(path: Path, options: LoadOptions) -> None:
    """Read all experts of the first and the last MoE layer and compare them with what is loaded."""
    config = load_config(path)
    assert config.moe is not None
    weights = load_weights(path, config, options).weights
    reader = ExpertReader(path, config, options)
    for layer in {config.moe_layers[0], config.moe_layers[-1]}:
        held = weights.layers[layer].moe
        assert held is not None
        for expert in range(config.moe.routing.num_experts):
            parts, expected = reader.read(layer, expert).slot_tensors(0), held.experts.slot_tensors(expert)
            assert len(parts) == len(expected)
            for one, other in zip(parts, expected):
                assert one.dtype == other.dtype
                assert_same(one.view(torch.uint8), other.view(torch.uint8))
    reader.close()


@pytest.mark.parametrize("name", ["T-MIX", "T-QW3", "T-DS3", "T-GOS"])
def test_plain_experts(name: str) -> None:
    check(checkpoint(name), LoadOptions(dtype=torch.float32))


def test_stacked_and_sharded_experts() -> None:
    check(checkpoint("T-QW3", stacked=True, shards=2), LoadOptions(dtype=torch.float32))


def test_made_up_experts() -> None:
    check(checkpoint("T-QW3"), LoadOptions(dtype=torch.float32, dummy=True, seed=3))


@needs_native
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("name", ["T-QW3", "T-GOS"])
def test_packed_experts(name: str, quantization: str | None) -> None:
    scheme = weight_scheme(quantization) if quantization else None
    check(checkpoint(name, dtype="bfloat16"), LoadOptions(dtype=torch.bfloat16, pack=True, scheme=scheme))


@needs_native
@pytest.mark.parametrize("pack", [False, True], ids=["as stored", "packed"])
def test_experts_stored_in_fp8_and_mxfp4(pack: bool) -> None:
    options = LoadOptions(dtype=torch.bfloat16, pack=pack)
    check(fp8_checkpoint("T-DS3", (48, 40))[0], options)
    check(mxfp4_checkpoint("T-GOS")[0], options)


def test_a_folder_that_is_replaced_changes_nothing() -> None:
    path = copy_checkpoint(checkpoint("T-QW3"))
    config, options = load_config(path), LoadOptions(dtype=torch.float32)
    reader = ExpertReader(path, config, options)
    expected = reader.read(0, 1)
    for file in path.glob("*.safetensors"):
        other = file.with_suffix(".new")
        other.write_bytes(bytes(file.stat().st_size))
        other.rename(file)
    assert_same(reader.read(0, 1).w13, expected.w13)
    reader.close()


def test_a_file_that_is_changed_or_cut_short_is_refused() -> None:
    path = copy_checkpoint(checkpoint("T-QW3"))
    reader = ExpertReader(path, load_config(path), LoadOptions(dtype=torch.float32))
    file = next(path.glob("*.safetensors"))
    os.utime(file, ns=(1, 1))
    with pytest.raises(ConfigError, match="was changed while it was in use"):
        reader.read(0, 1)
    os.truncate(file, 64)
    with pytest.raises(ConfigError, match="ended early"):
        reader.read(0, 1)
    reader.close()
