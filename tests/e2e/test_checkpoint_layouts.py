"""Checkpoints whose layout once went wrong elsewhere, through the whole runtime: tied heads, stacks, mixed layers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.comparison import compare_with_reference
from tests.support.fixtures import checkpoint, random_prompt, read_tensors
from tests.support.harness import Group, generate, greedy
from tests.support.setups import Setup

ROOT = Path(__file__).parents[2]
TOPOLOGIES = ("EP1DP1", "EP2DP1", "EP4DP1", "EP2DP2", "EP4DP2")
LENGTHS = (33, 1, 17, 50)


# --- P-LOAD-01 --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("topology", ["EP1DP1", "EP2DP1"])
def test_a_tied_head_that_is_not_in_the_files_equals_transformers(topology):
    path = checkpoint("T-QW3", tie_word_embeddings=True)
    assert "lm_head.weight" not in read_tensors(path)
    run = generate(path, [random_prompt(33), random_prompt(5, seed=1)], setup=Setup(topology=topology))
    for outcome in run.outcomes:
        compare_with_reference(path, outcome)
        assert len(outcome.tokens) == 16


# --- P-LOAD-05 --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_stacked_experts_give_the_same_bits_as_single_ones(topology):
    folders = [checkpoint("T-QW3", stacked=stacked) for stacked in (False, True)]
    names = [set(read_tensors(folder)) for folder in folders]
    assert any("experts.7." in name for name in names[0])
    assert any(name.endswith("experts.gate_up_proj") for name in names[1])
    prompts = [random_prompt(length, seed=length) for length in LENGTHS]
    single, stacked = (
        generate(folder, prompts, setup=Setup(topology=topology), params=greedy(4)) for folder in folders
    )
    for ours, theirs in zip(stacked.outcomes, single.outcomes, strict=True):
        assert ours.tokens == theirs.tokens
        assert torch.equal(ours.logits_of_all(), theirs.logits_of_all())


@pytest.mark.parametrize(
    ("name", "stacked"),
    [("T-QW3", False), ("T-QW3", True), ("T-DS3", False), ("T-GOS", True), ("T-LL4", True), ("T-GRA", True)],
)
def test_a_rank_holds_the_bytes_of_its_own_experts(name, stacked):
    path = checkpoint(name, stacked=stacked)
    tensors = read_tensors(path)
    total = sum(tensor.nbytes for tensor in tensors.values())
    experts = sum(tensor.nbytes for name, tensor in tensors.items() if ".experts." in name)
    with Group(path, Setup(topology="EP4DP1")) as group:
        for loaded, worker in zip(group.loaded, group.workers, strict=True):
            assert loaded.weight_bytes == total - experts * 3 // 4
            assert loaded.weight_bytes_read <= 1.02 * loaded.weight_bytes + 65536  # headers of a tiny file
            held = [layer.moe.experts for layer in worker.decoder._weights.layers if layer.moe is not None]
            parts = [part for each in held for part in (each.w13, each.w2, each.b13, each.b2) if part is not None]
            storages = [part.untyped_storage().nbytes() for part in parts]
            assert sum(storages) == experts // 4, "a slice keeps the whole alive"


PEAK = """
import sys, torch
from pathlib import Path
from moewe.models.families import load_config
from moewe.models.loading import LoadOptions, load_weights
from moewe.moe.wide_ep import linear_placement
status = lambda name: int(Path("/proc/self/status").read_text().split(name + ":")[1].split()[0]) << 10
path = Path(sys.argv[1])
config = load_config(path)
placement = linear_placement(len(config.moe_layers), config.moe.routing.num_experts, 4)
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
before = status("VmRSS")
report = load_weights(path, config, LoadOptions(placement=placement, rank=1, dtype=torch.float32, num_threads=2))
print(report.bytes_held, status("VmHWM") - before)
"""


@pytest.mark.spawn
@pytest.mark.slow
@pytest.mark.parametrize("stacked", [False, True], ids=["single", "stacked"])
def test_the_peak_of_a_loading_rank_is_far_below_all_experts(stacked):
    path = checkpoint("T-QW3", stacked=stacked, moe_intermediate_size=8192)
    experts = sum(tensor.nbytes for name, tensor in read_tensors(path).items() if ".experts." in name)
    command = [sys.executable, "-c", PEAK, str(path)]
    held, peak = map(int, subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.split())
    assert experts // 4 < held < experts // 3
    assert 0.9 * held < peak < experts // 2


# --- P-LOAD-08 --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("topology", ["EP1DP1", "EP2DP1", "EP4DP1"])
def test_dense_layers_among_moe_layers_equal_transformers(topology):
    path = checkpoint("T-QW2", num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3])
    with Group(path, Setup(topology=topology)) as group:
        outcomes = [group.submit(str(length), random_prompt(length), greedy(16)) for length in (33, 4)]
        group.run()
        assert group.model.moe_layers == (1, 5)
        assert all(step.expert_rows.shape == (group.num_ranks, 2) for step in group.steps)
    for outcome in outcomes:
        compare_with_reference(path, outcome)
        assert len(outcome.tokens) == 16
