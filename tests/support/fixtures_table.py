"""What each tiny checkpoint is: the transformers config it is made of, its fields, and which lists it stands in.

Not the making (`fixtures` does that). Small enough for a CPU and still odd where its family is odd: windows and runs
shorter than a prompt of 33, more than one MoE layer, heads of K and V of unlike width, original lengths between the
lengths that tests use. Units: elements, tokens.
"""

from __future__ import annotations

from typing import Any

VOCAB_SIZE = 512
COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
# Queries and keys of 16 + 8 elements, values of 12: no two of them alike.
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
FIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "T-MIX": ("MixtralConfig", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "T-QW2": (
        "Qwen2MoeConfig",
        {
            "num_experts": 8,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 96,
            "norm_topk_prob": False,
        },
    ),
    "T-QW3": (
        "Qwen3MoeConfig",
        {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "norm_topk_prob": True,
            "head_dim": 32,
        },
    ),
    "T-OLM": ("OlmoeConfig", {"num_experts": 16, "num_experts_per_tok": 4, "norm_topk_prob": False}),
    "T-FLX": ("FlexOlmoConfig", {"num_experts": 7, "num_experts_per_tok": 5, "norm_topk_prob": False}),
    "T-DS2": (  # V2-Lite
        "DeepseekV2Config",
        LATENT
        | {
            "q_lora_rank": None,
            "num_hidden_layers": 3,
            "first_k_dense_replace": 1,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_shared_experts": 2,
            "moe_intermediate_size": 48,
            "topk_method": "greedy",
            "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "T-DS2-groups": (  # V2
        "DeepseekV2Config",
        LATENT
        | {
            "num_hidden_layers": 3,
            "first_k_dense_replace": 1,
            "n_routed_experts": 16,
            "num_experts_per_tok": 4,
            "n_shared_experts": 2,
            "moe_intermediate_size": 32,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 4.0,
            "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "T-DS3": (
        "DeepseekV3Config",
        LATENT
        | {
            "num_hidden_layers": 4,
            "first_k_dense_replace": 1,
            "n_routed_experts": 16,
            "num_experts_per_tok": 4,
            "n_shared_experts": 1,
            "moe_intermediate_size": 32,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "num_nextn_predict_layers": 0,
            "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "T-GLL": (
        "Glm4MoeLiteConfig",
        LATENT
        | {
            "num_hidden_layers": 3,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_shared_experts": 1,
            "moe_intermediate_size": 32,
            "routed_scaling_factor": 1.8,
        },
    ),
    "T-GLM": (
        "Glm4MoeConfig",
        {
            "num_hidden_layers": 3,
            "n_routed_experts": 16,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 32,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "partial_rotary_factor": 0.5,
            "use_qk_norm": True,
            "attention_bias": True,
            "head_dim": 32,
            "num_nextn_predict_layers": 0,
        },
    ),
    "T-GLM-demo": (
        "Glm4MoeConfig",
        {
            "n_routed_experts": 16,
            "num_experts_per_tok": 12,
            "moe_intermediate_size": 16,
            "n_shared_experts": 4,
            "norm_topk_prob": True,
            "routed_scaling_factor": 12.0,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 0,
            "partial_rotary_factor": 1.0,
            "use_qk_norm": False,
            "attention_bias": False,
            "head_dim": 16,
            "num_nextn_predict_layers": 0,
            "tie_word_embeddings": True,
        },
    ),
    "T-GOS": (
        "GptOssConfig",
        {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "sliding_window": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 4,
            "head_dim": 16,
            "swiglu_limit": 1.5,  # of 7.0 no number here would reach the limit
            "rope_parameters": YARN | {"rope_theta": 150000.0, "factor": 32.0, "truncate": False},
        },
    ),
    "T-GRA": (
        "GraniteMoeConfig",
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.0156,
            "residual_multiplier": 0.22,
            "logits_scaling": 6.0,
        },
    ),
    "T-GRS": (
        "GraniteMoeSharedConfig",
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 48,
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.0625,
            "residual_multiplier": 0.22,
            "logits_scaling": 6.0,
        },
    ),
    "T-PHI": (
        "PhimoeConfig",
        {
            "num_local_experts": 16,
            "num_experts_per_tok": 2,
            "attention_bias": True,
            "lm_head_bias": True,
            "router_jitter_noise": 0.3,  # of 0.01 every expert would stand alone
            "max_position_embeddings": 1280,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "original_max_position_embeddings": 40,
                "short_factor": [1.0, 1.05, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0],
                "long_factor": [1.0, 1.4, 2.0, 4.0, 8.0, 14.0, 20.0, 32.0],
                "short_mscale": 1.1,
                "long_mscale": 1.24,
            },
        },
    ),
    "T-ERN": (
        "Ernie4_5_MoeConfig",
        {
            "num_hidden_layers": 4,
            "moe_num_experts": 8,
            "moe_k": 3,
            "moe_num_shared_experts": 2,
            "moe_intermediate_size": 32,
            "moe_layer_start_index": 1,
        },
    ),
    "T-DOT": (
        "Dots1Config",
        {
            "num_hidden_layers": 3,
            "n_routed_experts": 16,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 32,
            "n_shared_experts": 2,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "first_k_dense_replace": 1,
        },
    ),
    "T-HUN": (
        "HunYuanMoEV1Config",
        {
            "num_experts": 8,
            "moe_topk": 3,
            "head_dim": 32,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "T-MM2": (
        "MiniMaxM2Config",
        {"num_local_experts": 8, "num_experts_per_tok": 3, "head_dim": 32, "rotary_dim": 16},
    ),
    "T-LL4": (
        "Llama4TextConfig",
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "intermediate_size": 48,
            "intermediate_size_mlp": 96,
            "num_local_experts": 8,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 16,
            "floor_scale": 8,
            "attn_scale": 0.5,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "T-SOL": (
        "SolarOpenConfig",
        {
            "n_routed_experts": 16,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 32,
            "n_shared_experts": 2,
            "routed_scaling_factor": 2.5,
            "n_group": 4,
            "topk_group": 2,
            "attention_bias": True,
            "head_dim": 32,
            "rope_parameters": YARN | {"factor": 2.0},
        },
    ),
    "T-LLA": ("LlamaConfig", {}),
    "T-QWD": ("Qwen3Config", {"head_dim": 32}),
    "T-MIS": ("MistralConfig", {"num_hidden_layers": 3, "sliding_window": 8}),
    "T-Q2D": ("Qwen2Config", {}),
}
DENSE_FIXTURES = ("T-LLA", "T-QWD", "T-MIS", "T-Q2D")
MOE_FIXTURES = tuple(name for name in FIXTURES if name not in DENSE_FIXTURES)
