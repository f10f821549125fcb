"""The families that moewe knows, one table entry each, and the config of a model folder.

Not a decoder: an entry says what the fields and tensors of a family are called and what they mean.
Units: elements; see `family` for what an entry may say.
"""

from __future__ import annotations

from pathlib import Path

from .config import ConfigError, ModelConfig
from .config_json import MAX_CONFIG_BYTES, parse_config, with_end_tokens
from .family import MAX_WIDTH, Family, MoEFamily, TensorNames, after_first_dense, sparse_step
from .json_fields import Fields, read_object, show, show_path

FAMILIES: dict[str, Family] = {
    "mixtral": Family(
        architecture="MixtralForCausalLM",
        moe=MoEFamily(num_experts="num_local_experts|num_experts", expert_width="intermediate_size", renormalize=None),
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e6},
        names=TensorNames(
            block="block_sparse_moe",
            projections=("w1", "w3", "w2"),
            aliases=((".mlp.", ".block_sparse_moe."),),
        ),
    ),
    "qwen2_moe": Family(
        architecture="Qwen2MoeForCausalLM",
        moe=MoEFamily(
            layers=sparse_step,
            shared_width=lambda fields, _: fields.integer("shared_expert_intermediate_size", 1, MAX_WIDTH),
            shared_gate=True,
        ),
        defaults={"rms_norm_eps": 1e-6, "norm_topk_prob": False, "qkv_bias": True},
        qkv_bias="qkv_bias",
        gated_window=True,
    ),
    "qwen3_moe": Family(
        architecture="Qwen3MoeForCausalLM",
        moe=MoEFamily(layers=sparse_step),
        defaults={"rms_norm_eps": 1e-6, "norm_topk_prob": False},
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        qk_norm="head",
        gated_window=True,
    ),
    "olmoe": Family(
        architecture="OlmoeForCausalLM",
        moe=MoEFamily(expert_width="intermediate_size"),
        defaults={"rms_norm_eps": 1e-5, "norm_topk_prob": False},
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        qk_norm="full",
    ),
    "glm4_moe": Family(
        architecture="Glm4MoeForCausalLM",
        moe=MoEFamily(
            num_experts="n_routed_experts|num_local_experts",
            layers=after_first_dense,
            scoring="sigmoid",
            scaling_factor="routed_scaling_factor",
            shared_width=lambda fields, width: width * fields.integer("n_shared_experts", 0, 1024, default=1),
            selection_bias=True,
            router_fp32=True,
        ),
        defaults={"rms_norm_eps": 1e-5, "norm_topk_prob": True, "partial_rotary_factor": 0.5},
        qkv_bias="attention_bias",
        qk_norm="use_qk_norm",
        partial_rotary=True,
        names=TensorNames(shared="shared_experts"),
    ),
    "llama": Family(
        architecture="LlamaForCausalLM",
        defaults={"rms_norm_eps": 1e-6},
        qkv_bias="attention_bias",
        output_bias="attention_bias",
    ),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        defaults={"rms_norm_eps": 1e-6, "head_dim": 128},
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        qk_norm="head",
        gated_window=True,
    ),
}


def load_config(path: Path) -> ModelConfig:
    """Return the normalised config of the model folder `path`.

    Raises:
        ConfigError: config.json or generation_config.json is missing, malformed, out of range, or of a model that this
            version does not run; one line with field, value and fix.
    """
    if not (path / "config.json").exists():
        raise ConfigError(f"{show_path(path)} holds no config.json; give a model folder as transformers saves it")
    fields = Fields(content=read_object(path / "config.json", MAX_CONFIG_BYTES), where="config.json", defaults={})
    name = find_family(fields)
    fields = Fields(content=fields.content, where=fields.where, defaults=dict(FAMILIES[name].defaults))
    config = parse_config(fields, name, FAMILIES[name])
    config = with_end_tokens(config, path, fields)
    if (beyond := max(config.eos_token_ids, default=0)) >= config.vocab_size:
        raise ConfigError(
            f"eos_token_id = {beyond} is not below vocab_size = {config.vocab_size}, so no text would end; "
            "correct it in config.json or generation_config.json"
        )
    return config


def find_family(fields: Fields) -> str:
    """Return the key of the family that `model_type` names, or `architectures` where `model_type` is absent."""
    model_type, listed = fields.raw("model_type"), fields.raw("architectures")
    by_class = {family.architecture: name for name, family in FAMILIES.items()}
    listed = [a for a in listed if isinstance(a, str) and a in by_class] if isinstance(listed, list) else []
    if isinstance(model_type, str) and model_type in FAMILIES:
        if listed and by_class[listed[0]] != model_type:
            raise fields.refuse("model_type", model_type, f"contradicts architectures = {show(listed)}; correct one")
        return model_type
    if model_type is None and listed:
        return by_class[listed[0]]
    known = ", ".join(FAMILIES)
    raise fields.refuse("model_type", model_type, f"is not a family that moewe runs; it runs: {known}")
