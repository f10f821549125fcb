"""The rows of latent attention in one native call, against the torch steps of models/latent.py; then whole layers.

Values of the rows are chosen so that sums in norms are exact in any order; then every bit must agree.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moewe.kvcache.storage import KVStorage
from moewe.models import decoder
from moewe.models.config import LatentConfig, ModelConfig, RotaryConfig
from moewe.models.footprint import cache_groups
from moewe.models.layers import rms_norm
from moewe.models.native_latent import NativeLatentRows
from moewe.models.rotary import Angles, Rotary
from moewe.quant import KV_FORMATS
from tests.support.fixtures import checkpoint, random_prompt
from tests.support.harness import generate, greedy
from tests.support.native import needs_native, team_of
from tests.support.numerics import LOGITS_IN_HALF_PRECISION, assert_same
from tests.support.random_models import plain_config
from tests.support.setups import Setup

pytestmark = needs_native
LAYER, BLOCKS, BLOCK_SIZE = 1, 6, 4


def config_of(shape: LatentConfig, num_heads: int, *, interleaved: bool) -> ModelConfig:
    return plain_config(
        latent=shape, num_heads=num_heads, num_kv_heads=num_heads, head_dim=shape.nope_dim + shape.rope_dim,
        rotary=RotaryConfig(theta=1e4, rotary_dim=shape.rope_dim, interleaved=interleaved),
    )  # fmt: skip


def storage_of(config: ModelConfig, kv_dtype: str) -> KVStorage:
    groups = cache_groups(config, dtype=KV_FORMATS.get(kv_dtype, "bfloat16"))
    return KVStorage(groups, num_blocks=BLOCKS, block_size=BLOCK_SIZE)


def made_rows(config: ModelConfig, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return kv, queries, and where each row goes; a fifth of the rows is not kept."""
    shape = config.latent
    assert shape is not None
    kv = torch.randint(-8, 9, (rows, shape.kv_rank + shape.rope_dim)).bfloat16() / 4
    queries = torch.randn(rows, config.num_heads, shape.nope_dim + shape.rope_dim).bfloat16()
    slots = torch.randperm(BLOCKS * BLOCK_SIZE)[:rows]
    slots[torch.rand(rows) < 0.2] = -1
    return kv, queries, slots


@settings(max_examples=120, deadline=None)
@given(
    shape=st.builds(
        LatentConfig, kv_rank=st.sampled_from([1, 10, 32, 40, 96]), rope_dim=st.sampled_from([2, 4, 8, 20, 64]),
        nope_dim=st.sampled_from([1, 6, 16, 128]), value_dim=st.just(5), norm_eps=st.sampled_from([1e-6, 1e-2]),
    ),
    num_heads=st.sampled_from([1, 3, 16]), interleaved=st.booleans(), rows=st.sampled_from([1, 2, 9]),
    kv_dtype=st.sampled_from(["bfloat16", "fp8", "int8"]), seed=st.integers(0, 99),
)  # fmt: skip
def test_every_step_rounds_where_torch_does(
    shape: LatentConfig, num_heads: int, interleaved: bool, rows: int, kv_dtype: str, seed: int
) -> None:
    torch.manual_seed(seed)
    config = config_of(shape, num_heads, interleaved=interleaved)
    kv, queries, slots = made_rows(config, rows)
    norm = torch.randn(shape.kv_rank).bfloat16()
    rotary = Rotary(config.rotary, torch.device("cpu"))
    angles = rotary.angles(torch.randint(0, 5000, (rows,)))
    angles = Angles(angles.cos * 1.3, angles.sin * 1.3)  # as an amplitude makes them
    width = shape.kv_rank + shape.rope_dim
    q = torch.full((rows, num_heads, width), 7.0, dtype=torch.bfloat16)
    storage = storage_of(config, kv_dtype)
    NativeLatentRows(config, norm, storage, LAYER)(kv, queries, q, slots, angles)

    latent = rms_norm(kv[:, : shape.kv_rank], norm, shape.norm_eps)
    rest = rotary.rotate(kv[:, None, shape.kv_rank :], angles)
    stored = torch.cat([latent[:, None], rest], dim=-1)
    expected_q = torch.full_like(q, 7.0)
    expected_q[..., shape.kv_rank :] = rotary.rotate(queries[..., shape.nope_dim :], angles)
    assert_same(q, expected_q)
    expected, kept = storage_of(config, kv_dtype), slots >= 0
    expected.write(LAYER, stored[kept], None, slots[kept])
    for layer in (0, LAYER):
        for mine, other in zip(storage.pages(layer), expected.pages(layer), strict=True):
            assert_same(mine.elements.contiguous(), other.elements.contiguous())
            if mine.scales is not None:
                assert other.scales is not None
                assert_same(mine.scales, other.scales)


def test_a_row_has_the_same_bits_alone_and_on_two_threads() -> None:
    torch.manual_seed(0)
    shape = LatentConfig(kv_rank=40, rope_dim=8, nope_dim=6, value_dim=5)
    config, rows = config_of(shape, 4, interleaved=True), 17
    kv, queries = torch.randn(rows, 48).bfloat16(), torch.randn(rows, 4, 14).bfloat16()
    slots, norm = torch.arange(rows) + 3, torch.randn(40).bfloat16()
    angles = Rotary(config.rotary, torch.device("cpu")).angles(torch.arange(rows) * 11)

    def run(part: slice) -> tuple[torch.Tensor, torch.Tensor]:
        storage, q = storage_of(config, "bfloat16"), torch.zeros(len(slots[part]), 4, 48, dtype=torch.bfloat16)
        own = Angles(*(angle[part].contiguous() for angle in angles))
        NativeLatentRows(config, norm, storage, LAYER)(kv[part].clone(), queries[part].clone(), q, slots[part], own)
        return q, storage.layer(LAYER)[0].flatten(0, 1)

    q, stored = run(slice(None))
    with team_of(2):
        for one, other in zip(run(slice(None)), (q, stored)):
            assert_same(one, other)
    for i in (0, 5, 16):
        q_alone, stored_alone = run(slice(i, i + 1))
        assert_same(q_alone[0], q[i])
        assert_same(stored_alone[slots[i]], stored[slots[i]])


@pytest.mark.parametrize("name", ["T-DS2", "T-DS3"])  # queries straight from the rows, and through a latent
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_whole_layers_compute_what_the_parts_do(
    name: str, kv_cache_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, prompt = checkpoint(name, dtype="bfloat16"), random_prompt(48)
    setup = Setup(dtype="bfloat16", kv_cache_dtype=kv_cache_dtype)

    def logits(setup: Setup) -> torch.Tensor:
        return generate(path, [prompt], setup=setup, params=greedy(4)).outcomes[0].logits_of_all()

    whole = logits(setup)
    assert_same(logits(replace(setup, max_chunk_tokens=7)), whole)
    monkeypatch.setattr(decoder, "can_fuse", lambda weights, storage: False)
    parts = logits(setup)
    num = len(prompt)  # behind it texts may part
    error = (whole[:num] - parts[:num]).norm() / parts[:num].norm()
    assert error < LOGITS_IN_HALF_PRECISION
