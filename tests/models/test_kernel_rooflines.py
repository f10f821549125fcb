"""The floor of time of attention, norms and logits: bytes and operations by hand for some models."""

from __future__ import annotations

import pytest

from moewe.attention.kernels.roofline import AttentionRows
from moewe.models.kernels.roofline import attention_rows, norm_work, rows_work
from moewe.models.published import published_config
from moewe.quant import FORMATS, KV_FORMATS
from moewe.runtime.ranks.kernels.roofline import sampling_work
from moewe.topologies.kernel_work import Work
from moewe.topologies.planner.hardware import load_hardware

BF16 = FORMATS["bfloat16"]


def rows_of(model: str, number: int = 0, kv: str | None = None) -> AttentionRows:
    return attention_rows(published_config(model), KV_FORMATS[kv] if kv else BF16)[number]


def test_decode_reads_kv_once_whatever_many_heads_share_it() -> None:
    work = rows_of("qwen3-30b-a3b").decode(32, 8192)
    assert work.bytes == 32 * (8192 * 2 * 4 * 128 * 2 + 2 * 32 * 128 * 2)
    assert work.flops == 32 * 2 * 8192 * 32 * 256
    h200 = load_hardware("h200")
    assert work.is_bound_by_memory(h200) and work.seconds(h200) == pytest.approx(work.bytes / 4.8e12)


@pytest.mark.parametrize("kv", ["fp8", "int8"])
def test_scales_count(kv: str) -> None:
    assert rows_of("qwen3-30b-a3b", 0, kv).kv_bytes == 2 * 4 * (128 + 2)


def test_a_window_bounds_what_is_read() -> None:
    window = next(rows for rows in attention_rows(published_config("gpt-oss-120b"), BF16) if rows.group.window == 128)
    assert window.kv_bytes == 2 * 8 * 64 * 2
    assert window.decode(1, 8192).bytes == 128 * window.kv_bytes + 2 * 64 * 64 * 2
    work = window.work([(100, 50)])
    assert work.bytes == 150 * window.kv_bytes + 50 * 2 * 64 * 64 * 2
    assert work.flops == 2 * 64 * 128 * sum(min(position + 1, 128) for position in range(100, 150))


def test_prefill_counts_each_pair() -> None:
    rows = rows_of("qwen3-30b-a3b")
    assert rows.work([(0, 3), (10, 2)]).flops == 2 * 32 * 256 * (1 + 2 + 3 + 11 + 12)
    assert rows.work([(0, 3), (10, 2)]).bytes == (3 + 12) * rows.kv_bytes + 5 * 2 * 32 * 128 * 2
    assert not rows.work([(0, 4096)]).is_bound_by_memory(load_hardware("h200"))


def test_a_latent_is_k_and_v() -> None:
    config, rows = published_config("deepseek-v3"), rows_of("deepseek-v3")
    assert rows.kv_bytes == 576 * 2
    assert rows.decode(1, 1000).bytes == 1000 * 576 * 2 + 128 * (576 + 512) * 2
    assert rows.decode(1, 1000).flops == 2 * 1000 * 128 * (576 + 512)
    # A latent in and out, the 64 elements that turn of 128 heads in and out, angles and a slot.
    assert rows_work(config, rows, 7).bytes == 7 * (2 * 576 * 2 + 2 * 128 * 64 * 2 + 2 * 64 * 4 + 8)


def test_rows_between_products_and_attention() -> None:
    config, rows = published_config("qwen3-30b-a3b"), rows_of("qwen3-30b-a3b")
    moved = (32 + 2 * 4) * 128 + 32 * 128 + 2 * 4 * 128
    assert rows_work(config, rows, 5).bytes == 5 * (moved * 2 + 2 * 128 * 4 + 8)
    assert norm_work(5, 2048, adds=False).bytes == (2 * 5 + 1) * 2048 * 2
    assert norm_work(5, 2048, adds=True).bytes == (4 * 5 + 1) * 2048 * 2


def test_logits_are_read_once() -> None:
    work = sampling_work(3, 1000)
    assert {name: one.bytes - 3 * 4000 for name, one in work.items()} == {"scan": 27, "logprobs": 84, "draw": 120}


def test_the_slower_of_both_is_the_floor() -> None:
    assert Work(bytes=8.0, flops=6.0).seconds_at(4.0, 2.0) == 3.0
