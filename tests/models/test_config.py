"""config.json to `ModelConfig`: both spellings, defaults, end tokens, model types, and refusals in one line."""

import json
import logging

import pytest

from moewe.models.config import ConfigError
from moewe.models.families import FAMILIES, load_config, unread_fields
from tests.support.configs import DELETE, edited_config, refusal, saved_config
from tests.support.fixtures import FIXTURES, checkpoint, copy_checkpoint, edit_config, edit_json


def test_every_family_has_a_fixture():
    assert {load_config(saved_config(name)).family for name in FIXTURES} == set(FAMILIES)


def test_a_model_whose_layers_are_all_dense_has_no_experts():
    assert load_config(edited_config("T-QW3", mlp_only_layers=[0, 1])).moe is None


def test_both_generations_of_spelling_mean_the_same():
    new = load_config(saved_config("T-QW3"))
    old = edited_config(
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
    assert load_config(edited_config("T-QW3", dtype="torch.bfloat16")).dtype == "bfloat16"


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("stored", ["bfloat16", "float32", None])
def test_a_format_that_is_left_out_is_that_of_the_weights(stored, shards):
    """gpt-oss is published so."""
    folder = copy_checkpoint(checkpoint("T-MIX", dtype=stored or "bfloat16", shards=shards))
    edit_config(folder, remove=["dtype", "torch_dtype"])
    if stored is None:
        for file in folder.glob("*.safetensors"):
            file.write_bytes(b"damaged")
    assert load_config(folder).dtype == (stored or "float32")
    assert load_config(edit_config(folder, dtype="float16")).dtype == "float16"


def test_null_means_absent():
    config = load_config(edited_config("T-MIX", num_key_value_heads=None, head_dim=None))
    assert config.num_kv_heads == 4 and config.head_dim == 16


def test_end_tokens_come_from_the_generation_config_first():
    folder = edited_config("T-MIX")
    edit_json(folder / "generation_config.json", {"eos_token_id": [2, 9]})
    assert load_config(folder).eos_token_ids == (2, 9)
    edit_json(folder / "generation_config.json", {"eos_token_id": None})
    assert load_config(folder).eos_token_ids == (2,)
    (folder / "generation_config.json").unlink()
    assert load_config(folder).eos_token_ids == (2,)
    assert load_config(edit_config(folder, eos_token_id=None)).eos_token_ids == ()


def test_spellings_of_one_field_must_agree():
    assert load_config(edited_config("T-QW3", num_local_experts=8, num_experts=8)).moe.routing.num_experts == 8
    assert "num_experts = 16 contradicts num_local_experts = 8" in refusal(
        edited_config("T-QW3", num_local_experts=8, num_experts=16)
    )


@pytest.mark.parametrize("architectures", [DELETE, None, [], ["MixtralForCausalLM"]])
def test_model_type_decides_without_a_word_when_architectures_agree_or_lack(architectures, caplog):  # P-LOAD-26
    assert load_config(edited_config("T-MIX", architectures=architectures)).family == "mixtral"
    assert not caplog.records


@pytest.mark.parametrize("architectures", [["FooForCausalLM"], "Mixtral", [3], {"a\n": 1}])
def test_model_type_decides_with_a_warning_when_architectures_are_wrong(architectures, caplog):  # P-LOAD-26
    assert load_config(edited_config("T-MIX", architectures=architectures)).family == "mixtral"
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "architectures" in record.getMessage() and "\n" not in record.getMessage()


@pytest.mark.parametrize(
    ("fixture", "architecture"), [("T-PHI", "PhiMoEForCausalLM"), ("T-LL4", "Llama4ForConditionalGeneration")]
)
def test_published_models_may_go_by_another_class(fixture, architecture, caplog):
    load_config(edited_config(fixture, architectures=[architecture]))
    assert not caplog.records


def test_architectures_decide_when_model_type_is_absent():
    folder = edited_config("T-MIX", model_type=DELETE, architectures=["MixtralForCausalLM"])
    assert load_config(folder).family == "mixtral"


def test_architectures_of_another_family_are_refused():
    message = refusal(edited_config("T-MIX", architectures=["LlamaForCausalLM"]))
    assert "model_type = 'mixtral' contradicts architectures" in message


@pytest.mark.parametrize("model_type", ["foo", "", 7, ["mixtral"], "x" * 100_000])
def test_unknown_model_types_are_refused_with_the_list(model_type):  # P-LOAD-26
    folder = edited_config("T-MIX", model_type=model_type)
    with pytest.raises(ConfigError) as caught:
        load_config(folder)
    assert all(name in str(caught.value) for name in [*FAMILIES, "kimi_k2", "llama4", "model_type"])


@pytest.mark.parametrize(
    ("model_type", "nearest"),
    [
        ("deepseek_v4", "deepseek_v3"),
        ("qwen3_next", "qwen3_moe"),
        ("MixtralForCausalLM", "mixtral"),
        ("glm4", "glm4_moe"),
    ],
)
def test_unknown_model_types_are_refused_with_the_nearest_family(model_type, nearest):
    assert f"the nearest is {nearest})" in refusal(edited_config("T-MIX", model_type=model_type))


def test_neither_model_type_nor_architectures_is_refused():
    assert "qwen3_moe" in refusal(edited_config("T-MIX", model_type=DELETE, architectures=DELETE))


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
    "quantised": ("T-MIX", {"quantization_config": {"quant_method": "gptq"}}, "quant_method = 'gptq'"),
    "compressed": ("T-MIX", {"compression_config": {"a": 1}}, "quantised"),
    "expert groups": ("T-QW3", {"n_group": 4, "topk_group": 2}, "n_group"),
    "chunks": ("T-MIX", {"attention_chunk_size": 128}, "attention_chunk_size"),
    "two kinds of chunks": ("T-Q2D", {"dual_chunk_attention_config": {"chunk_size": 8}}, "dual_chunk_attention_config"),
    "capped scores": ("T-LLA", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    "capped logits": ("T-LLA", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
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
    assert expected in refusal(edited_config(fixture, **changes))


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
        folder = saved_config("T-MIX")
        (folder / file).write_bytes(BROKEN[case])
        assert file in refusal(folder)


def test_a_folder_without_config_is_refused(tmp_path):
    assert "config.json" in refusal(tmp_path)
    (tmp_path / "config.json").mkdir()
    assert "config.json" in refusal(tmp_path)


def test_unlisted_fields_change_nothing_but_are_told():
    extra = json.loads('{"auto_map": {"AutoModel": "x.y"}, "something_new": [1, 2], "a_flag": false}')
    folder = edited_config("T-MIX", **extra)
    assert load_config(folder) == load_config(saved_config("T-MIX"))
    assert unread_fields(folder) == ("something_new",)


def test_end_tokens_that_lose_to_those_of_another_file_are_no_unread_field():
    folder = edited_config("T-MIX", eos_token_id=5)
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert load_config(folder).eos_token_ids == (7, 8)
    assert unread_fields(folder) == ()


@pytest.mark.parametrize("name", FIXTURES)
def test_files_of_transformers_hold_no_field_worth_telling(name):
    assert unread_fields(saved_config(name)) in ((), ("n_group", "topk_group"))
