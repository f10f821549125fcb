"""Checkpoints whose weights are stored in blocks with scales: the numbers that they stand for, at every topology."""

import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from moewe.quant import QuantTensor
from tests.support.comparison import compare_half_precision, compare_with_reference
from tests.support.fixtures import checkpoint, edit_config, random_prompt, read_tensors, reference_logits
from tests.support.harness import Group, generate, greedy
from tests.support.native import needs_native
from tests.support.numerics import LOGITS_AGAINST_REFERENCE
from tests.support.quantised import fp8_blocks, fp8_checkpoint, mxfp4_blocks, mxfp4_checkpoint
from tests.support.setups import Setup

TOPOLOGIES = [
    "EP1DP1",
    "EP2DP1",
    pytest.param("EP4DP1", marks=pytest.mark.slow),
    pytest.param("EP2DP2", marks=pytest.mark.slow),
]
LENGTHS = (33, 1, 17)


def check(quantised, plain, topology):
    """Run the quantised folder and compare it with transformers on the plain one."""
    prompts = [random_prompt(length, seed=length) for length in LENGTHS]
    run = generate(quantised, prompts, setup=Setup(topology=topology, max_chunk_tokens=7), params=greedy(16))
    for outcome in run.outcomes:
        compare_with_reference(plain, outcome)


def quant_tensors(group):
    """Return what the ranks of a group hold quantised: stacks of experts, matrices of dense layers."""
    return [
        value
        for worker in group.workers
        for layer in worker.decoder._weights.layers
        for part in (layer.moe.experts if layer.moe is not None else None, layer.dense)
        if part is not None
        for value in (part.w13, part.w2)
        if isinstance(value, QuantTensor)
    ]


# --- P-LOAD-19 --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_fp8_blocks_that_do_not_divide_the_weights(topology):
    """Every matrix has cut blocks: [64, 64] in blocks of 48 x 40, experts of 32, latents of 32 + 8."""
    check(*fp8_checkpoint("T-DS3", (48, 40)), topology)


def test_fp8_blocks_of_128_with_a_last_block_cut_short():
    """A dense layer of 1000 x 136 and experts of 192 x 136, as the block size of published checkpoints cuts them."""
    quantised, plain = fp8_checkpoint(
        "T-DS3", (128, 128), hidden_size=136, intermediate_size=1000, moe_intermediate_size=192, num_hidden_layers=2
    )
    scales = read_tensors(quantised)["model.layers.0.mlp.up_proj.weight_scale_inv"]
    assert scales.shape == (8, 2) and len(scales.unique()) == 16
    check(quantised, plain, "EP2DP1")


def test_fp8_of_minimax_as_it_is_published():
    """Only in fp8; heads of q, k and v in three matrices, the gate and its bias plain."""
    quantised, plain = fp8_checkpoint("T-MM2", (48, 40))
    section = {"quant_method": "fp8", "weight_block_size": [48, 40], "fmt": "float8_e4m3fn"}
    section["modules_to_not_convert"] = ["gate", "e_score_correction_bias", "lm_head"]
    check(edit_config(quantised, quantization_config=section), plain, "EP2DP1")


def test_fp8_weights_are_held_as_they_are_stored():
    quantised, _ = fp8_checkpoint("T-DS3", (48, 40))
    with Group(quantised, Setup(topology="EP2DP1")) as group:
        held = quant_tensors(group)
    assert len(held) == 2 * 4 * 2  # ranks, layers, two stacks each
    assert {value.data.dtype for value in held} == {torch.float8_e4m3fn}


# --- gpt-oss as it is published ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_mxfp4_experts(topology):
    check(*mxfp4_checkpoint("T-GOS"), topology)


def test_mxfp4_experts_are_held_as_they_are_stored():
    quantised, _ = mxfp4_checkpoint("T-GOS")
    stored = sum(t.nbytes for name, t in read_tensors(quantised).items() if name.endswith(("_blocks", "_scales")))
    with Group(quantised, Setup(topology="EP4DP1")) as group:
        assert sum(value.num_bytes for value in quant_tensors(group)) == stored


# --- native kernels ---------------------------------------------------------------------------------------------------
IN_BF16 = {
    "mxfp4": lambda: mxfp4_checkpoint("T-GOS"),
    "fp8 of heads": lambda: fp8_checkpoint("T-MM2", (128, 128)),
    "fp8 of latents": lambda: fp8_checkpoint("T-DS3", (128, 128)),
    "fp8 of blocks that divide nothing": lambda: fp8_checkpoint("T-DS3", (24, 40)),
    "fp8 of widths that 32 does not divide": lambda: fp8_checkpoint(
        "T-DS3", (128, 128), hidden_size=136, intermediate_size=1000, moe_intermediate_size=192, num_hidden_layers=2
    ),
}


@needs_native
@pytest.mark.parametrize("topology", ["EP1DP1", pytest.param("EP2DP1", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", IN_BF16)
def test_native_kernels_multiply_what_is_stored(name, topology):
    """In bf16 codes are packed and counted as such, and logits are those of the numbers in bf16 to the last bit."""
    quantised, plain = IN_BF16[name]()
    setup = Setup(topology=topology, dtype="bfloat16", max_chunk_tokens=7)
    with Group(quantised, setup) as group:
        outcome = group.submit("one", random_prompt(33), greedy(4))
        group.run()
        assert not quant_tensors(group)
        kinds = [weights.weight_kinds for weights in group.loaded]
    assert all(f"routed/{'mxfp4' if name == 'mxfp4' else 'fp8_block'}" in kind for kind in kinds)
    expected = generate(plain, [random_prompt(33)], setup=setup, params=greedy(4)).outcomes[0]
    assert outcome.tokens == expected.tokens
    assert torch.equal(outcome.logits_of_all(), expected.logits_of_all())


@pytest.mark.parametrize("name", ["mxfp4", "fp8 of heads"])
def test_torch_multiplies_where_there_are_no_kernels(name, monkeypatch):
    monkeypatch.setattr("moewe.quant.packed.load", lambda: None)
    quantised, plain = IN_BF16[name]()
    prompt = random_prompt(33)
    with Group(quantised, Setup(dtype="bfloat16")) as group:
        outcome = group.submit("one", prompt, greedy(1))
        group.run()
        assert quant_tensors(group)
    compare_half_precision(plain, outcome.logits_of_all(), prompt)


# --- the packing of these tests ---------------------------------------------------------------------------------------
def test_packing_keeps_numbers_near():
    weight = torch.randn(50, 96, generator=torch.Generator().manual_seed(0))
    data, scales, numbers = fp8_blocks(weight, (48, 40))
    assert scales.shape == (2, 3) and torch.equal(numbers[49, 95], data[49, 95].float() * scales[1, 2])
    assert (numbers - weight).abs().max() < weight.abs().max() / 16
    packed, exponents, numbers = mxfp4_blocks(weight)
    assert packed.shape == (50, 3, 16) and exponents.shape == (50, 3)
    assert (numbers - weight).abs().max() < weight.abs().max() / 4


def test_packed_mxfp4_is_read_as_transformers_reads_it():
    """So that the packing here and the reading of the runtime cannot share a mistake."""
    weight = torch.randn(50, 96, generator=torch.Generator().manual_seed(1))
    packed, exponents, numbers = mxfp4_blocks(weight)
    theirs = convert_moe_packed_tensors(packed[None], exponents[None], dtype=torch.float32)
    assert torch.equal(theirs[0].T, numbers)


@pytest.mark.parametrize(
    ("name", "make"), [("T-DS3", lambda n: fp8_checkpoint(n, (48, 40))), ("T-GOS", mxfp4_checkpoint)]
)
def test_quantising_changes_the_logits(name, make):
    """So that a runtime that reads the unquantised numbers from somewhere could not pass."""
    _, plain = make(name)
    prompt = random_prompt(33)
    moved = (reference_logits(plain, prompt) - reference_logits(checkpoint(name), prompt)).abs().max()
    assert moved > 50 * LOGITS_AGAINST_REFERENCE
