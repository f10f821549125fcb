"""The fixtures themselves, against transformers alone: clear choices, oddities that show, chains that say a script."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.chain import EOS, FIRST_ID, byte_id, chain
from tests.support.fixtures import (
    FIXTURES,
    MOE_FIXTURES,
    checkpoint,
    copy_checkpoint,
    edit_config,
    random_prompt,
    reference_gaps,
    reference_greedy,
    reference_logits,
    rewrite_tensors,
)
from tests.support.fixtures_table import YARN
from tests.support.numerics import LOGITS_AGAINST_REFERENCE

PHI_ROTARY = FIXTURES["T-PHI"][1]["rope_parameters"]
ODD_FIELDS = [
    ("T-QW2", {"norm_topk_prob": True}),
    ("T-DS2", {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.0}}),
    ("T-DS2", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
    ("T-DS2-groups", {"topk_method": "greedy"}),
    ("T-DS2-groups", {"routed_scaling_factor": 1.0}),
    ("T-DS3", {"n_group": 1, "topk_group": 1}),
    ("T-DS3", {"topk_group": 3}),
    ("T-DS3", {"rope_interleave": False}),
    ("T-DS3", {"routed_scaling_factor": 1.0}),
    ("T-DS3", {"norm_topk_prob": False}),
    ("T-GLL", {"routed_scaling_factor": 1.0}),
    ("T-GOS", {"sliding_window": 4096}),
    ("T-GOS", {"sliding_window": 9}),
    ("T-GOS", {"swiglu_limit": 7.0}),
    ("T-GOS", {"swiglu_alpha": 1.0}),
    ("T-GRA", {"embedding_multiplier": 1.0}),
    ("T-GRA", {"attention_multiplier": 0.25}),
    ("T-GRA", {"residual_multiplier": 1.0}),
    ("T-GRA", {"logits_scaling": 1.0}),
    ("T-PHI", {"router_jitter_noise": 0.01}),
    ("T-PHI", {"rope_parameters": PHI_ROTARY | {"long_factor": PHI_ROTARY["short_factor"]}}),
    ("T-PHI", {"rope_parameters": PHI_ROTARY | {"long_mscale": PHI_ROTARY["short_mscale"]}}),
    ("T-LL4", {"attention_chunk_size": 4096}),
    ("T-LL4", {"attention_chunk_size": 17}),
    ("T-LL4", {"attn_temperature_tuning": False}),
    ("T-LL4", {"use_qk_norm": False}),
    ("T-LL4", {"no_rope_layers": [1, 1, 1, 1]}),
    ("T-LL4", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
    ("T-MIS", {"sliding_window": 9}),
    ("T-SOL", {"topk_group": 3}),
    ("T-SOL", {"norm_topk_prob": False}),
    ("T-SOL", {"routed_scaling_factor": 1.0}),
    ("T-SOL", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
    ("T-MM2", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 1.0}}),
]
# Tensors that a loader could forget or a decoder skip: each moves the logits.
ODD_TENSORS = [
    ("T-GOS", "self_attn.sinks"),
    ("T-GOS", "mlp.router.bias"),
    ("T-GOS", "experts.gate_up_proj_bias"),
    ("T-GOS", "experts.down_proj_bias"),
    ("T-GOS", "o_proj.bias"),
    ("T-GLM", "e_score_correction_bias"),
    ("T-GLM", "q_proj.bias"),
    ("T-GLL", "e_score_correction_bias"),
    ("T-DS3", "e_score_correction_bias"),
    ("T-DOT", "e_score_correction_bias"),
    ("T-MM2", "e_score_correction_bias"),
    ("T-SOL", "e_score_correction_bias"),
    ("T-SOL", "q_proj.bias"),
    ("T-SOL", "shared_experts.down_proj.weight"),
    ("T-ERN", "e_score_correction_bias"),
    ("T-PHI", "input_layernorm.bias"),
    ("T-PHI", "model.norm.bias"),
    ("T-PHI", "lm_head.bias"),
    ("T-PHI", "o_proj.bias"),
    ("T-HUN", "query_layernorm.weight"),
    ("T-DOT", "k_norm.weight"),
    ("T-Q2D", "v_proj.bias"),
]


@pytest.mark.slow
@pytest.mark.parametrize("name", FIXTURES)
def test_greedy_choices_of_fixtures_are_clear(name):
    assert min(reference_gaps(checkpoint(name), random_prompt(33), 16)) > 1e-3


def test_the_mended_reference_of_phimoe_differs_only_beyond_the_original_length():
    path = checkpoint("T-PHI")
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    for length, same in ((40, True), (41, False)):
        prompt = random_prompt(length)
        with torch.no_grad():
            logits = plain(input_ids=torch.tensor([prompt])).logits[0]
        assert torch.equal(logits, reference_logits(path, prompt)) is same


def check_moved(name, changed):
    prompt = random_prompt(49)
    difference = (reference_logits(changed, prompt) - reference_logits(checkpoint(name), prompt)).abs().max()
    assert difference > 50 * LOGITS_AGAINST_REFERENCE


@pytest.mark.slow
@pytest.mark.parametrize(("name", "changes"), ODD_FIELDS, ids=lambda v: v if isinstance(v, str) else "-".join(v))
def test_what_is_odd_about_a_family_shows_in_its_logits(name, changes):
    check_moved(name, edit_config(copy_checkpoint(checkpoint(name)), **changes))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tensor"), ODD_TENSORS)
def test_tensors_that_few_families_have_show_in_the_logits(name, tensor):
    def change(tensors):
        assert any(key.endswith(tensor) for key in tensors)
        return {
            key: torch.full_like(value, 1.0 if "norm.weight" in key else 0.0) if key.endswith(tensor) else value
            for key, value in tensors.items()
        }

    check_moved(name, rewrite_tensors(copy_checkpoint(checkpoint(name)), change))


@pytest.mark.slow  # as are all of this file that only a change of a fixture or of transformers can break
@pytest.mark.parametrize("name", MOE_FIXTURES)
def test_both_layouts_are_the_same_model_to_transformers(name):
    folders = [checkpoint(name, stacked=stacked) for stacked in (False, True)]
    single, stacked = (reference_logits(folder, random_prompt(5)) for folder in folders)
    assert torch.equal(single, stacked)


def test_a_chain_says_its_script_after_any_prompt():
    script = ["AB", "CD", "AB", b"\xf0\x9f\x98\x80", b"\xc4\x8f", " ab ", "<|tag|>", "ü<0x41>", 5, 9, 7]
    made = chain(script)
    tokenizer = AutoTokenizer.from_pretrained(made.path)
    assert made.text == "ABCDAB😀ď ab <|tag|>ü<0x41>\x02\x06\x04" == tokenizer.decode(made.token_ids[:-1])
    for prompt in ("x", "Hé, AB <s> 😀", "5"):
        ids = tokenizer(prompt).input_ids
        assert all(token < FIRST_ID for token in ids) and tokenizer.decode(ids) == prompt
        assert reference_greedy(made.path, ids, len(made.token_ids)) == made.token_ids
    assert made.token_ids[-4:] == [5, 9, 7, EOS]
    assert reference_gaps(made.path, [byte_id(65)], 1)[0] > 100


def test_a_looping_chain_goes_on():
    made = chain(["a", "b"], loop=True)
    assert reference_greedy(made.path, [byte_id(65)], 5) == [FIRST_ID, FIRST_ID + 1] * 2 + [FIRST_ID]


def test_a_chain_is_first_order():
    with pytest.raises(ValueError):
        chain([5, "a", 5])
