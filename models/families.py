"""The families that moewe knows, one table entry each, and the config of a model folder.

Not a decoder: an entry says what the fields of a family are called and what they mean.
Units: elements; see `family` for what an entry may say. Defaults are those of the config classes of transformers 5.24.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from .checkpoint import stored_format
from .config import ConfigError, ModelConfig
from .config_json import DTYPE, MAX_CONFIG_BYTES, parse_config, with_end_tokens
from .families_grouped import GROUPED_FAMILIES
from .family import Family, MoEFamily
from .family_rules import (
    as_wide_as_one,
    clamped,
    four_multipliers,
    query_temperature,
    shared_count,
    shared_size,
)
from .json_fields import Fields, read_object, show_path
from .layer_rules import (
    all_layers,
    chunks_with_rotary,
    even_below_max_window_layers,
    even_layers,
    from_max_window_layers,
    interval_between,
    listed_or_interleaved,
    sparse_step,
    windows,
)
from .model_type import WITHOUT_EFFECT, find_family, text_fields

_WINDOW = ("use_sliding_window",)
_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}

FAMILIES: dict[str, Family] = GROUPED_FAMILIES | {
    "mixtral": Family(
        architecture="MixtralForCausalLM",
        moe=MoEFamily(expert_width="intermediate_size", renormalize=True),
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e6},
        attention=windows(all_layers),
    ),
    "qwen2_moe": Family(
        architecture="Qwen2MoeForCausalLM",
        moe=MoEFamily(
            layers=sparse_step, shared_width=shared_size("shared_expert_intermediate_size"), shared_gate=True
        ),
        defaults={
            "rms_norm_eps": 1e-6,
            "norm_topk_prob": False,
            "qkv_bias": True,
            "sliding_window": 4096,
            "max_window_layers": 28,
        },
        reads=_WINDOW,
        attention=windows(even_below_max_window_layers, gated=True, listed=True),
        qkv_bias="qkv_bias",
    ),
    "qwen3_moe": Family(
        architecture="Qwen3MoeForCausalLM",
        moe=MoEFamily(layers=sparse_step),
        defaults={"rms_norm_eps": 1e-6, "norm_topk_prob": False, "sliding_window": 4096},
        reads=_WINDOW,
        attention=windows(all_layers, gated=True),
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        qk_norm="head",
    ),
    "olmoe": Family(
        architecture="OlmoeForCausalLM",
        moe=MoEFamily(expert_width="intermediate_size"),
        defaults={"rms_norm_eps": 1e-5, "norm_topk_prob": False},
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        qk_norm="full",
        splits_hidden=True,
    ),
    "flex_olmo": Family(
        architecture="FlexOlmoForCausalLM",
        moe=MoEFamily(expert_width="intermediate_size"),
        defaults={"rms_norm_eps": 1e-6, "norm_topk_prob": False, "rope_theta": 5e5},
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        qk_norm="full",
        norm_after=True,
    ),
    "gpt_oss": Family(
        architecture="GptOssForCausalLM",
        moe=MoEFamily(
            expert_width="intermediate_size", renormalize=True, activation=clamped, router_bias=True, expert_bias=True
        ),
        defaults={
            "rms_norm_eps": 1e-5,
            "head_dim": 64,
            "attention_bias": True,
            "sliding_window": 128,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
            "rope_theta": 1.5e5,
            "rope_parameters": _GPT_OSS_ROPE,
        },
        attention=windows(even_layers, listed=True),
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        sinks=True,
        quantization=("mxfp4",),
    ),
    "granitemoe": Family(
        architecture="GraniteMoeForCausalLM",
        moe=MoEFamily(expert_width="intermediate_size", renormalize=True),
        defaults={"rms_norm_eps": 1e-6},
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        more=four_multipliers,
    ),
    "granitemoeshared": Family(
        architecture="GraniteMoeSharedForCausalLM",
        moe=MoEFamily(
            expert_width="intermediate_size",
            renormalize=True,
            shared_width=shared_size("shared_intermediate_size", low=0),
        ),
        defaults={"rms_norm_eps": 1e-6, "shared_intermediate_size": 0},
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        more=four_multipliers,
    ),
    "phimoe": Family(
        architecture="PhimoeForCausalLM",
        moe=MoEFamily(
            expert_width="intermediate_size", scoring="sparsemixer", renormalize=False, jitter="router_jitter_noise"
        ),
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e6, "router_jitter_noise": 0.01},
        attention=windows(all_layers),
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        head_bias="lm_head_bias",
        norm="layer",
        rope_kinds=("default", "longrope"),
        own_amplitudes=True,
    ),
    "ernie4_5_moe": Family(
        architecture="Ernie4_5_MoeForCausalLM",
        moe=MoEFamily(
            num_experts="moe_num_experts|num_experts",
            top_k="moe_k|num_experts_per_tok",
            layers=interval_between,
            renormalize=True,
            min_weight_sum="moe_norm_min",
            shared_width=shared_count("moe_num_shared_experts"),
            shared_bias="use_bias",
            selection_bias=True,
            router_fp32=True,
        ),
        defaults={
            "rms_norm_eps": 1e-5,
            "rope_theta": 5e5,
            "tie_word_embeddings": True,
            "moe_norm_min": 1e-12,
            "moe_num_shared_experts": 2,
        },
        only={
            "compression_ratio": (1,),
            "moe_gate": ("topk", "topk_fused"),
            "moe_use_aux_free": (True,),
            "use_rmsnorm": (True,),
        },
        qkv_bias="use_bias",
        output_bias="use_bias",
        dense_bias="use_bias",
        head_bias="use_bias",
        rotary_interleaved=True,
    ),
    "hunyuan_v1_moe": Family(
        architecture="HunYuanMoEV1ForCausalLM",
        moe=MoEFamily(
            top_k="moe_topk|num_experts_per_tok",
            expert_width="intermediate_size",
            renormalize=True,
            shared_width=as_wide_as_one,
        ),
        defaults={"rms_norm_eps": 1e-5},
        only={
            "norm_topk_prob": (True,),
            "use_qk_norm": (True,),
            "use_mixed_mlp_moe": (True,),
            "num_shared_expert": (1,),
            "moe_layer_num_skipped": (0,),
            "group_limited_greedy": (False,),
            "n_group": (1, False),
            "topk_group": (1, False),
            "routed_scaling_factor": (1, False),
            "use_cla": (False,),
            "use_mla": (False,),
            "norm_type": ("rms", "hf_rms"),
            "use_rotary_pos_emb": (True,),
            "position_embedding_xdrope": (False,),
        },
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        qk_norm="head",
        qk_norm_after_rotary=True,
        rope_kinds=("default", "linear", "dynamic"),
    ),
    "minimax_m2": Family(
        architecture="MiniMaxM2ForCausalLM",
        moe=MoEFamily(expert_width="intermediate_size", scoring="sigmoid", renormalize=True, selection_bias=True),
        defaults={"rms_norm_eps": 1e-6, "rope_theta": 5e6, "head_dim": 128},
        only={
            "scoring_func": ("sigmoid",),
            "use_routing_bias": (True,),
            "use_qk_norm": (True,),
            "qk_norm_type": ("per_layer",),
            "attn_type_list": (1,),
            "shared_intermediate_size": (0,),
            "layernorm_full_attention_beta": (1,),
            "layernorm_mlp_beta": (1,),
        },
        qk_norm="full",
        partial_rotary=True,
        quantization=("fp8",),
    ),
    "llama4_text": Family(
        architecture="Llama4ForCausalLM",
        moe=MoEFamily(
            expert_width="intermediate_size",
            layers=listed_or_interleaved,
            scoring="sigmoid",
            renormalize=False,
            shared_width=as_wide_as_one,
            weigh_input=True,
        ),
        defaults={
            "rms_norm_eps": 1e-5,
            "rope_theta": 5e5,
            "head_dim": 128,
            "use_qk_norm": True,
            "attention_chunk_size": 8192,
            "num_experts_per_tok": 1,
        },
        reads=("attention_chunk_size",),
        attention=chunks_with_rotary,
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        qk_norm="unit",
        qk_norm_flag="use_qk_norm",
        qk_norm_after_rotary=True,
        dense_width="intermediate_size_mlp",
        rotary_interleaved=True,
        more=query_temperature,
    ),
    "llama": Family(
        architecture="LlamaForCausalLM",
        defaults={"rms_norm_eps": 1e-6},
        qkv_bias="attention_bias",
        output_bias="attention_bias",
    ),
    "mistral": Family(
        architecture="MistralForCausalLM",
        defaults={"rms_norm_eps": 1e-6, "sliding_window": 4096},
        attention=windows(all_layers),
    ),
    "qwen2": Family(
        architecture="Qwen2ForCausalLM",
        defaults={"rms_norm_eps": 1e-6, "sliding_window": 4096, "max_window_layers": 28},
        reads=_WINDOW,
        attention=windows(from_max_window_layers, gated=True, listed=True),
        qkv_bias=True,
    ),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        defaults={"rms_norm_eps": 1e-6, "head_dim": 128, "sliding_window": 4096, "max_window_layers": 28},
        reads=_WINDOW,
        attention=windows(from_max_window_layers, gated=True, listed=True),
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        qk_norm="head",
    ),
}


def load_config(path: Path) -> ModelConfig:
    """Return the normalised config of the model folder `path`.

    Raises:
        ConfigError: config.json or generation_config.json is missing, malformed, out of range, or of a model that this
            version does not run; one line with field, value and fix.
    """
    return _load(path)[0]


def unread_fields(path: Path) -> tuple[str, ...]:
    """Return the fields of config.json that nothing asked for and that are not known to change no output, sorted."""
    fields = _load(path)[1]
    given = {name for name, value in fields.content.items() if value not in (None, False, [], {})}
    return tuple(sorted(given - fields.read - WITHOUT_EFFECT))


def _load(path: Path) -> tuple[ModelConfig, Fields]:
    if not (path / "config.json").exists():
        raise ConfigError(f"{show_path(path)} holds no config.json; give a model folder as transformers saves it")
    content = read_object(path / "config.json", MAX_CONFIG_BYTES)
    config, fields = _parse(content, "config.json")
    config = with_end_tokens(config, path, fields)
    if fields.raw(DTYPE) is None:  # gpt-oss is published so
        config = replace(config, dtype=stored_format(path) or config.dtype)
    if (beyond := max(config.eos_token_ids, default=0)) >= config.vocab_size:
        raise ConfigError(
            f"eos_token_id = {beyond} is not below vocab_size = {config.vocab_size}, so no text would end; "
            "correct it in config.json or generation_config.json"
        )
    return config, fields


def parse_content(content: dict[str, Any], where: str) -> ModelConfig:
    """Return the normalised config of the fields of a config.json without its folder; `where` names it in errors.

    Raises:
        ConfigError: as `load_config`.
    """
    return _parse(content, where)[0]


def _parse(content: dict[str, Any], where: str) -> tuple[ModelConfig, Fields]:
    whole = Fields(content=content, where=where, defaults={})
    name = find_family(whole, FAMILIES)
    text = text_fields(whole, name)
    fields = Fields(content=text.content, where=text.where, defaults=dict(FAMILIES[name].defaults))
    return parse_config(fields, name, FAMILIES[name]), fields
