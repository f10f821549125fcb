"""config.json to `ModelConfig`: every family, both spellings, and refusals in one line."""

import json

import pytest

from moewe.models.config import ConfigError
from moewe.models.families import FAMILIES, load_config
from tests.support.fixtures import FIXTURES, checkpoint, copy_checkpoint, edit_config, edit_json

DELETE = object()


def edited(name, **changes):
    folder = copy_checkpoint(checkpoint(name))
    return edit_config(
        folder,
        remove=[key for key, value in changes.items() if value is DELETE],
        **{key: value for key, value in changes.items() if value is not DELETE},
    )


def refusal(folder):
    with pytest.raises(ConfigError) as caught:
        load_config(folder)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 400, message
    return message


def test_every_family_has_a_fixture():
    assert {load_config(checkpoint(name)).family for name in FIXTURES} == set(FAMILIES)


def test_mixtral_fields_are_normalised():
    config = load_config(checkpoint("T-MIX"))
    assert (config.num_layers, config.hidden_size, config.vocab_size) == (2, 64, 512)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 16)
    assert config.moe.routing.num_experts == 8 and config.moe.routing.top_k == 2
    assert config.moe.routing.scoring == "softmax" and config.moe.routing.renormalize
    assert config.moe.expert_width == 96 and config.moe.shared_width == 0
    assert config.moe_layers == (0, 1) and config.rotary.theta == 1e6 and config.dtype == "float32"
    assert config.bos_token_id == 1 and config.eos_token_ids == (2,)


def test_glm4_moe_fields_are_normalised():
    config = load_config(checkpoint("T-GLM-demo"))
    assert config.moe.routing.scoring == "sigmoid" and config.moe.routing.scaling_factor == 12.0
    assert config.moe.shared_width == 4 * 16 and config.moe.selection_bias and not config.moe.shared_gate
    assert config.rotary.rotary_dim == config.head_dim == 16
    assert config.head_tied and config.qk_norm is None
    config = load_config(edited("T-GLM-demo", use_qk_norm=True, first_k_dense_replace=1, attention_bias=True))
    assert config.qk_norm == "head" and config.moe_layers == (1,) and config.attention_bias and not config.output_bias


def test_glm4_moe_rotates_half_of_a_head_by_default():
    config = load_config(edited("T-GLM-demo", rope_parameters=DELETE, rope_theta=10000.0))
    assert config.rotary.rotary_dim == 8


def test_sparse_step_and_dense_list_choose_layers():  # P-LOAD-08
    config = load_config(checkpoint("T-QW2", num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3]))
    assert config.moe_layers == (1, 5)
    assert [config.is_moe(layer) for layer in range(6)] == [False, True, False, False, False, True]
    assert config.dense_width == 96


def test_a_model_whose_layers_are_all_dense_has_no_experts():
    assert load_config(edited("T-QW3", mlp_only_layers=[0, 1])).moe is None


def test_both_generations_of_spelling_mean_the_same():
    new = load_config(checkpoint("T-QW3"))
    old = edited(
        "T-QW3",
        rope_parameters=DELETE,
        rope_theta=10000.0,
        rope_scaling=None,
        dtype=DELETE,
        torch_dtype="float32",
        num_local_experts=DELETE,
        num_experts=8,
    )
    assert load_config(old) == new
    assert load_config(edited("T-QW3", dtype="torch.bfloat16")).dtype == "bfloat16"


def test_null_means_absent():
    config = load_config(edited("T-MIX", num_key_value_heads=None, head_dim=None))
    assert config.num_kv_heads == 4 and config.head_dim == 16


def test_end_tokens_come_from_the_generation_config_first():
    folder = edited("T-MIX")
    edit_json(folder / "generation_config.json", {"eos_token_id": [2, 9]})
    assert load_config(folder).eos_token_ids == (2, 9)
    edit_json(folder / "generation_config.json", {"eos_token_id": None})
    assert load_config(folder).eos_token_ids == (2,)
    (folder / "generation_config.json").unlink()
    assert load_config(folder).eos_token_ids == (2,)
    assert load_config(edit_config(folder, eos_token_id=None)).eos_token_ids == ()


@pytest.mark.parametrize("architectures", [DELETE, None, ["FooForCausalLM"], [], "Mixtral", [3]])
def test_model_type_decides_when_architectures_do_not_help(architectures):  # P-LOAD-26
    assert load_config(edited("T-MIX", architectures=architectures)).family == "mixtral"


def test_architectures_decide_when_model_type_is_absent():
    assert load_config(edited("T-MIX", model_type=DELETE)).family == "mixtral"


@pytest.mark.parametrize("model_type", ["foo", "", 7, ["mixtral"], "llama"])
def test_wrong_model_type_is_refused(model_type):  # P-LOAD-26
    message = refusal(edited("T-MIX", model_type=model_type))
    assert "model_type" in message and (model_type == "llama" or all(name in message for name in FAMILIES))


def test_neither_model_type_nor_architectures_is_refused():
    assert "qwen3_moe" in refusal(edited("T-MIX", model_type=DELETE, architectures=DELETE))


REFUSED = {
    "missing field": ("T-MIX", {"hidden_size": DELETE}, "hidden_size is missing"),
    "string for an integer": ("T-MIX", {"hidden_size": "64"}, "hidden_size"),
    "float for an integer": ("T-MIX", {"num_hidden_layers": 2.0}, "num_hidden_layers"),
    "true for an integer": ("T-MIX", {"num_hidden_layers": True}, "num_hidden_layers"),
    "zero layers": ("T-MIX", {"num_hidden_layers": 0}, "num_hidden_layers"),
    "negative": ("T-MIX", {"vocab_size": -5}, "vocab_size"),
    "huge": ("T-MIX", {"hidden_size": 1 << 62}, "hidden_size"),
    "many experts in many layers": (
        "T-MIX",
        {"num_local_experts": 4096, "num_hidden_layers": 1024},
        "num_local_experts",
    ),
    "heads": ("T-MIX", {"num_key_value_heads": 3}, "num_key_value_heads"),
    "more kv heads than heads": ("T-MIX", {"num_key_value_heads": 8}, "num_key_value_heads"),
    "head width": ("T-MIX", {"num_attention_heads": 3, "num_key_value_heads": 3}, "num_attention_heads"),
    "odd head": ("T-QW3", {"head_dim": 15}, "rotate"),
    "olmoe head": ("T-OLM", {"head_dim": 32}, "head_dim"),
    "end token beyond the rows": ("T-MIX", {"eos_token_id": 1 << 20}, "eos_token_id"),
    "top-k above experts": ("T-MIX", {"num_experts_per_tok": 9}, "num_experts_per_tok"),
    "no top-k": ("T-MIX", {"num_experts_per_tok": 0}, "num_experts_per_tok"),
    "eps": ("T-MIX", {"rms_norm_eps": 0}, "rms_norm_eps"),
    "eps as string": ("T-MIX", {"rms_norm_eps": "1e-5"}, "rms_norm_eps"),
    "eps beyond a float": ("T-MIX", {"rms_norm_eps": 10**400}, "rms_norm_eps"),
    "activation": ("T-MIX", {"hidden_act": "gelu"}, "hidden_act"),
    "window of mixtral": ("T-MIX", {"sliding_window": 4096}, "sliding_window"),
    "window switched on": ("T-QW3", {"use_sliding_window": True}, "use_sliding_window"),
    "window layers": ("T-QWD", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    "yarn": ("T-QW3", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling: type = 'yarn'"),
    "yarn, new": ("T-QW3", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "'yarn'"),
    "unknown rope field": ("T-QW3", {"rope_scaling": {"type": "default", "mrope_section": [8]}}, "mrope_section"),
    "two thetas": ("T-QW3", {"rope_theta": 5e5}, "contradicts"),
    "rope as list": ("T-QW3", {"rope_scaling": [1]}, "must be an object"),
    "partial rotary": ("T-MIX", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "quantised": ("T-MIX", {"quantization_config": {"quant_method": "gptq"}}, "quantised"),
    "expert groups": ("T-GLM-demo", {"n_group": 4, "topk_group": 2}, "n_group"),
    "clipping": ("T-OLM", {"clip_qkv": 8.0}, "clip_qkv"),
    "ffn bias": ("T-LLA", {"mlp_bias": True}, "mlp_bias"),
    "flag as string": ("T-QW3", {"norm_topk_prob": "true"}, "norm_topk_prob"),
    "tie as number": ("T-QW3", {"tie_word_embeddings": 1}, "tie_word_embeddings"),
    "dtype": ("T-MIX", {"dtype": "float8_e4m3fn"}, "bfloat16"),
    "dtype as object": ("T-MIX", {"dtype": {"a": 1}}, "dtype"),
    "end token": ("T-MIX", {"eos_token_id": ["</s>"]}, "eos_token_id"),
    "end tokens without end": ("T-MIX", {"eos_token_id": list(range(10000))}, "eos_token_id"),
    "dense layers": ("T-GLM-demo", {"first_k_dense_replace": 3}, "first_k_dense_replace"),
    "step": ("T-QW3", {"decoder_sparse_step": 0}, "decoder_sparse_step"),
    "newline in a value": ("T-MIX", {"model_type": "a\nb" * 500}, "model_type"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_mistakes_are_refused_by_name(case):
    fixture, changes, expected = REFUSED[case]
    folder = edited(fixture, **changes)
    if "eos_token_id" in changes:
        (folder / "generation_config.json").unlink()
    assert expected in refusal(folder)


BROKEN = {
    "empty": b"",
    "half": b'{"model_type": "mix',
    "not an object": b"[1, 2]",
    "not text": b"\xff\xfe\x00",
    "NaN": b'{"model_type": "mixtral", "rms_norm_eps": NaN}',
    "deep": b"[" * 100_000,
    "long integer": b'{"hidden_size": ' + b"9" * 10_000 + b"}",
    "twice": b'{"model_type": "mixtral", "model_type": "llama"}',
    "large": b" " * (5 << 20),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_files_are_refused(case):
    for file in ("config.json", "generation_config.json"):
        folder = copy_checkpoint(checkpoint("T-MIX"))
        (folder / file).write_bytes(BROKEN[case])
        assert file in refusal(folder)


def test_a_folder_without_config_is_refused(tmp_path):
    assert "config.json" in refusal(tmp_path)
    (tmp_path / "config.json").mkdir()
    assert "config.json" in refusal(tmp_path)


def test_unlisted_fields_do_not_matter():
    extra = json.loads('{"auto_map": {"AutoModel": "x.y"}, "something_new": [1, 2]}')
    assert load_config(edited("T-MIX", **extra)) == load_config(checkpoint("T-MIX"))
