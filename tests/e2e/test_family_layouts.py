"""Layers, tensors and switches in which checkpoints of one family differ, through the whole runtime."""

import json

import pytest
import torch

from moewe.models.families import load_config
from moewe.models.footprint import cache_groups
from tests.support.comparison import compare_half_precision, compare_with_reference
from tests.support.fixtures import (
    checkpoint,
    copy_checkpoint,
    edit_config,
    random_prompt,
    read_tensors,
    reference_logits,
    rewrite_tensors,
)
from tests.support.harness import Group, generate, greedy
from tests.support.numerics import LOGITS_AGAINST_REFERENCE, assert_within
from tests.support.setups import Setup

pytestmark = pytest.mark.slow

LENGTHS = (33, 5)


def check(path, reference=None, *, topology="EP2DP1", **setup):
    """Run two prompts in chunks of 7 and compare them with transformers; return the outcomes."""
    prompts = [random_prompt(length, seed=length) for length in LENGTHS]
    run = generate(path, prompts, setup=Setup(topology=topology, max_chunk_tokens=7, **setup), params=greedy(16))
    for outcome in run.outcomes:
        compare_with_reference(reference or path, outcome)
        assert len(outcome.tokens) == 16
    return run.outcomes


# --- P-LOAD-06 --------------------------------------------------------------------------------------------------------
def test_plain_bf16_weights_of_gpt_oss():
    """Stacked, transposed, gate and up interleaved, with biases; activations reach the limit."""
    path = checkpoint("T-GOS", dtype="bfloat16")
    tensors = read_tensors(path)
    assert tensors["model.layers.0.mlp.experts.gate_up_proj"].shape == (8, 64, 192)
    check(path)
    outcome = generate(path, [random_prompt(33)], setup=Setup(topology="EP2DP1", dtype="bfloat16"), params=greedy(1))
    compare_half_precision(path, outcome.outcomes[0].logits_of_all(), random_prompt(33))


# --- P-LOAD-07 --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("num_dense", [0, 1, 3])
def test_dense_leading_layers(num_dense):
    path = checkpoint("T-DS3", first_k_dense_replace=num_dense)
    with Group(path, Setup(topology="EP2DP1", max_chunk_tokens=7)) as group:
        outcome = group.submit("0", random_prompt(33), greedy(16))
        group.run()
        assert group.model.moe_layers == tuple(range(num_dense, 4))
        assert all(worker.counters.expert_tokens.shape[0] == 4 - num_dense for worker in group.workers)
        assert all(step.expert_rows.shape == (2, 4 - num_dense) for step in group.steps)
    compare_with_reference(path, outcome)


@pytest.mark.parametrize(
    ("name", "changes", "moe_layers"),
    [
        ("T-ERN", {"moe_layer_start_index": 0, "moe_layer_interval": 2}, (1, 3)),
        ("T-ERN", {"moe_layer_end_index": 2}, (1, 2)),
        ("T-GLL", {"mlp_layer_types": ["sparse", "dense", "sparse"]}, (0, 2)),
        ("T-LL4", {"moe_layers": [0, 3]}, (0, 3)),
        ("T-LL4", {"interleave_moe_layer_step": 1}, (0, 1, 2, 3)),
    ],
    ids=["interval", "end", "list-of-kinds", "list", "all"],
)
def test_moe_layers_in_other_places(name, changes, moe_layers):
    path = checkpoint(name, **changes)
    assert load_config(path).moe_layers == moe_layers
    check(path)


# --- P-LOAD-09 --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["T-DS3", "T-GLM"])
def test_layers_that_predict_further_tokens_are_not_read(name, caplog):
    """Their tensors are larger than all others together, and the bytes read do not grow."""
    plain = checkpoint(name)
    number = load_config(plain).num_layers

    def add_layer(tensors):
        last = f"model.layers.{number - 1}."
        own = {n.removeprefix(last): t.clone() for n, t in tensors.items() if n.startswith(last)}
        extra = {f"model.layers.{number}.{n}": t for n, t in own.items()}
        for part, width in (("eh_proj", 128), ("enorm", 64), ("hnorm", 64), ("shared_head.norm", 64)):
            extra[f"model.layers.{number}.{part}.weight"] = torch.full((64, width), torch.nan)
        extra[f"model.layers.{number}.shared_head.head.weight"] = torch.full((512, 4096), torch.nan)
        extra[f"model.layers.{number}.embed_tokens.weight"] = torch.full((512, 64), torch.nan)
        return tensors | extra

    folder = rewrite_tensors(copy_checkpoint(plain), add_layer)
    edit_config(folder, num_nextn_predict_layers=1)
    with Group(plain, Setup()) as group:
        read = group.loaded[0].weight_bytes_read
    caplog.clear()
    with caplog.at_level("INFO"), Group(folder, Setup()) as group:
        outcome = group.submit("0", random_prompt(33), greedy(16))
        group.run()
        assert group.loaded[0].weight_bytes_read <= read + 65536
    compare_with_reference(plain, outcome)
    lines = [record.getMessage() for record in caplog.records if f"layers.{number}." in record.getMessage()]
    assert len(lines) == 1 and "left alone" in lines[0], lines


# --- P-LOAD-10 --------------------------------------------------------------------------------------------------------
def test_a_selection_bias_chooses_and_does_not_weigh():
    def change(tensors):
        for name, tensor in tensors.items():
            if name.endswith("e_score_correction_bias"):
                tensor.zero_()
                tensor[0], tensor[4:8] = 5.0, -5.0
            elif name.endswith("mlp.gate.weight"):
                tensor[1:] = -tensor[1:].abs()
        return tensors

    path = rewrite_tensors(copy_checkpoint(checkpoint("T-DS3")), change)
    with Group(path, Setup(topology="EP2DP1")) as group:
        outcome = group.submit("0", random_prompt(256), greedy(16))
        group.run()
        per_expert = group.rows_per_expert()
        rows = sum(sum(step.rows) for step in group.steps)
    compare_with_reference(path, outcome)
    assert (per_expert[:, 0] == rows).all(), "expert 0 is in every choice"
    assert (per_expert[:, 4:8] == 0).all(), "group 1 is in none"


# --- P-LOAD-11 --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("factor", [1.0, 2.5])
@pytest.mark.parametrize("name", ["T-DS3", "T-GLM"])
def test_the_scaling_factor_counts_once_with_and_without_renormalisation(name, norm, factor):
    check(checkpoint(name, norm_topk_prob=norm, routed_scaling_factor=factor))


# --- P-LOAD-13 --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("factor", [30.0, -30.0])
def test_a_shared_gate_of_large_magnitude(factor):
    """Wide open or shut for most tokens: a gate left out, or without its sigmoid, would show."""

    def change(tensors):
        gates = {name: factor * t.abs() for name, t in tensors.items() if name.endswith("shared_expert_gate.weight")}
        assert len(gates) == 2
        return tensors | gates

    path = rewrite_tensors(copy_checkpoint(checkpoint("T-QW2")), change)
    moved = reference_logits(path, random_prompt(33)) - reference_logits(checkpoint("T-QW2"), random_prompt(33))
    assert moved.abs().max() > 0.1
    check(path)


# --- P-LOAD-15 --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("topology", ["EP1DP1", "EP4DP1"])
def test_latent_attention_without_a_latent_of_queries(topology):
    path = checkpoint("T-DS2")
    assert "model.layers.0.self_attn.q_proj.weight" in read_tensors(path)
    check(path, topology=topology)
    (group,) = cache_groups(load_config(path), dtype="float32")
    assert group.kind == "latent"
    assert group.bytes_per_token() == 3 * (32 + 8) * 4, "the latent and one rotated part a layer, in fp32"


def test_kimi_k2_is_deepseek_v3_by_another_name():
    plain = checkpoint("T-DS3")
    folder = edit_config(copy_checkpoint(plain), model_type="kimi_k2", architectures=["DeepseekV3ForCausalLM"])
    check(folder, plain)


def test_the_text_part_of_a_llama4_with_eyes():
    plain = checkpoint("T-LL4")
    folder = rewrite_tensors(
        copy_checkpoint(plain),
        lambda tensors: (
            {f"language_model.{name}": tensor for name, tensor in tensors.items()}
            | {
                "vision_model.class_embedding": torch.zeros(8),
                "multi_modal_projector.linear_1.weight": torch.zeros(64, 8),
            }
        ),
    )
    text = json.loads((folder / "config.json").read_text())
    (folder / "config.json").unlink()
    edit_config(
        folder,
        architectures=["Llama4ForConditionalGeneration"],
        model_type="llama4",
        text_config=text,
        vision_config={"model_type": "llama4_vision_model"},
    )
    check(folder, plain)


# --- P-LOAD-17 --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["T-GRA", "T-GRS"])
def test_multipliers_and_log_probabilities_behind_them(name):
    path = checkpoint(name)
    config = json.loads((path / "config.json").read_text())
    assert [config[key] for key in ("embedding_multiplier", "residual_multiplier", "logits_scaling")] == [12, 0.22, 6]
    run = generate(path, [random_prompt(33)], params=greedy(16, logprobs=5))
    (outcome,) = run.outcomes
    compare_with_reference(path, outcome)
    check_logprobs(path, outcome)


def check_logprobs(path, outcome):
    """Compare the log-probabilities that a request got with those of the reference's logits."""
    reference = reference_logits(path, (outcome.prompt + outcome.tokens)[:-1]).log_softmax(-1)
    assert len(outcome.logprobs) == 16
    for step, entry in enumerate(outcome.logprobs):
        row = reference[len(outcome.prompt) - 1 + step]
        assert entry.token_ids[0] == outcome.tokens[step]
        assert_within(torch.tensor(entry.logprobs), row[list(entry.token_ids)], LOGITS_AGAINST_REFERENCE)


# --- P-LOAD-18 --------------------------------------------------------------------------------------------------------
def overflowing():
    """A bf16 checkpoint whose hidden state passes what fp16 can hold."""

    def change(tensors):
        for name, tensor in tensors.items():
            if name.endswith("layers.1.mlp.experts.3.down_proj.weight"):
                tensor.mul_(3e5)
        return tensors

    return rewrite_tensors(copy_checkpoint(checkpoint("T-DS2", dtype="bfloat16")), change)


def test_values_beyond_fp16_end_the_request_with_an_error_not_with_filler():
    path = overflowing()
    prompt = random_prompt(33)
    wide = generate(path, [prompt], setup=Setup(dtype="bfloat16"), params=greedy(8)).outcomes[0]
    assert wide.finish_reason == "length" and wide.logits_of_all().isfinite().all()
    narrow = generate(path, [prompt], setup=Setup(dtype="float16", keep_logits=False), params=greedy(8)).outcomes[0]
    assert narrow.finish_reason == "error" and not narrow.tokens
    assert "finite" in narrow.error


def test_auto_takes_the_format_of_the_checkpoint():
    assert load_config(overflowing()).dtype == "bfloat16"


# --- biases and ties that few checkpoints have ------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("T-ERN", {"use_bias": True}),
        ("T-ERN", {"tie_word_embeddings": True}),
        ("T-DS3", {"attention_bias": True}),
        ("T-DS3", {"q_lora_rank": None}),
        ("T-DS3", {"rope_interleave": False}),
        ("T-DS2", {"attention_bias": True}),
        ("T-GLM", {"n_group": 4, "topk_group": 2}),
        ("T-GRA", {"attention_bias": True}),
        ("T-GRS", {"tie_word_embeddings": True}),
        ("T-GRS", {"shared_intermediate_size": 0}),
        ("T-HUN", {"attention_bias": True}),
        ("T-PHI", {"lm_head_bias": False, "attention_bias": False}),
        ("T-FLX", {"norm_topk_prob": True, "attention_bias": True}),
        ("T-DOT", {"n_group": 4, "topk_group": 1, "attention_bias": True}),
        ("T-LL4", {"attention_bias": True, "use_qk_norm": False}),
        ("T-LL4", {"attn_temperature_tuning": False}),
        ("T-MM2", {"rotary_dim": 32}),
        ("T-Q2D", {"tie_word_embeddings": True}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_switches_that_few_checkpoints_turn(name, changes):
    check(checkpoint(name, **changes), topology="EP1DP1" if name == "T-Q2D" else "EP2DP1")
