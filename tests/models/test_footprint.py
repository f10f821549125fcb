"""Footprints against tensors that were really loaded."""

import pytest
import torch

from moewe.models.families import load_config
from moewe.models.footprint import cache_groups, model_footprint
from moewe.models.loading import LoadOptions, load_weights
from tests.support.fixtures import FIXTURES, checkpoint


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
    assert footprint.head_bytes == (0 if config.head_tied else weights.head.nbytes)
    if config.moe:
        moe = weights.layers[0].moe
        assert footprint.expert_bytes == moe.experts.bytes_per_slot
        assert footprint.shared_bytes == 2 * (
            (moe.shared.w13.nbytes + moe.shared.w2.nbytes if moe.shared else 0)
            + (moe.shared_gate.nbytes if moe.shared_gate is not None else 0)
        )
        assert footprint.routed_bytes == 2 * (moe.experts.w13.nbytes + moe.experts.w2.nbytes)


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
    assert footprint.kv_bytes_per_token == 2 * 2 * 2 * 16 * 2
    assert footprint.flops_per_token == 2 * (2 * (64 * 192 + 8 * 64 + 2 * 3 * 64 * 96) + 512 * 64)
    assert footprint.activation_itemsize == 2 and footprint.max_model_len == 4096


def test_one_cache_group_holds_all_layers():
    (group,) = cache_groups(load_config(checkpoint("T-QW3")), dtype="float32")
    assert (group.kind, group.layers, group.num_kv_heads, group.head_dim) == ("full", (0, 1), 2, 32)
    assert group.bytes_per_block(16) == 16 * 2 * 2 * 2 * 32 * 4
