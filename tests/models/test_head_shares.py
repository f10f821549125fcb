"""Heads divided over ranks: each holds its part of every attention weight and no more; what cannot be is told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moewe.attention.tensor_parallel import ALL_HEADS, HeadShare
from moewe.models.config import ModelConfig
from moewe.models.families import load_config
from moewe.models.footprint import cache_groups, kv_groups, model_footprint
from moewe.models.head_shares import check_heads, head_cuts, local_config, possible_shares
from moewe.models.loading import LoadOptions, LoadReport, load_weights
from moewe.models.weights import LayerWeights, held_bytes
from moewe.quant import weight_scheme
from moewe.topologies import TopologyError, parse_topology
from moewe.topologies.kv_sizes import shared_groups
from tests.support.fixtures import FIXTURES, checkpoint
from tests.support.native import needs_native
from tests.support.quantised import fp8_checkpoint

ATTENTION = ("input_norm", "input_norm_bias", "qkv", "qkv_bias", "latent", "o", "o_bias", "q_norm", "k_norm", "sinks")


def load(path: Path, share: HeadShare = ALL_HEADS, dtype: torch.dtype = torch.float32, **options: Any) -> LoadReport:
    return load_weights(path, load_config(path), LoadOptions(dtype=dtype, share=share, **options))


def expected_rows(rank: int, size: int, num_heads: int) -> range:
    """The heads of `rank`, counted by hand: its part, or the one that it shares with its neighbours."""
    if num_heads >= size:
        per_rank = num_heads // size
        return range(rank * per_rank, (rank + 1) * per_rank)
    return range(rank // (size // num_heads), rank // (size // num_heads) + 1)


def rows_of(tensor: torch.Tensor, heads: range, num_heads: int) -> torch.Tensor:
    return tensor.unflatten(0, (num_heads, -1))[heads.start : heads.stop].flatten(0, 1)


def check_layer(own: LayerWeights, whole: LayerWeights, config: ModelConfig, share: HeadShare) -> None:
    heads = expected_rows(share.rank, share.size, config.num_heads)
    if whole.latent is None:
        kv_heads = expected_rows(share.rank, share.size, config.num_kv_heads)
        sizes = [n * config.head_dim for n in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]
        for mine, all_of_it in ((own.qkv, whole.qkv), (own.qkv_bias, whole.qkv_bias)):
            if all_of_it is None:
                assert mine is None
                continue
            q, k, v = torch.split(all_of_it, sizes)
            parts = [rows_of(q, heads, config.num_heads)]
            parts += [rows_of(part, kv_heads, config.num_kv_heads) for part in (k, v)]
            assert torch.equal(mine, torch.cat(parts))
        for mine, all_of_it, n, count in (
            (own.q_norm, whole.q_norm, config.num_heads, heads),
            (own.k_norm, whole.k_norm, config.num_kv_heads, kv_heads),
        ):
            if all_of_it is not None:
                full = config.qk_norm == "full"
                assert torch.equal(mine, rows_of(all_of_it, count, n) if full else all_of_it)
    else:
        name = "q" if whole.latent.q is not None else "q_b"
        assert torch.equal(getattr(own.latent, name), rows_of(getattr(whole.latent, name), heads, config.num_heads))
        for name in ("kv_b_k", "kv_b_v"):
            assert torch.equal(getattr(own.latent, name), getattr(whole.latent, name)[heads.start : heads.stop])
        assert torch.equal(own.latent.kv_a, whole.latent.kv_a)
    assert torch.equal(own.o.T, rows_of(whole.o.T, heads, config.num_heads))
    assert (own.o_bias is not None) == (whole.o_bias is not None and share.is_first)
    if whole.sinks is not None:
        assert torch.equal(own.sinks, whole.sinks[heads.start : heads.stop])


@pytest.mark.parametrize(
    ("name", "dummy"),
    [
        *(pytest.param(name, False, id=f"{name}-files") for name in FIXTURES),
        *(pytest.param(name, True, id=f"{name}-dummy") for name in ("T-QW3", "T-DS3", "T-GOS")),
    ],
)
def test_each_rank_holds_its_heads_and_reads_no_more(name: str, dummy: bool) -> None:
    path = checkpoint(name)
    config, whole = load_config(path), load(path, dummy=dummy)
    footprint = model_footprint(config, name=name, dtype="float32")
    assert possible_shares(config) == (2, 4)
    for size in (2, 4):
        read = 0
        for rank in range(size):
            share = HeadShare(rank, size)
            report = load(path, share, dummy=dummy)
            for own, reference in zip(report.weights.layers, whole.weights.layers, strict=True):
                check_layer(own, reference, config, share)
            held = sum(held_bytes(getattr(layer, name)) for layer in report.weights.layers for name in ATTENTION)
            if rank == 0:
                assert footprint.attention_bytes_at(size) == held
            assert held <= footprint.attention_bytes_at(size) < footprint.attention_bytes
            assert report.bytes_held - held == whole.bytes_held - footprint.attention_bytes
            read = report.bytes_read
        assert dummy or whole.bytes_read - read == whole.bytes_held - report.bytes_held


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_kv_heads_are_divided_or_shared(kv_heads: int) -> None:
    path = checkpoint("T-QW3", num_key_value_heads=kv_heads)
    config, whole = load_config(path), load(path)
    for size in (2, 4):
        for rank in range(size):
            share = HeadShare(rank, size)
            for own, reference in zip(load(path, share).weights.layers, whole.weights.layers, strict=True):
                check_layer(own, reference, config, share)
            held = kv_groups(local_config(config, share), dtype="float32")
            assert held == shared_groups(kv_groups(config, dtype="float32"), size)
            (group,) = cache_groups(local_config(config, share), dtype="float32")
            assert group.num_kv_heads == max(1, kv_heads // size) and group.bytes_per_token() == held[0].bytes_per_token


@pytest.mark.parametrize("name", ["T-GLM", "T-GOS", "T-DS3", "T-OLM"])
def test_other_number_formats_are_cut_alike(name: str) -> None:
    path = checkpoint(name, dtype="bfloat16")
    config = load_config(path)
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        whole, share = load(path, dtype=dtype), HeadShare(1, 2)
        for own, reference in zip(load(path, share, dtype).weights.layers, whole.weights.layers, strict=True):
            check_layer(own, reference, config, share)


def test_fp8_blocks_are_cut_where_they_begin() -> None:
    path, plain = fp8_checkpoint("T-DS3", (4, 4))
    config = load_config(path)
    assert possible_shares(config) == (2, 4)
    for rank in range(2):
        share = HeadShare(rank, 2)
        report, reference = load(path, share), load(plain, share)
        for own, numbers in zip(report.weights.layers, reference.weights.layers, strict=True):
            for mine, theirs in ((own.o, numbers.o), (own.latent.q_b, numbers.latent.q_b)):
                torch.testing.assert_close(mine.dequantize(torch.float32), theirs)
            torch.testing.assert_close(own.latent.kv_b_k, numbers.latent.kv_b_k)
            torch.testing.assert_close(own.latent.kv_b_v, numbers.latent.kv_b_v)
        footprint = model_footprint(config, name="x", dtype="float32")
        assert footprint.attention_bytes_at(2) == sum(
            held_bytes(getattr(layer, name)) for layer in report.weights.layers for name in ATTENTION
        )


@needs_native
@pytest.mark.parametrize("kind", ["bf16", "int8", "int4"])
def test_shares_are_packed_and_quantised_after_they_are_cut(kind: str) -> None:
    path = checkpoint("T-QW3", dtype="bfloat16")
    scheme = None if kind == "bf16" else weight_scheme(kind)
    config = load_config(path)
    report = load(path, HeadShare(1, 2), torch.bfloat16, pack=True, scheme=scheme)
    whole = load(path, dtype=torch.bfloat16, pack=True, scheme=scheme)
    layer, reference = report.weights.layers[0], whole.weights.layers[0]
    assert layer.qkv.shape == (reference.qkv.shape[0] // 2, reference.qkv.shape[1])
    assert layer.o.shape == (reference.o.shape[0], reference.o.shape[1] // 2)
    footprint = model_footprint(config, name="x", dtype="bfloat16", scheme=scheme)
    held = sum(held_bytes(getattr(each, name)) for each in report.weights.layers for name in ATTENTION)
    assert held <= footprint.attention_bytes_at(2) * 1.1


def refusal(config: ModelConfig, topology: str) -> str:
    with pytest.raises(TopologyError) as caught:
        check_heads(config, parse_topology(topology))
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_what_does_not_divide_the_heads_is_refused_with_a_layout_that_does() -> None:
    config = load_config(checkpoint("T-QW3"))
    check_heads(config, parse_topology("EP4DP1[atp=4]"))
    message = refusal(config, "EP8DP1[atp=8]")
    assert "atp=8" in message and "num_attention_heads=4" in message and "use EP8DP1[adp=2,atp=4]" in message
    odd = replace(config, num_heads=6, num_kv_heads=3)
    assert possible_shares(odd) == (3, 6)
    message = refusal(odd, "EP4DP1[atp=2]")
    assert "num_key_value_heads=3" in message and "use EP4DP1[adp=4,atp=1]" in message
    check_heads(odd, parse_topology("EP6DP1[atp=6]"))


def test_fp8_blocks_that_a_share_would_cut_are_refused() -> None:
    config = load_config(fp8_checkpoint("T-DS3", (64, 40))[0])
    message = refusal(config, "EP2DP1[atp=2]")
    assert "blocks of" in message and "use EP2DP1[adp=2,atp=1]" in message


def test_one_rank_holds_everything_as_ever() -> None:
    config = load_config(checkpoint("T-QW3"))
    assert local_config(config, HeadShare()) is config and head_cuts(config, HeadShare()) == {}
