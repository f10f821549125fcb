"""What `load_config` makes of every family, against the model of transformers and worked out by hand."""

import pytest
import torch
import transformers

from moewe.models.config import ConfigError, LatentConfig, LayerAttention, QueryTemperature
from moewe.models.families import FAMILIES, load_config
from moewe.moe.activation import SILU, Activation
from tests.support.configs import DELETE, edited_config, reference_config, refusal, saved_config
from tests.support.fixtures import FIXTURES, edit_config, edit_json, new_folder

LATENT = [name for name, (class_name, _) in FIXTURES.items() if class_name[:8] in ("Deepseek", "Glm4MoeL")]


def loaded(name, **fields):
    return load_config(saved_config(name, **fields))


# -- what all families share -----------------------------------------------------------------------------------------


def reference_model(name, **fields):
    """Return the model of transformers without memory for its parameters."""
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(reference_config(name, **fields))


@pytest.mark.parametrize("name", FIXTURES)
def test_shapes_and_switches_are_those_of_the_model_of_transformers(name):
    config, model = loaded(name), reference_model(name)
    attention, shapes = model.model.layers[-1].self_attn, {n: tuple(p.shape) for n, p in model.state_dict().items()}
    assert (config.num_layers, config.hidden_size) == (len(model.model.layers), model.config.hidden_size)
    assert config.vocab_size == 512 and config.head_tied == model.config.tie_word_embeddings
    assert config.max_position_embeddings in (4096, 1280)
    assert config.attention_scale == pytest.approx(attention.scaling, rel=1e-12)
    assert (config.head_bias, config.norm == "layer") == ("lm_head.bias" in shapes, "model.norm.bias" in shapes)
    assert config.output_bias == (attention.o_proj.bias is not None)
    first = (attention.q_a_proj or attention.kv_a_proj_with_mqa) if config.latent else attention.k_proj
    assert config.attention_bias == (first.bias is not None)
    assert config.sinks == hasattr(attention, "sinks")
    assert config.norm_after == any("post_feedforward_layernorm" in key for key in shapes)
    if config.latent is None:
        assert attention.k_proj.out_features == config.num_kv_heads * config.head_dim
        assert attention.q_proj.out_features == config.num_heads * config.head_dim
    norm = next((shapes[k] for k in shapes if k.endswith(("k_norm.weight", "key_layernorm.weight"))), None)
    if config.qk_norm in ("head", "full"):
        assert norm == (config.head_dim * (config.num_kv_heads if config.qk_norm == "full" else 1),)
    else:
        assert norm is None


@pytest.mark.parametrize("name", [n for n in FIXTURES if FAMILIES[load_config(saved_config(n)).family].moe])
def test_experts_are_those_of_the_model_of_transformers(name):
    config, model = loaded(name), reference_model(name)
    routed = {
        i: next((m for n, m in layer.named_modules() if n.endswith(".experts")), None)
        for i, layer in enumerate(model.model.layers)
    }
    assert config.moe_layers == tuple(i for i, experts in routed.items() if experts is not None)
    shapes = {n: tuple(p.shape) for n, p in model.model.layers[-1].state_dict().items()}
    moe, routing = config.moe, config.moe.routing
    down = next(s for n, s in shapes.items() if n.endswith("experts.down_proj"))
    assert down[0] == routing.num_experts and {moe.expert_width, config.hidden_size} == set(down[1:])
    shared = [s for n, s in shapes.items() if "shared" in n and "gate." not in n and n.endswith(".weight")]
    assert (moe.shared_width > 0) == bool(shared)
    assert not shared or any(moe.shared_width in shape or 2 * moe.shared_width in shape for shape in shared)
    assert moe.selection_bias == any("e_score_correction_bias" in n for n in shapes)
    assert moe.expert_bias == any(n.endswith("experts.down_proj_bias") for n in shapes)
    assert moe.router_bias == any(n.endswith("router.bias") for n in shapes)
    assert moe.shared_gate == any("shared_expert_gate" in n for n in shapes)


# A wrong guess of the first two is refused when tensors are read; tokens are also in other files of a model.
NOT_GUESSED = {"num_key_value_heads", "q_lora_rank", "bos_token_id", "eos_token_id"}
NOT_READ = {"model_type", "architectures", "dtype", "transformers_version"}


@pytest.mark.parametrize("name", FIXTURES)
def test_a_field_that_is_left_out_means_what_transformers_takes_for_it_or_is_refused(name):
    config = reference_config(name)
    for field in config.to_dict().keys() - NOT_GUESSED - NOT_READ:
        content = {key: value for key, value in config.to_dict().items() if key != field}
        folder = new_folder(name)
        edit_json(folder / "config.json", content)
        try:
            ours = load_config(folder)
        except ConfigError:
            continue
        edit_config(folder, **type(config).from_dict(content).to_dict())
        assert ours == load_config(folder), field


# -- family by family, by hand ---------------------------------------------------------------------------------------


def test_mixtral():
    config = loaded("T-MIX")
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.dense_width) == (4, 2, 16, 0)
    routing = config.moe.routing
    assert (routing.num_experts, routing.top_k, routing.scoring, routing.renormalize) == (8, 2, "softmax", True)
    assert config.moe.expert_width == 96 and config.moe.shared_width == 0 and config.moe.activation == SILU
    assert config.moe_layers == (0, 1) and config.rotary.theta == 1e6 and config.dtype == "float32"
    assert config.bos_token_id == 1 and config.eos_token_ids == (2,) and config.layer_attention == ()


@pytest.mark.parametrize("name", LATENT)
def test_latent_attention(name):
    config = loaded(name)
    rank = 0 if name == "T-DS2" else 24  # P-LOAD-15
    assert config.latent == LatentConfig(kv_rank=32, rope_dim=8, nope_dim=16, value_dim=12, query_rank=rank)
    assert config.head_dim == 24 and config.rotary.rotary_dim == 8 and config.rotary.interleaved
    assert config.latent.norm_eps == 1e-6 and (config.norm_eps == 1e-5) == (name == "T-GLL")
    assert loaded(name, attention_bias=True).attention_bias and loaded(name, attention_bias=True).output_bias
    assert "num_key_value_heads = 2 must be" in refusal(edited_config(name, num_key_value_heads=2))
    assert load_config(edited_config(name, q_lora_rank=None)).latent.query_rank == 0


def test_deepseek_v2():
    greedy, grouped = loaded("T-DS2").moe.routing, loaded("T-DS2-groups").moe.routing
    assert (greedy.scoring, greedy.renormalize, greedy.num_groups, greedy.scaling_factor) == ("softmax", False, 1, 1.0)
    assert (grouped.num_groups, grouped.top_groups, grouped.group_score, grouped.scaling_factor) == (4, 2, "max", 4.0)
    assert not grouped.renormalize and loaded("T-DS2").moe_layers == (1, 2)
    assert loaded("T-DS2").moe.shared_width == 2 * 48 and not loaded("T-DS2").moe.selection_bias
    # Without the method the groups are not used.
    assert loaded("T-DS2-groups", topk_method="greedy").moe.routing.num_groups == 1


def test_deepseek_v3():
    config = loaded("T-DS3")
    routing = config.moe.routing
    assert (routing.scoring, routing.num_groups, routing.top_groups, routing.group_score) == ("sigmoid", 4, 2, "top2")
    assert routing.renormalize and routing.scaling_factor == 2.5
    assert config.moe.selection_bias and config.moe.shared_width == 32 and not config.moe.shared_gate
    assert not loaded("T-DS3", rope_interleave=False).rotary.interleaved
    old = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1, "num_nextn_predict_layers": 1}
    old |= {"rope_parameters": DELETE, "rope_theta": 10000, "aux_loss_alpha": 0.001, "ep_size": 1, "seq_aux": True}
    old |= {"pretraining_tp": 1, "output_router_logits": True, "attention_dropout": 0.5}
    old["rope_scaling"] = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 64} | {
        "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
    }  # fmt: skip
    assert load_config(edited_config("T-DS3", **old)) == config


@pytest.mark.parametrize("model_type", ["kimi_k2", "deepseek_v3"])
def test_kimi_k2_is_deepseek_v3(model_type):
    folder = edited_config(
        "T-DS3", model_type=model_type, architectures=["DeepseekV3ForCausalLM"], n_group=1, topk_group=1
    )
    config = load_config(folder)
    assert config.family == "deepseek_v3" and config.moe.routing.num_groups == 1


@pytest.mark.parametrize(("first", "layers"), [(0, (0, 1, 2, 3)), (1, (1, 2, 3)), (3, (3,)), (4, ())])
def test_dense_leading_layers(first, layers):  # P-LOAD-07
    config = loaded("T-DS3", first_k_dense_replace=first)
    assert config.moe_layers == layers and (config.moe is None) == (not layers)
    assert config.dense_width == (96 if first else 0)


def test_glm4_moe():
    config = loaded("T-GLM")
    assert config.qk_norm == "head" and config.attention_bias and not config.output_bias
    assert config.rotary.rotary_dim == 16 and config.head_dim == 32 and config.moe_layers == (1, 2)
    demo = loaded("T-GLM-demo")
    assert demo.moe.routing.scoring == "sigmoid" and demo.moe.routing.scaling_factor == 12.0
    assert demo.moe.shared_width == 4 * 16 and demo.head_tied and demo.qk_norm is None
    assert demo.rotary.rotary_dim == demo.head_dim == 16
    assert load_config(edited_config("T-GLM-demo", rope_parameters=DELETE, rope_theta=1e4)).rotary.rotary_dim == 8
    grouped = loaded("T-GLM", n_group=4, topk_group=2).moe.routing
    assert (grouped.num_groups, grouped.top_groups, grouped.group_score) == (4, 2, "top2")


def test_glm4_moe_lite():
    config = loaded("T-GLL")
    assert config.moe_layers == (1, 2) and config.moe.routing.scaling_factor == 1.8 and config.moe.selection_bias
    assert loaded("T-GLL", mlp_layer_types=["sparse", "dense", "sparse"]).moe_layers == (0, 2)
    old = {"mlp_layer_types": DELETE, "first_k_dense_replace": 2, "partial_rotary_factor": 1.0}
    assert load_config(edited_config("T-GLL", **old)).moe_layers == (2,)
    assert "contradicts mlp_layer_types" in refusal(edited_config("T-GLL", first_k_dense_replace=2))
    assert "is not one of dense, sparse" in refusal(edited_config("T-GLL", mlp_layer_types=["dense", "sparse", "moe"]))


def test_dots1():
    config = loaded("T-DOT")
    assert config.qk_norm == "head" and not config.qk_norm_after_rotary and config.moe.shared_width == 64
    assert config.moe.routing.scoring == "sigmoid" and config.moe.routing.scaling_factor == 2.5
    assert config.layer_attention == () and config.moe_layers == (1, 2)


def test_solar_open():
    config = loaded("T-SOL")
    assert config.qk_norm is None and config.attention_bias and not config.output_bias
    assert config.moe_layers == (0, 1) and config.moe.shared_width == 2 * 32 and config.moe.selection_bias
    released = {"first_k_dense_replace": 0, "partial_rotary_factor": 1.0, "use_qk_norm": False, "rope_theta": 1e4}
    old = {"rope_parameters": DELETE, "rope_scaling": {"type": "yarn", "factor": 2.0}}
    old["rope_scaling"]["original_max_position_embeddings"] = 64
    assert load_config(edited_config("T-SOL", **released, **old)) == config


def test_gpt_oss():
    config = loaded("T-GOS")
    assert config.sinks and config.attention_bias and config.output_bias
    assert config.moe.activation == Activation(kind="clamped", alpha=1.702, limit=1.5)
    assert config.moe.expert_bias and config.moe.router_bias and config.moe.routing.renormalize
    assert config.moe.routing.scoring == "softmax" and config.moe.expert_width == 96
    assert [layer.window for layer in config.layer_attention] == [8, 0, 8, 0]
    bare = load_config(edited_config("T-GOS", rope_parameters=DELETE, swiglu_limit=DELETE, layer_types=DELETE))
    assert (bare.rotary.theta, bare.rotary.scaling.factor, bare.rotary.scaling.truncate) == (150000.0, 32.0, False)
    assert bare.moe.activation.limit == 7.0 and [layer.window for layer in bare.layer_attention] == [8, 0, 8, 0]


@pytest.mark.parametrize(("name", "attention"), [("T-GRA", 0.0156), ("T-GRS", 0.0625)])
def test_granite(name, attention):  # P-LOAD-17
    config = loaded(name)
    assert (config.attention_scale, config.embedding_multiplier) == (attention, 12.0)
    assert (config.residual_multiplier, config.logits_multiplier) == (0.22, 1 / 6)
    assert config.moe.routing.renormalize and config.moe.routing.scoring == "softmax"
    assert config.moe.shared_width == (48 if name == "T-GRS" else 0) and not config.moe.shared_gate
    assert loaded(name, attention_bias=True, tie_word_embeddings=True).output_bias


def test_phimoe():
    config = loaded("T-PHI")
    assert config.norm == "layer" and config.head_bias and config.attention_bias and config.output_bias
    routing = config.moe.routing
    assert (routing.scoring, routing.jitter, routing.renormalize, routing.top_k) == ("sparsemixer", 0.3, False, 2)
    assert loaded("T-PHI", router_jitter_noise=0.0).moe.routing.jitter == 0
    assert not loaded("T-PHI", lm_head_bias=False).head_bias


def test_ernie():
    config = loaded("T-ERN", use_bias=True)
    assert config.attention_bias and config.output_bias and config.dense_bias
    assert config.moe.shared_bias and not config.moe.expert_bias
    assert config.moe.selection_bias and config.rotary.interleaved and config.rotary.rotary_dim == 16
    routing = config.moe.routing
    assert (routing.scoring, routing.top_k, routing.renormalize, routing.min_weight_sum) == ("softmax", 3, True, 1e-12)
    assert config.moe.shared_width == 2 * 32 and config.moe_layers == (1, 2, 3)
    plain = loaded("T-ERN", moe_num_shared_experts=0)
    assert plain.moe.shared_width == 0 and not plain.moe.shared_bias and not plain.dense_bias
    assert load_config(edited_config("T-ERN", tie_word_embeddings=DELETE)).head_tied


def test_hunyuan():
    config = loaded("T-HUN")
    assert config.qk_norm == "head" and config.qk_norm_after_rotary and config.moe.shared_width == 96
    assert config.moe.routing.renormalize and config.moe.routing.top_k == 3
    lists = {"moe_topk": [3, 3], "num_shared_expert": [1, 1], "moe_intermediate_size": [96, 96], "num_experts": [8, 8]}
    released = {"n_group": False, "topk_group": False, "routed_scaling_factor": False, "group_limited_greedy": False}
    assert load_config(edited_config("T-HUN", **lists, **released, use_qk_norm=True, norm_topk_prob=True)) == config


def test_minimax_m2():
    config = loaded("T-MM2")
    assert config.qk_norm == "full" and config.rotary.rotary_dim == 16 and config.rotary.theta == 5e6
    assert config.moe.routing.scoring == "sigmoid" and config.moe.routing.renormalize and config.moe.selection_bias
    released = {"attn_type_list": [1, 1], "scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True}
    old = {"rope_parameters": DELETE, "rotary_dim": 16, "rope_theta": 5000000, "shared_intermediate_size": 0}
    assert load_config(edited_config("T-MM2", **released, **old)) == config
    assert "rotary_dim = 8 contradicts" in refusal(edited_config("T-MM2", rotary_dim=8))


def test_flex_olmo():
    config = loaded("T-FLX", norm_topk_prob=True)
    assert config.norm_after and config.qk_norm == "full" and config.rotary.theta == 5e5
    assert config.moe.routing.renormalize and not loaded("T-FLX").moe.routing.renormalize
    assert not loaded("T-OLM").norm_after


def test_llama4():
    config = loaded("T-LL4")
    assert config.qk_norm == "unit" and config.qk_norm_after_rotary and config.rotary.interleaved
    assert config.query_temperature == QueryTemperature(scale=0.5, floor_scale=8.0)
    assert config.layer_attention == (LayerAttention(chunk=16),) * 3 + (LayerAttention(rotary=False),)
    assert config.moe.weigh_input and config.moe.routing.top_k == 1 and config.moe.routing.scoring == "sigmoid"
    assert not config.moe.routing.renormalize and config.moe.shared_width == config.moe.expert_width == 48
    assert config.moe_layers == (1, 3) and config.dense_width == 96
    plain = loaded("T-LL4", use_qk_norm=False, attn_temperature_tuning=False)
    assert plain.qk_norm is None and plain.query_temperature is None
    assert load_config(edited_config("T-LL4", attn_temperature_tuning=4)) == config


def test_llama4_with_a_vision_part():
    text = reference_config("T-LL4")
    whole = transformers.Llama4Config(text_config=text.to_dict(), vision_config={"num_hidden_layers": 1})
    folder = new_folder("T-LL4-whole")
    whole.save_pretrained(folder)
    assert load_config(folder) == loaded("T-LL4")
    edit_json(folder / "config.json", {"torch_dtype": "bfloat16", "architectures": ["Llama4ForConditionalGeneration"]})
    assert load_config(folder).dtype == "bfloat16"
    edit_json(folder / "config.json", {"tie_word_embeddings": True})
    assert "tie_word_embeddings" in refusal(folder)
    edit_json(
        folder / "config.json",
        {"tie_word_embeddings": False, "text_config": text.to_dict() | {"top": 1, "hidden_size": "x"}},
    )
    assert "config.json: text_config: hidden_size" in refusal(folder)
    edit_json(folder / "config.json", {"text_config": text.to_dict() | {"model_type": "llama"}})
    assert "must be llama4_text" in refusal(folder)


def test_dense_families():
    assert loaded("T-Q2D").attention_bias and not loaded("T-Q2D").output_bias and loaded("T-Q2D").qk_norm is None
    assert not loaded("T-MIS").attention_bias and [la.window for la in loaded("T-MIS").layer_attention] == [8, 8, 8]
    assert loaded("T-MIS", sliding_window=None).layer_attention == () and loaded("T-MIS").moe is None
    assert loaded("T-LLA").qk_norm is None and loaded("T-QWD").qk_norm == "head"


REFUSED = {
    "V2 renormalises": ("T-DS2", {"norm_topk_prob": True}, "norm_topk_prob = True"),
    "V2 method": ("T-DS2", {"topk_method": "noaux_tc"}, "topk_method = 'noaux_tc'"),
    "V2 sigmoid": ("T-DS2", {"scoring_func": "sigmoid"}, "scoring_func"),
    "V3 method": ("T-DS3", {"topk_method": "greedy"}, "topk_method = 'greedy'"),
    "V3 softmax": ("T-DS3", {"scoring_func": "softmax"}, "scoring_func"),
    "V3 every second layer": ("T-DS3", {"moe_layer_freq": 2}, "moe_layer_freq = 2"),
    "groups do not divide": ("T-DS3", {"n_group": 3}, "n_group = 3"),
    "groups of one": ("T-DS3", {"n_group": 16, "topk_group": 8}, "n_group = 16"),
    "more groups chosen than there are": ("T-DS3", {"topk_group": 5}, "topk_group = 5"),
    "groups too small": ("T-DS3", {"topk_group": 1, "num_experts_per_tok": 5}, "topk_group = 1"),
    "no latent": ("T-DS3", {"kv_lora_rank": DELETE}, "kv_lora_rank is missing"),
    "latent as a string": ("T-DS3", {"q_lora_rank": "24"}, "q_lora_rank"),
    "odd rotary part": ("T-DS3", {"qk_rope_head_dim": 7}, "rotate"),
    "ffn biases": ("T-DS2", {"mlp_bias": True}, "mlp_bias"),
    "clamp": ("T-GOS", {"swiglu_limit": -1}, "swiglu_limit"),
    "gpt-oss activation": ("T-GOS", {"hidden_act": "gelu"}, "hidden_act"),
    "sparsemixer of three": ("T-PHI", {"num_experts_per_tok": 3}, "num_experts_per_tok = 3"),
    "negative jitter": ("T-PHI", {"router_jitter_noise": -0.1}, "router_jitter_noise"),
    "two experts of Llama 4": ("T-LL4", {"num_experts_per_tok": 2}, "num_experts_per_tok = 2"),
    "experts differ": ("T-HUN", {"moe_topk": [3, 2]}, "moe_topk"),
    "experts as an empty list": ("T-HUN", {"moe_topk": []}, "moe_topk"),
    "shared experts": ("T-HUN", {"num_shared_expert": [1, 2]}, "num_shared_expert"),
    "widths differ": ("T-HUN", {"moe_intermediate_size": [96, 48]}, "moe_intermediate_size"),
    "shared cache": ("T-HUN", {"use_cla": True}, "use_cla"),
    "linear attention": ("T-MM2", {"attn_type_list": [1, 0]}, "attn_type_list"),
    "norm of each head": ("T-MM2", {"qk_norm_type": "per_head"}, "qk_norm_type"),
    "a dense layer of Solar": ("T-SOL", {"first_k_dense_replace": 1}, "first_k_dense_replace = 1"),
    "norms of heads of Solar": ("T-SOL", {"use_qk_norm": True}, "use_qk_norm = True"),
    "a rotating part of Solar": ("T-SOL", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    "stretched positions": ("T-ERN", {"compression_ratio": 2.0}, "compression_ratio"),
    "multiplier": ("T-GRA", {"logits_scaling": 0}, "logits_scaling"),
    "multiplier as a string": ("T-GRA", {"residual_multiplier": "0.2"}, "residual_multiplier"),
    "no count of shared experts": ("T-DOT", {"n_shared_experts": None}, "n_shared_experts is missing"),
    "tuning as a number": ("T-LL4", {"attn_temperature_tuning": 2}, "attn_temperature_tuning"),
    "LayerNorm of Ernie": ("T-ERN", {"use_rmsnorm": False}, "use_rmsnorm"),
    "three axes of positions": ("T-HUN", {"position_embedding_xdrope": True}, "position_embedding_xdrope"),
    "no positions": ("T-HUN", {"use_rotary_pos_emb": False}, "use_rotary_pos_emb"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_family_cannot_do_is_refused_by_name(case):
    fixture, changes, expected = REFUSED[case]
    assert expected in refusal(edited_config(fixture, **changes))
