"""Frequencies of every kind of rotary scaling against transformers, and rotation against a slow one, pair by pair."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from moewe.models.config import RotaryConfig, RotaryScaling
from moewe.models.rotary import Rotary, frequencies
from tests.support.numerics import ROTARY_FREQUENCIES, assert_near, assert_same, assert_within
from tests.support.slow_decoder import rotate

CPU = torch.device("cpu")
LONG, SHORT = [1.0 + i for i in range(16)], [1.0 + i / 16 for i in range(16)]
LONGROPE = {"rope_type": "longrope", "factor": 8.0, "long_factor": LONG, "short_factor": SHORT,
            "original_max_position_embeddings": 64}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn_long": {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096},
    "yarn_betas": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096,
                   "beta_fast": 8.0, "beta_slow": 2.0},
    "yarn_not_truncated": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096,
                           "truncate": False},
    "yarn_step": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8,
                  "beta_fast": 1000.0, "beta_slow": 1000.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192,
               "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "llama3_short": {"rope_type": "llama3", "factor": 32.0, "original_max_position_embeddings": 64,
                     "low_freq_factor": 1.0, "high_freq_factor": 8.0},
    "longrope": LONGROPE,
}  # fmt: skip


def ours(values: dict[str, Any], theta: float, rotary_dim: int) -> RotaryConfig:
    """The config that stands for transformers' `rope_parameters`."""
    names = {
        "factor": "factor", "original_max_position_embeddings": "original_max_position", "beta_fast": "beta_fast",
        "beta_slow": "beta_slow", "truncate": "truncate", "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor", "long_factor": "long_factors", "short_factor": "short_factors",
    }  # fmt: skip
    fields = {names[k]: tuple(v) if isinstance(v, list) else v for k, v in values.items() if k in names}
    return RotaryConfig(theta=theta, rotary_dim=rotary_dim, scaling=RotaryScaling(kind=values["rope_type"], **fields))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("theta", [1e4, 5e5])
@pytest.mark.parametrize("long", [False, True])
def test_frequencies_are_those_of_transformers(kind: str, theta: float, long: bool) -> None:
    values = KINDS[kind]
    config = LlamaConfig(
        head_dim=64,
        max_position_embeddings=8192,
        rope_parameters={**values, "rope_theta": theta, "partial_rotary_factor": 0.5},
    )
    expected, _ = ROPE_INIT_FUNCTIONS[values["rope_type"]](config, CPU, seq_len=65 if long else None)
    actual = frequencies(ours(values, theta, 32), long=long)
    assert actual.dtype == torch.float32
    assert_within(actual / expected, torch.ones(16), ROTARY_FREQUENCIES)


def test_plain_frequencies() -> None:
    expected, _ = LlamaRotaryEmbedding.compute_default_rope_parameters(LlamaConfig(head_dim=32))
    assert_within(frequencies(RotaryConfig(theta=1e4, rotary_dim=32)) / expected, torch.ones(16), ROTARY_FREQUENCIES)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="'ntk' is not known"):
        frequencies(RotaryConfig(theta=1e4, rotary_dim=8, scaling=RotaryScaling(kind="ntk")))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [16, 6, 2])
@pytest.mark.parametrize("amplitude", [1.0, 1.3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rotation_equals_one_pair_at_a_time(interleaved: bool, rotary_dim: int, amplitude: float, dtype: str) -> None:
    scaling = RotaryScaling(kind="linear", factor=2.0, amplitude=amplitude)
    config = RotaryConfig(theta=100.0, rotary_dim=rotary_dim, interleaved=interleaved, scaling=scaling)
    rotary = Rotary(config, CPU)
    heads = torch.randn(9, 3, 16, generator=torch.Generator().manual_seed(0)).to(getattr(torch, dtype))
    before = heads.clone()
    actual = rotary.rotate(heads, rotary.angles(torch.arange(9)))
    assert actual.dtype == heads.dtype
    assert_near(actual, rotate(config, heads.double(), long=False), format=dtype)
    assert_same(actual[..., rotary_dim:], heads[..., rotary_dim:])
    assert_same(heads, before)


def test_rotation_is_that_of_transformers() -> None:
    """Interleaved pairs come out of transformers with all first elements before all second ones."""
    heads, positions = torch.randn(7, 2, 16), torch.arange(7)
    for interleaved, apply in ((False, apply_rotary_pos_emb), (True, apply_rotary_pos_emb_interleave)):
        rotary = Rotary(RotaryConfig(theta=1e4, rotary_dim=16, interleaved=interleaved), CPU)
        actual = rotary.rotate(heads, rotary.angles(positions))
        cos, sin = LlamaRotaryEmbedding(LlamaConfig(head_dim=16))(heads, positions[None])
        rows = heads.transpose(0, 1)[None]
        expected = apply(rows, rows, cos, sin)[0][0].transpose(0, 1)
        if interleaved:
            actual = torch.cat([actual[..., ::2], actual[..., 1::2]], dim=-1)
        assert_near(actual, expected, format="float32")


def test_longrope_chooses_frequencies_and_amplitude_by_row() -> None:
    scaling = RotaryScaling(
        kind="longrope", original_max_position=8, short_factors=(1.0, 1.5), long_factors=(2.0, 9.0),
        amplitude=1.1, long_amplitude=1.7,
    )  # fmt: skip
    config = RotaryConfig(theta=10.0, rotary_dim=4, scaling=scaling)
    rotary, heads = Rotary(config, CPU), torch.randn(6, 2, 4)
    long_rows = torch.tensor([True, False, True, True, False, False])
    actual = rotary.rotate(heads, rotary.angles(torch.arange(6), long_rows))
    short, long = (rotate(config, heads.double(), long) for long in (False, True))
    assert_near(actual, torch.where(long_rows[:, None, None], long, short), format="float32")
    assert_near(rotary.rotate(heads, rotary.angles(torch.arange(6))), short, format="float32")


def test_positions_far_out_keep_their_angle() -> None:
    rotary = Rotary(RotaryConfig(theta=1e4, rotary_dim=2), CPU)
    angles = rotary.angles(torch.tensor([1 << 20]))
    assert_within(angles.cos[0, 0], torch.full((2,), math.cos(1 << 20)), ROTARY_FREQUENCIES)


@pytest.mark.parametrize("interleaved", [False, True])
def test_angles_looked_up_have_the_bits_of_those_computed(interleaved: bool) -> None:
    for kind in (None, RotaryScaling(kind="linear", factor=4.0)):
        rotary = Rotary(RotaryConfig(rotary_dim=24, theta=1e4, scaling=kind, interleaved=interleaved), CPU)
        for positions in ([0], [5, 3, 1023], [1024], [0, 70_000, 2], list(range(300)), [70_001, 4]):
            wanted = rotary.angles(torch.tensor(positions))
            found = rotary.lookup(torch.tensor(positions))
            assert_same(found.cos, wanted.cos)
            assert_same(found.sin, wanted.sin)
