"""The floor of time of MoE kernels: bytes and operations by hand for one model."""

from __future__ import annotations

import pytest

from moewe.models.published import published_config
from moewe.moe.kernels.roofline import hit_experts, layer_work, router_work
from moewe.runtime.gpu_launches import moe_shapes
from moewe.topologies.planner.hardware import load_hardware

FORMATS = ("bf16", "int4 32")
QWEN = moe_shapes(published_config("qwen3-30b-a3b"), FORMATS)
EXPERT = 3 * 2048 * 768  # numbers


def test_one_token_reads_its_experts():
    work = layer_work(QWEN, 1, "bf16")["experts"]
    rows_and_hidden = (1 + 8) * 2048 + 2 * 8 * 768
    assert work.bytes == pytest.approx(8 * EXPERT * 2 + rows_and_hidden * 2)
    assert work.flops == 8 * EXPERT * 2
    h200 = load_hardware("h200")
    assert work.is_bound_by_memory(h200)
    assert work.seconds(h200) == pytest.approx(work.bytes / 4.8e12)


def test_many_tokens_are_bound_by_products():
    work, h200 = layer_work(QWEN, 8192, "bf16")["experts"], load_hardware("h200")
    assert not work.is_bound_by_memory(h200)
    assert work.seconds(h200) == pytest.approx(8192 * 8 * EXPERT * 2 / 9.89e14)


def test_int4_counts_scales_and_zeros():
    bits = 4 + (16 + 8) / 32
    plain, packed = (layer_work(QWEN, 1, name)["experts"].bytes for name in FORMATS)
    assert plain - packed == pytest.approx(8 * EXPERT * (16 - bits) / 8)


def test_experts_that_are_hit():
    assert hit_experts(1, 128, 8) == 8
    assert hit_experts(2, 128, 8) == pytest.approx(16 - 8 * 8 / 128)
    assert hit_experts(10_000, 128, 8) == pytest.approx(128)


def test_data_movement_is_counted_once():
    work = layer_work(QWEN, 4, "bf16")
    assert work["combine"].bytes == (32 + 4) * 2048 * 2 + 32 * 8
    assert work["permute"].bytes == 3 * 32 * 4 + 128 * 8
    assert work["route"].bytes == 4 * (128 * 4 + 8 * 12)
    assert router_work(QWEN, 4).bytes == 128 * 2048 * 4 + 4 * (2048 * 2 + 128 * 4)
