"""Latent attention in its absorbed form: against heads expanded in fp64, and against the modules of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DeepseekV2Config, DeepseekV3Config, Glm4MoeLiteConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2ForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3ForCausalLM
from transformers.models.glm4_moe_lite.modeling_glm4_moe_lite import Glm4MoeLiteForCausalLM

from moewe.models.config import LatentConfig, ModelConfig, RotaryConfig, RotaryScaling
from moewe.models.footprint import cache_groups
from moewe.models.weights import DenseFFN, LatentWeights, LayerWeights, ModelWeights
from tests.support.numerics import LOGITS_AGAINST_REFERENCE, assert_within
from tests.support.one_sequence import run_one
from tests.support.random_models import VOCAB, model_configs, plain_config, random_weights
from tests.support.slow_decoder import slow_logits

SHAPE = LatentConfig(kv_rank=10, rope_dim=4, nope_dim=6, value_dim=5)
SIZES: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=16, intermediate_size=12, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4, kv_lora_rank=10, qk_rope_head_dim=4, qk_nope_head_dim=6, v_head_dim=5,
    first_k_dense_replace=2, mlp_layer_types=["dense", "dense"], max_position_embeddings=256, rms_norm_eps=1e-2,
    n_group=1, topk_group=1,
    pad_token_id=None, bos_token_id=None, eos_token_id=None,
)  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 1.0,
        "mscale_all_dim": 0.7, "beta_fast": 4.0, "beta_slow": 1.0}  # fmt: skip
PLAIN = {"rope_type": "default", "rope_theta": 1e4}


def tokens_of(num_tokens: int) -> list[int]:
    return torch.randint(VOCAB, (num_tokens,), generator=torch.Generator().manual_seed(0)).tolist()


@settings(max_examples=25, deadline=None)
@given(
    config=model_configs(latent=True), chunk=st.sampled_from([1, 4, 7, 17]), long=st.booleans(),
    seed=st.integers(0, 1 << 20),
)  # fmt: skip
def test_absorbed_equals_expanded(config: ModelConfig, chunk: int, long: bool, seed: int) -> None:
    weights, tokens = random_weights(config, seed), tokens_of(17)
    expected = slow_logits(config, weights, tokens, long=long)
    actual = run_one(config, weights, tokens, chunk=chunk, long=long).logits
    assert_within(actual.double(), expected, LOGITS_AGAINST_REFERENCE)


def weights_of(model: torch.nn.Module, shape: LatentConfig) -> ModelWeights:
    """Our records over the parameters of a dense model of transformers."""
    layers = []
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        k, v = attention.kv_b_proj.weight.unflatten(0, (4, -1)).split([shape.nope_dim, shape.value_dim], 1)
        latent = LatentWeights(
            kv_a=attention.kv_a_proj_with_mqa.weight,
            kv_a_bias=attention.kv_a_proj_with_mqa.bias,
            kv_a_norm=attention.kv_a_layernorm.weight,
            kv_b_k=k,
            kv_b_v=v,
        )
        if shape.query_rank:
            latent.q_a, latent.q_a_norm = attention.q_a_proj.weight, attention.q_a_layernorm.weight
            latent.q_b, latent.q_a_bias = attention.q_b_proj.weight, attention.q_a_proj.bias
        else:
            latent.q = attention.q_proj.weight
        layers.append(
            LayerWeights(
                input_norm=layer.input_layernorm.weight,
                latent=latent,
                o=attention.o_proj.weight,
                o_bias=attention.o_proj.bias,
                post_attention_norm=layer.post_attention_layernorm.weight,
                dense=DenseFFN(w13=torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]), w2=mlp.down_proj.weight),
            )
        )
    return ModelWeights(
        embedding=model.model.embed_tokens.weight,
        head=model.lm_head.weight,
        final_norm=model.model.norm.weight,
        layers=layers,
    )


MODELS = {
    "deepseek_v2": (DeepseekV2ForCausalLM, DeepseekV2Config, {}),
    "deepseek_v3": (DeepseekV3ForCausalLM, DeepseekV3Config, {"rope_interleave": True}),
    "deepseek_v3_halves": (DeepseekV3ForCausalLM, DeepseekV3Config, {"rope_interleave": False}),
    "glm4_moe_lite": (Glm4MoeLiteForCausalLM, Glm4MoeLiteConfig, {"rope_interleave": True}),
}


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("query_rank", [0, 7])
@pytest.mark.parametrize("rope", [PLAIN, YARN], ids=["plain", "yarn"])
def test_latent_models_of_transformers(name: str, query_rank: int, rope: dict[str, Any]) -> None:  # P-LOAD-15
    """Dense models, biases on the down-projections, position 40 beyond yarn's original length of 16."""
    model_class, config_class, changes = MODELS[name]
    reference = model_class(
        config_class(**SIZES, **changes, rope_parameters=rope, attention_bias=True, q_lora_rank=query_rank or None)
    ).eval()
    generator = torch.Generator().manual_seed(0)
    for path, parameter in reference.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(1 + 0.3 * noise if "norm" in path else 0.3 * noise)
    shape = LatentConfig(kv_rank=10, rope_dim=4, nope_dim=6, value_dim=5, query_rank=query_rank)
    scaling = None
    if rope is YARN:
        scaling = RotaryScaling(
            kind="yarn", factor=4.0, original_max_position=16, beta_fast=4.0,
            amplitude=reference.model.rotary_emb.attention_scaling,
        )  # fmt: skip
    config = plain_config(
        latent=shape, head_dim=10, norm_eps=1e-2, attention_scale=reference.model.layers[0].self_attn.scaling,
        rotary=RotaryConfig(theta=1e4, rotary_dim=4, interleaved=name != "deepseek_v3_halves", scaling=scaling),
    )  # fmt: skip
    tokens = tokens_of(40)
    expected = reference(torch.tensor([tokens])).logits[0]
    for chunk in (1, 7, 40):
        actual = run_one(config, weights_of(reference, shape), tokens, chunk=chunk).logits
        assert_within(actual, expected, LOGITS_AGAINST_REFERENCE)


def test_a_token_takes_the_latent_and_the_rope_part_and_nothing_else() -> None:  # P-LOAD-15
    (group,) = cache_groups(plain_config(latent=SHAPE, head_dim=10), dtype="bfloat16")
    assert group.bytes_per_token() == 2 * (10 + 4) * 2  # layers, elements, bytes
