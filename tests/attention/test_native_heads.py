"""Norm of heads, rotation and KV write in one native call, against the torch steps of models/layers.py.

Values are chosen so that sums in norms are exact in any order; then every bit must agree.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from moewe.attention.native_heads import HeadSteps, QkvEpilogue
from moewe.kvcache import CacheGroup
from moewe.kvcache.storage import KVStorage
from moewe.models.config import RotaryConfig
from moewe.models.layers import rms_norm
from moewe.models.rotary import Angles, Rotary
from moewe.native.library import load
from moewe.quant import FORMATS
from tests.support.numerics import assert_same

pytestmark = pytest.mark.skipif(load() is None, reason="no native kernels here")
LAYER, BLOCKS, BLOCK_SIZE = 1, 6, 4


def storage_of(steps: HeadSteps) -> KVStorage:
    group = CacheGroup(
        name="g",
        kind="full",
        layers=(0, LAYER),
        num_kv_heads=steps.num_kv_heads,
        head_dim=steps.head_dim,
        value_dim=steps.head_dim,
        number_format=FORMATS["bfloat16"],
    )
    return KVStorage([group], num_blocks=BLOCKS, block_size=BLOCK_SIZE)


def normed(steps: HeadSteps, qk: torch.Tensor) -> torch.Tensor:
    weights = steps.norm_weights
    if steps.head_norm == "unit":
        return F.rms_norm(qk, qk.shape[-1:], None, steps.eps)
    assert weights is not None
    if steps.head_norm == "head":
        return rms_norm(qk, weights.view(qk.shape[1:]), steps.eps)
    width = steps.num_heads * steps.head_dim
    parts = qk.flatten(1).split([width, steps.num_kv_heads * steps.head_dim], dim=-1)
    both = zip(parts, (weights.flatten()[:width], weights.flatten()[width:]))
    return torch.cat([rms_norm(part, weight, steps.eps) for part, weight in both], dim=-1).view_as(qk)


def spelled_out(
    steps: HeadSteps, qkv: torch.Tensor, rotary: Rotary | None, angles: Angles | None, temperature: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    heads = qkv.view(qkv.shape[0], -1, steps.head_dim)
    qk, v = heads.split([steps.num_heads + steps.num_kv_heads, steps.num_kv_heads], dim=1)
    if steps.head_norm and not steps.norm_after_rotary:
        qk = normed(steps, qk)
    if rotary is not None and angles is not None:
        qk = rotary.rotate(qk, angles)
    if steps.head_norm and steps.norm_after_rotary:
        qk = normed(steps, qk)
    q, k = qk.split([steps.num_heads, steps.num_kv_heads], dim=1)
    if temperature is not None:
        q = (q * temperature).to(q.dtype)
    return q, k, v


@st.composite
def cases(draw: st.DrawFn) -> tuple[HeadSteps, bool]:
    """Sums in norms after a rotation are never exact: then the norm is left out."""
    head_dim = draw(st.sampled_from([4, 16, 24, 64, 80]))
    num_heads, num_kv_heads = draw(st.sampled_from([(1, 1), (4, 2), (6, 1), (3, 3)]))
    rotary_dim = draw(st.sampled_from([0, 2, head_dim // 2, head_dim]))
    after = draw(st.booleans())
    head_norm = draw(st.sampled_from([None, "head", "full", "unit"])) if not (after and rotary_dim) else None
    weights = None
    if head_norm in ("head", "full"):
        weights = torch.randn(num_heads + num_kv_heads, head_dim).bfloat16()
    steps = HeadSteps(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        interleaved=draw(st.booleans()),
        head_norm=head_norm,
        norm_weights=weights,
        norm_after_rotary=after,
        eps=1e-5,
    )
    return steps, draw(st.booleans())


@given(case=cases(), seed=st.integers(0, 99), rows=st.sampled_from([1, 2, 9]))
@settings(max_examples=150, deadline=None)
def test_every_step_rounds_where_torch_does(case: tuple[HeadSteps, bool], seed: int, rows: int) -> None:
    steps, tempered = case
    torch.manual_seed(seed)
    qkv = torch.randint(-8, 9, (rows, (steps.num_heads + 2 * steps.num_kv_heads) * steps.head_dim)).bfloat16() / 4
    slots = torch.randperm(BLOCKS * BLOCK_SIZE)[:rows]
    slots[torch.rand(rows) < 0.2] = -1
    rotary, angles = None, None
    if steps.rotary_dim:
        config = RotaryConfig(theta=1e4, rotary_dim=steps.rotary_dim, interleaved=steps.interleaved, scaling=None)
        rotary = Rotary(config, torch.device("cpu"))
        angles = rotary.angles(torch.randint(0, 5000, (rows,)))
        angles = Angles(angles.cos * 1.3, angles.sin * 1.3)  # as an amplitude makes them
    temperature = torch.rand(rows, 1, 1) + 0.5 if tempered else None
    storage = storage_of(steps)
    got = QkvEpilogue(steps, storage, LAYER)(qkv, slots, angles, temperature)
    q, k, v = spelled_out(steps, qkv, rotary, angles, temperature)
    assert_same(got, q.contiguous())
    expected = storage_of(steps)
    kept = slots >= 0
    expected.write(LAYER, k[kept], v[kept], slots[kept])
    for layer in (0, LAYER):
        for mine, other in zip(storage.layer(layer), expected.layer(layer), strict=True):
            assert_same(mine, other)


@pytest.mark.parametrize("head_norm", ["head", "full", "unit"])
def test_a_row_has_the_same_bits_alone_and_on_two_threads(head_norm: str) -> None:
    torch.manual_seed(0)
    steps = HeadSteps(num_heads=4, num_kv_heads=2, head_dim=24, rotary_dim=24, norm_after_rotary=True, eps=1e-6)
    weights = None if head_norm == "unit" else torch.randn(6, 24).bfloat16()
    steps = replace(steps, head_norm=head_norm, norm_weights=weights)
    rotary = Rotary(RotaryConfig(theta=1e4, rotary_dim=24, interleaved=False, scaling=None), torch.device("cpu"))
    rows = 17
    qkv, slots, positions = torch.randn(rows, 8 * 24).bfloat16(), torch.arange(rows) + 3, torch.arange(rows) * 11
    call = QkvEpilogue(steps, storage_of(steps), LAYER)
    together = call(qkv, slots, rotary.angles(positions))
    library = load()
    assert library is not None
    library.moewe_set_threads(2)
    try:
        assert_same(call(qkv, slots, rotary.angles(positions)), together)
    finally:
        library.moewe_set_threads(1)
    for i in (0, 5, 16):
        one = slice(i, i + 1)
        assert_same(call(qkv[one].clone(), slots[one].clone(), rotary.angles(positions[one]))[0], together[i])
