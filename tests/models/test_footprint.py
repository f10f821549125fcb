"""Footprints against tensors that were really loaded."""

from dataclasses import replace

import pytest
import torch

from moewe.models.families import load_config
from moewe.models.footprint import cache_groups, model_footprint
from moewe.models.loading import LoadOptions, load_weights
from moewe.models.weights import held_bytes
from tests.support.fixtures import FIXTURES, checkpoint
from tests.support.quantised import fp8_checkpoint, mxfp4_checkpoint


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FIXTURES)
def test_footprint_is_what_loading_holds(name, dtype):
    path = checkpoint(name)
    config = load_config(path)
    footprint = model_footprint(config, name=name, dtype=dtype)
    report = load_weights(path, config, LoadOptions(dtype=getattr(torch, dtype)))
    assert footprint.total_bytes == report.bytes_held
    weights = report.weights
    assert footprint.embedding_bytes == weights.embedding.nbytes
    assert footprint.head_bytes == (0 if config.head_tied else weights.head.nbytes) + held_bytes(weights.head_bias)
    moes = [layer.moe for layer in weights.layers if layer.moe is not None]
    assert footprint.num_moe_layers == len(moes)
    if moes:
        assert footprint.expert_bytes == moes[0].experts.bytes_per_slot
        assert footprint.routed_bytes == sum(held_bytes(moe.experts) for moe in moes)
        assert footprint.shared_bytes == sum(held_bytes(moe.shared) + held_bytes(moe.shared_gate) for moe in moes)
    attention = (
        "input_norm",
        "input_norm_bias",
        "qkv",
        "qkv_bias",
        "latent",
        "o",
        "o_bias",
        "q_norm",
        "k_norm",
        "sinks",
    )
    assert footprint.attention_bytes == sum(
        held_bytes(getattr(layer, n)) for layer in weights.layers for n in attention
    )


@pytest.mark.parametrize("kind", ["mxfp4", "fp8"])
def test_footprint_of_quantised_weights_is_what_loading_holds(kind):
    path = (
        mxfp4_checkpoint("T-GOS", intermediate_size=64)[0] if kind == "mxfp4" else fp8_checkpoint("T-DS3", (24, 40))[0]
    )
    config = load_config(path)
    footprint = model_footprint(config, name=kind, dtype="bfloat16")
    report = load_weights(path, config, LoadOptions(dtype=torch.bfloat16))
    assert footprint.total_bytes == report.bytes_held
    moe = next(layer.moe for layer in report.weights.layers if layer.moe is not None)
    assert footprint.expert_bytes * config.moe.routing.num_experts == held_bytes(moe.experts)
    plain = model_footprint(replace(config, quantization=None), name=kind, dtype="bfloat16")
    assert footprint.total_bytes < plain.total_bytes and footprint.flops_per_token == plain.flops_per_token


def test_mixed_layers_are_counted_apart():
    path = checkpoint("T-QW2", num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3])
    config = load_config(path)
    footprint = model_footprint(config, name="x", dtype="float32")
    assert (footprint.num_layers, footprint.num_moe_layers) == (6, 2)
    report = load_weights(path, config, LoadOptions(dtype=torch.float32))
    assert footprint.total_bytes == report.bytes_held


def test_numbers_of_mixtral_by_hand():
    footprint = model_footprint(load_config(checkpoint("T-MIX")), name="T-MIX", dtype="bf16")
    assert footprint.expert_bytes == 3 * 64 * 96 * 2
    assert footprint.attention_bytes == 2 * 2 * (64 * (64 + 32 + 32) + 64 * 64 + 64)
    assert footprint.dense_bytes == 2 * (2 * 8 * 64 + 3 * 64)
    assert [group.bytes_per_token for group in footprint.kv_groups] == [2 * 2 * 2 * 16 * 2]
    assert footprint.flops_per_token == 2 * (2 * (64 * 192 + 8 * 64 + 2 * 3 * 64 * 96) + 512 * 64)
    assert footprint.activation_itemsize == 2 and footprint.max_model_len == 4096


def test_one_cache_group_holds_all_layers():
    (group,) = cache_groups(load_config(checkpoint("T-QW3")), dtype="float32")
    assert (group.kind, group.layers, group.num_kv_heads, group.head_dim) == ("full", (0, 1), 2, 32)
    assert group.bytes_per_token() == 2 * 2 * 2 * 32 * 4
