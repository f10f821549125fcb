"""The table entries of DeepSeek and its descendants: groups of experts, sigmoid scores, a bias that only chooses.

Not the whole table: `families` joins these entries to its own. Units and defaults as there.
"""

from __future__ import annotations

from typing import Any

from .family import Family, MoEFamily
from .family_rules import always_grouped, grouped_by_method, shared_count
from .layer_rules import after_first_dense, from_max_window_layers, listed_kinds, windows

_GROUPS = ("n_group", "topk_group")
# Sigmoid scores, a bias that chooses, groups by their two best, shared experts without a gate.
_DEEPSEEK_MOE: dict[str, Any] = {
    "num_experts": "n_routed_experts|num_local_experts",
    "scoring": "sigmoid",
    "scaling_factor": "routed_scaling_factor",
    "groups": always_grouped,
    "shared_width": shared_count("n_shared_experts"),
    "selection_bias": True,
    "router_fp32": True,
}
_DEEPSEEK_ONLY: dict[str, tuple[object, ...]] = {
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "moe_layer_freq": (1,),
}

GROUPED_FAMILIES: dict[str, Family] = {
    "deepseek_v2": Family(
        architecture="DeepseekV2ForCausalLM",
        moe=MoEFamily(
            num_experts="n_routed_experts|num_experts",
            layers=after_first_dense,
            renormalize=False,
            scaling_factor="routed_scaling_factor",
            groups=grouped_by_method,
            group_score="max",
            shared_width=shared_count("n_shared_experts"),
            router_fp32=True,
        ),
        defaults={"rms_norm_eps": 1e-6, "first_k_dense_replace": 0, "n_shared_experts": 2, "topk_method": "greedy"},
        # Where weights are renormalised, the authors' code leaves out the scaling factor and transformers does nothing.
        only={
            "scoring_func": ("softmax",),
            "topk_method": ("greedy", "group_limited_greedy"),
            "norm_topk_prob": (False,),
            "moe_layer_freq": (1,),
        },
        reads=_GROUPS,
        latent=True,
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        rotary_interleaved=True,
    ),
    "deepseek_v3": Family(
        architecture="DeepseekV3ForCausalLM",
        moe=MoEFamily(layers=after_first_dense, **_DEEPSEEK_MOE),
        defaults={
            "rms_norm_eps": 1e-6,
            "norm_topk_prob": True,
            "first_k_dense_replace": 3,
            "n_shared_experts": 1,
            "routed_scaling_factor": 2.5,
            "n_group": 8,
            "topk_group": 4,
            "rope_interleave": True,
        },
        only=_DEEPSEEK_ONLY,
        reads=_GROUPS,
        latent=True,
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        rotary_interleaved="rope_interleave",
        quantization=("fp8",),
    ),
    "glm4_moe": Family(
        architecture="Glm4MoeForCausalLM",
        moe=MoEFamily(layers=after_first_dense, **_DEEPSEEK_MOE),
        defaults={
            "rms_norm_eps": 1e-5,
            "norm_topk_prob": True,
            "first_k_dense_replace": 1,
            "n_shared_experts": 1,
            "partial_rotary_factor": 0.5,
        },
        only=_DEEPSEEK_ONLY,
        reads=_GROUPS,
        qkv_bias="attention_bias",
        qk_norm="head",
        qk_norm_flag="use_qk_norm",
        partial_rotary=True,
    ),
    "glm4_moe_lite": Family(
        architecture="Glm4MoeLiteForCausalLM",
        moe=MoEFamily(layers=listed_kinds, **_DEEPSEEK_MOE),
        defaults={
            "rms_norm_eps": 1e-5,
            "norm_topk_prob": True,
            "first_k_dense_replace": 1,
            "n_shared_experts": 1,
            "routed_scaling_factor": 1.8,
            "rope_interleave": True,
        },
        only=_DEEPSEEK_ONLY,
        reads=_GROUPS,
        latent=True,
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        rotary_interleaved="rope_interleave",
    ),
    "dots1": Family(
        architecture="Dots1ForCausalLM",
        moe=MoEFamily(layers=after_first_dense, **_DEEPSEEK_MOE),
        defaults={
            "rms_norm_eps": 1e-6,
            "norm_topk_prob": False,
            "first_k_dense_replace": 0,
            "sliding_window": 4096,
            "max_window_layers": 62,
        },
        only=_DEEPSEEK_ONLY | {"scoring_func": ("sigmoid", "noaux_tc")},
        reads=_GROUPS,
        attention=windows(from_max_window_layers, listed=True),
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        qk_norm="head",
    ),
    "solar_open": Family(
        architecture="SolarOpenForCausalLM",
        moe=MoEFamily(**_DEEPSEEK_MOE),
        defaults={
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "head_dim": 128,
            "num_key_value_heads": 8,
            "norm_topk_prob": True,
            "n_shared_experts": 1,
        },
        # Every layer is MoE and no head is normed; configs still carry the fields of GLM-4.5 that would say otherwise.
        only=_DEEPSEEK_ONLY | {"first_k_dense_replace": (0,), "use_qk_norm": (False,)},
        reads=_GROUPS,
        qkv_bias="attention_bias",
    ),
}
