"""What the planner knows of a model, against what loading a rank really holds, and against published sizes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moewe.kvcache.storage import KVStorage
from moewe.models.architecture import WEIGHT_FORMATS, architecture
from moewe.models.config import ConfigError
from moewe.models.families import load_config
from moewe.models.footprint import cache_groups
from moewe.models.loading import LoadOptions, load_weights
from moewe.models.published import published_config, published_names
from moewe.models.weights import held_bytes
from moewe.moe.wide_ep.placement.balanced import first_placement
from moewe.quant import parse_format, parse_kv_format
from moewe.topologies import TopologyError, parse_topology
from moewe.topologies.planner.hardware import load_hardware
from moewe.topologies.planner.pools import Planned, plan_pool
from moewe.topologies.planner.serving import Workload
from moewe.topologies.planner.step_time import Setting
from tests.support.fixtures import checkpoint
from tests.support.quantised import fp8_checkpoint, mxfp4_checkpoint

H200 = load_hardware("h200")
WORKLOAD = Workload(isl=96, osl=32, concurrency=12)


def planned(path: Path, topology: str, kv: str = "auto") -> Planned:
    model = architecture(load_config(path), name="m", kv=kv)
    setting = Setting(model=model, topology=parse_topology(topology), hardware=H200)
    return plan_pool(setting, WORKLOAD, chunk=64)


@pytest.mark.parametrize("topology", ["EP1DP1", "EP2DP1", "EP3DP2[red=2]"])
@pytest.mark.parametrize("name", ["T-MIX", "T-QW3", "T-DS3", "T-GOS", "T-GLM", "T-QW2"])
def test_weights_of_a_rank_are_planned_to_the_byte(name: str, topology: str) -> None:
    check_weights(checkpoint(name), topology)


@pytest.mark.parametrize("topology", ["EP1DP1", "EP4DP1"])
@pytest.mark.parametrize("kind", ["fp8", "mxfp4"])
def test_quantised_weights_of_a_rank_are_planned_to_the_byte(kind: str, topology: str) -> None:
    made = fp8_checkpoint("T-DS3", (24, 40)) if kind == "fp8" else mxfp4_checkpoint("T-GOS", intermediate_size=64)
    check_weights(made[0], topology)


def check_weights(path: Path, text: str) -> None:
    """Load every rank, and compare the fullest with the plan, line by line."""
    config, topology = load_config(path), parse_topology(text)
    assert config.moe is not None
    budget = planned(path, text).budget
    placement = first_placement(
        len(config.moe_layers),
        config.moe.routing.num_experts,
        num_redundant=topology.red,
        domains=[0] * topology.ep,
    )
    dtype = parse_format(config.dtype).torch_dtype
    reports = [
        load_weights(path, config, LoadOptions(dtype=dtype, placement=placement, rank=rank))
        for rank in range(topology.ep)
    ]
    fullest = max(reports, key=lambda report: report.bytes_held)
    assert budget.of_kind("weights") == fullest.bytes_held
    lines = {line.name: line.num_bytes for line in budget.lines if line.kind == "weights"}
    layers = [layer.moe for layer in fullest.weights.layers if layer.moe is not None]
    routed = sum(n for name, n in lines.items() if name.startswith(("routed experts", "redundant expert")))
    assert routed == sum(held_bytes(moe.experts) for moe in layers)
    shared = sum(held_bytes(moe.shared) + held_bytes(moe.shared_gate) for moe in layers)
    assert lines.get("shared experts", 0) == shared
    assert lines["embedding"] == held_bytes(fullest.weights.embedding)


@pytest.mark.parametrize("kv", ["auto", "fp8", "int8"])
@pytest.mark.parametrize("name", ["T-QW3", "T-DS3", "T-GOS"])
def test_kv_blocks_of_a_rank_are_planned_to_the_byte(name: str, kv: str) -> None:
    path = checkpoint(name)
    config = load_config(path)
    budget = planned(path, "EP2DP1", kv).budget
    groups = cache_groups(config, dtype=parse_kv_format(kv, parse_format(config.dtype)))
    storage = KVStorage(groups, num_blocks=budget.group_blocks, block_size=budget.limits.block_size)
    assert budget.kv_bytes == storage.num_bytes > 0


# Totals that the models' makers publish, billions of parameters: all, and those that a token passes.
PUBLISHED = {
    "mixtral-8x7b": (46.7, 12.9),
    "mixtral-8x22b": (141, 39),
    "qwen3-30b-a3b": (30.5, 3.3),
    "qwen3-235b-a22b": (235, 22),
    "deepseek-v3": (671, 37),
    "kimi-k2": (1026, 32.9),
    "gpt-oss-120b": (116.8, 5.1),
    "glm-4.5": (355, 32),
}


def test_the_table_has_the_models_that_are_checked() -> None:
    assert set(published_names()) == set(PUBLISHED)


@pytest.mark.parametrize("name", published_names())
def test_published_models_have_their_published_sizes(name: str) -> None:
    model = architecture(published_config(name), name=name, weights="bf16")
    whole, active = PUBLISHED[name]
    assert model.footprint.total_bytes / 2e9 == pytest.approx(whole, rel=0.01)
    # Some count the embedding as passed, some do not.
    embedding = model.footprint.embedding_bytes / 2e9
    assert min(abs(model.active_numbers / 1e9 + n * embedding - active) for n in (-1, 0, 1)) < 0.035 * active + 0.05
    assert model.footprint.flops_per_token == 2 * model.active_numbers


def test_formats_order_by_their_bytes() -> None:
    config = published_config("deepseek-v3")
    total = {w: architecture(config, name="d", weights=w).footprint.total_bytes for w in WEIGHT_FORMATS}
    assert total["checkpoint"] == total["fp8"] < total["bf16"]
    assert max(total["nvfp4"], total["mxfp4"], total["int4"]) < 0.6 * total["fp8"]
    expert = architecture(config, name="d", weights="nvfp4").footprint.expert_bytes
    assert expert == 3 * 7168 * 2048 * 9 // 16


def test_latent_kv_of_deepseek_and_windows_of_gpt_oss() -> None:
    deepseek = architecture(published_config("deepseek-v3"), name="d")
    (group,) = deepseek.footprint.kv_groups
    assert group.bytes_per_token == 61 * 576 * 2
    assert deepseek.scores[0].decode_flops == 61 * 2 * 128 * (576 + 512)
    assert deepseek.scores[0].prefill_flops == 61 * 2 * 128 * (128 + 64 + 128)
    gpt = architecture(published_config("gpt-oss-120b"), name="g")
    assert [(g.window, s.decode_flops) for g, s in zip(gpt.footprint.kv_groups, gpt.scores, strict=True)] == [
        (128, 18 * 2 * 64 * 2 * 64),
        (0, 18 * 2 * 64 * 2 * 64),
    ]


def test_what_cannot_be_planned_is_refused_in_one_line() -> None:
    with pytest.raises(ConfigError, match="use one of: checkpoint, bf16"):
        architecture(published_config("mixtral-8x7b"), name="m", weights="int3")
    with pytest.raises(ConfigError, match="mixtral-8x22b"):
        published_config("mixtral-7x8b")
    model = architecture(published_config("qwen3-30b-a3b"), name="q")
    setting = Setting(model=model, topology=parse_topology("EP6DP1[adp=2,atp=3]"), hardware=H200)
    with pytest.raises(TopologyError, match="use one of 1, 2"):
        plan_pool(setting, WORKLOAD)
    setting = replace(setting, topology=parse_topology("EP2DP1"))
    with pytest.raises(TopologyError, match="at most 40,960"):
        plan_pool(setting, Workload(isl=40_000, osl=1_000, concurrency=1))


def test_loads_of_matrices_are_counted_once() -> None:
    model = architecture(load_config(checkpoint("T-DS3")), name="t")
    report = load_weights(checkpoint("T-DS3"), load_config(checkpoint("T-DS3")), LoadOptions(dtype=torch.float32))
    held = model.total_numbers * 4 + report.weights.embedding.nbytes
    rest = report.bytes_held - held  # norms, and biases of the router that only choose
    assert 0 < rest < 0.02 * report.bytes_held
