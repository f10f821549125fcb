"""`triton_heads` against the torch steps of models/layers.py and the write of kvcache/storage.py, bit by bit.

Values are chosen so that rotations and the sums in norms are exact in any order; then every bit must agree.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moewe.attention.kernels.heads import triton_heads
from moewe.attention.native_heads import HeadSteps
from moewe.kvcache import CacheGroup
from moewe.kvcache.storage import KVStorage
from moewe.models.config import RotaryConfig
from moewe.models.rotary import Angles, Rotary
from moewe.native.gpu import TARGETS
from moewe.quant import FORMATS, KV_FORMATS
from tests.attention.test_native_heads import BLOCK_SIZE, BLOCKS, LAYER, spelled_out
from tests.support.numerics import assert_near, assert_same
from tests.support.poisoned import assert_untouched

CPU = torch.device("cpu")
PLAIN = HeadSteps(num_heads=4, num_kv_heads=2, head_dim=16, eps=1e-5)
# One case of everything that a published family does: Mixtral, Qwen3, OLMoE, Llama 4, GLM-4.5 (half of a head turns),
# gpt-oss (KV heads that are no power of two come with ranks that divide them), and a norm that comes last.
CASES = {
    "no rotation": PLAIN,
    "rotation": replace(PLAIN, rotary_dim=16),
    "norm of each head": replace(PLAIN, rotary_dim=16, head_norm="head"),
    "norm of all heads": replace(PLAIN, num_heads=6, num_kv_heads=3, rotary_dim=16, head_norm="full"),
    "norm after an interleaved rotation": replace(
        PLAIN, rotary_dim=16, interleaved=True, head_norm="unit", norm_after_rotary=True
    ),
    "part of a head turns": replace(PLAIN, head_dim=24, rotary_dim=8, head_norm="head", interleaved=True),
    "many heads and one of K": replace(PLAIN, num_heads=70, num_kv_heads=1, rotary_dim=8),
}


def storage_of(steps: HeadSteps, kv_format: str, dtype: torch.dtype) -> KVStorage:
    group = CacheGroup(
        name="g", kind="full", layers=(0, LAYER), num_kv_heads=steps.num_kv_heads, head_dim=steps.head_dim,
        value_dim=steps.head_dim, number_format=(FORMATS | KV_FORMATS)[kv_format],
    )  # fmt: skip
    return KVStorage([group], num_blocks=BLOCKS, block_size=BLOCK_SIZE)


def weighted(steps: HeadSteps, dtype: torch.dtype) -> HeadSteps:
    if steps.head_norm not in ("head", "full"):
        return steps
    return replace(steps, norm_weights=torch.randn(steps.num_heads + steps.num_kv_heads, steps.head_dim).to(dtype))


def rows_of(steps: HeadSteps, rows: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randint(-8, 9, (rows, (steps.num_heads + 2 * steps.num_kv_heads) * steps.head_dim)).to(dtype) / 4


def exact_angles(steps: HeadSteps, rows: int) -> Angles | None:
    if not steps.rotary_dim:
        return None
    return Angles(*(torch.randint(-2, 3, (rows, 1, steps.rotary_dim)) / 2 for _ in range(2)))


def assert_stored(got: KVStorage, expected: KVStorage) -> None:
    for layer in (0, LAYER):
        for mine, other in zip(got.pages(layer), expected.pages(layer), strict=True):
            assert_same(mine.elements.view(torch.uint8), other.elements.view(torch.uint8))
            if other.scales is not None and mine.scales is not None:
                assert_same(mine.scales, other.scales)


@pytest.mark.parametrize("name", CASES)
def test_every_step_rounds_where_torch_does(name: str) -> None:
    torch.manual_seed(0)
    kv_format, dtype, rows = "bfloat16", torch.bfloat16, 3
    steps = weighted(CASES[name], dtype)
    qkv, angles = rows_of(steps, rows, dtype), exact_angles(steps, rows)
    temperature = torch.rand(rows, 1, 1) + 0.5
    slots = torch.tensor([BLOCKS * BLOCK_SIZE - 1, -1, 5])
    storage, expected = (storage_of(steps, kv_format, dtype) for _ in range(2))
    rotary = Rotary(RotaryConfig(theta=1e4, rotary_dim=steps.rotary_dim, interleaved=steps.interleaved), CPU)
    q, k, v = spelled_out(steps, qkv, rotary if angles else None, angles, temperature)
    got = assert_untouched(
        lambda rows: triton_heads(
            steps, storage.pages(LAYER), rows, slots, angles, temperature=temperature, target=TARGETS[90]
        ),
        qkv,
    )
    assert_same(got, q.contiguous())
    expected.write(LAYER, k[[0, 2]], v[[0, 2]], slots[[0, 2]])
    assert_stored(storage, expected)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("kv_format", ["fp8", "int8"])
def test_elements_and_scales_are_those_of_torch(kv_format: str, capability: int) -> None:
    torch.manual_seed(0)
    steps, rows = replace(PLAIN, head_dim=24), 10
    qkv = (torch.randn(rows, 8 * 24) * torch.randn(rows, 1).mul(8).exp()).bfloat16()
    heads = qkv.view(rows, 8, 24)
    heads[0, 4:] = 0.0
    heads[1, 4:, 3] = -0.0
    heads[2, 5, 1], heads[2, 6, 7] = torch.nan, torch.inf
    heads[3, 4:] = 2.0**-101
    heads[4, 4:, 0], heads[4, 4:, 1:] = 448 * 2.0**20, 2.0**10  # elements below the normal ones of e4m3
    slots = torch.randperm(BLOCKS * BLOCK_SIZE)[:rows]
    storage, expected = (storage_of(steps, kv_format, torch.bfloat16) for _ in range(2))
    triton_heads(steps, storage.pages(LAYER), qkv, slots, None, target=TARGETS[capability])
    expected.write(LAYER, heads[:, 4:6], heads[:, 6:], slots)
    assert_stored(storage, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_other_types_and_angles_of_real_positions(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    steps = weighted(replace(CASES["norm of each head"], rotary_dim=16), dtype)
    name = str(dtype).removeprefix("torch.")
    rotary = Rotary(RotaryConfig(theta=1e4, rotary_dim=16, interleaved=False), CPU)
    qkv, angles = torch.randn(3, 8 * 16).to(dtype), rotary.angles(torch.tensor([0, 7, 4000]))
    storage = storage_of(steps, name, dtype)
    got = triton_heads(steps, storage.pages(LAYER), qkv, torch.arange(3), angles, target=TARGETS[90])
    q, k, _ = spelled_out(steps, qkv, rotary, angles, None)
    assert_near(got, q, format=name)
    assert_near(storage.layer(LAYER)[0].flatten(0, 1)[:3], k, format=name)


def test_a_row_has_the_same_bits_alone() -> None:
    torch.manual_seed(0)
    steps = weighted(CASES["norm of all heads"], torch.bfloat16)
    qkv, slots = torch.randn(5, 12 * 16).bfloat16(), torch.arange(5)
    angles = Angles(torch.rand(5, 1, 16), torch.rand(5, 1, 16))
    pages = storage_of(steps, "bfloat16", torch.bfloat16).pages(LAYER)
    together = triton_heads(steps, pages, qkv, slots, angles, target=TARGETS[90])
    one = triton_heads(steps, pages, qkv[3:4], slots[3:4], Angles(angles.cos[3:4], angles.sin[3:4]), target=TARGETS[90])
    assert_same(one[0], together[3])
