"""The families that moewe knows, one table entry each, and the way from a config.json to a `ModelConfig`.

Not a decoder and no tensor names (`name_map`): only what the fields of a family are called and what they mean.
Units: token ids, elements. config.json comes from strangers: types and ranges are checked, and what this version
cannot do is refused, never ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..moe.routing import RoutingConfig
from ..quant import parse_format
from .config import ConfigError, ModelConfig, MoEConfig, RotaryConfig
from .json_fields import Fields, read_object, show

MAX_CONFIG_BYTES = 4 << 20
MAX_WIDTH, MAX_VOCAB, MAX_POSITIONS, MAX_TOKEN_ID = 1 << 20, 1 << 24, 1 << 30, (1 << 31) - 1
MAX_LAYERS, MAX_EXPERTS, MAX_LAYER_EXPERTS = 1024, 4096, 1 << 17


def _every_layer(fields: Fields, num_layers: int) -> tuple[int, ...]:
    return tuple(range(num_layers))


def _sparse_step(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """Layers i with (i + 1) % decoder_sparse_step == 0 that mlp_only_layers does not name."""
    step = fields.integer("decoder_sparse_step", 1, MAX_LAYERS, default=1)
    dense = fields.integers("mlp_only_layers", 0, MAX_LAYERS, max_length=MAX_LAYERS)
    return tuple(i for i in range(num_layers) if (i + 1) % step == 0 and i not in dense)


def _after_first_dense(fields: Fields, num_layers: int) -> tuple[int, ...]:
    return tuple(range(fields.integer("first_k_dense_replace", 0, num_layers, default=1), num_layers))


@dataclass(frozen=True, kw_only=True)
class MoEFamily:
    """How a family spells its experts.

    Attributes:
        num_experts / expert_width: names of the fields.
        layers: which layers are MoE, from the fields and the number of layers.
        scoring: see `RoutingConfig`.
        renormalize: name of the flag, or None when the weights of the chosen experts always sum to one.
        scaling_factor: name of the field, or None when there is none.
        shared_width: from the fields and the width of a routed expert to that of the shared one; None: there is none.
        shared_gate: the shared expert has a sigmoid gate.
        selection_bias: the router has a bias that only chooses.
        router_fp32: router matrices are kept in fp32 whatever the dtype of the model.
    """

    num_experts: str = "num_experts|num_local_experts"
    expert_width: str = "moe_intermediate_size"
    layers: Callable[[Fields, int], tuple[int, ...]] = _every_layer
    scoring: str = "softmax"
    renormalize: str | None = "norm_topk_prob"
    scaling_factor: str | None = None
    shared_width: Callable[[Fields, int], int] | None = None
    shared_gate: bool = False
    selection_bias: bool = False
    router_fp32: bool = False


@dataclass(frozen=True, kw_only=True)
class Family:
    """One entry of the table.

    Attributes:
        architecture: the class name that config.json lists in `architectures`.
        moe: None for dense families.
        defaults: values of fields that config.json may leave out.
        qkv_bias / output_bias: names of the flags, or None when there is no such bias.
        qk_norm: `head` or `full` as in `ModelConfig`, the name of a flag that switches `head` on, or None.
        partial_rotary: only a part of each head may rotate.
        gated_window: `sliding_window` counts only when `use_sliding_window` is true.
    """

    architecture: str
    moe: MoEFamily | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    qkv_bias: str | None = None
    output_bias: str | None = None
    qk_norm: str | None = None
    partial_rotary: bool = False
    gated_window: bool = False


FAMILIES: dict[str, Family] = {
    "mixtral": Family(
        architecture="MixtralForCausalLM",
        moe=MoEFamily(num_experts="num_local_experts|num_experts", expert_width="intermediate_size", renormalize=None),
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e6},
    ),
    "qwen2_moe": Family(
        architecture="Qwen2MoeForCausalLM",
        moe=MoEFamily(
            layers=_sparse_step,
            shared_width=lambda fields, _: fields.integer("shared_expert_intermediate_size", 1, MAX_WIDTH),
            shared_gate=True,
        ),
        defaults={"rms_norm_eps": 1e-6, "norm_topk_prob": False, "qkv_bias": True},
        qkv_bias="qkv_bias",
        gated_window=True,
    ),
    "qwen3_moe": Family(
        architecture="Qwen3MoeForCausalLM",
        moe=MoEFamily(layers=_sparse_step),
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
            layers=_after_first_dense,
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

# Fields that change what a model computes and that this version does not do: the only values that may stand there.
_ONLY: tuple[tuple[str, tuple[object, ...], str], ...] = (
    ("hidden_act", ("silu",), "is an activation that this version does not have; use a model with silu"),
    ("quantization_config", (), "marks a quantised checkpoint, which this version does not load; use the bf16 weights"),
    ("compression_config", (), "marks a quantised checkpoint, which this version does not load; use the bf16 weights"),
    ("clip_qkv", (), "clips q, k and v, which this version does not do; use a model without it"),
    ("mlp_bias", (False,), "puts biases into the FFN, which this version does not do; use a model without them"),
    ("use_sliding_window", (False,), "switches window attention on, which this version does not do; set it to false"),
    ("n_group", (1,), "routes by expert groups, which this version does not do; use a model with one group"),
    ("topk_group", (1,), "routes by expert groups, which this version does not do; use a model with one group"),
)


def load_config(path: Path) -> ModelConfig:
    """Return the normalised config of the model folder `path`.

    Raises:
        ConfigError: config.json or generation_config.json is missing, malformed, out of range, or of a model that this
            version does not run; one line with field, value and fix.
    """
    if not (path / "config.json").exists():
        raise ConfigError(f"{show(str(path))} holds no config.json; give a model folder as transformers saves it")
    fields = Fields(content=read_object(path / "config.json", MAX_CONFIG_BYTES), where="config.json", defaults={})
    name = find_family(fields)
    fields = Fields(content=fields.content, where=fields.where, defaults=dict(FAMILIES[name].defaults))
    config = _parse(fields, name)
    return _with_end_tokens(config, path, fields)


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


def _parse(fields: Fields, name: str) -> ModelConfig:
    family = FAMILIES[name]
    _refuse_what_is_missing_here(fields)
    num_layers = fields.integer("num_hidden_layers", 1, MAX_LAYERS)
    hidden_size = fields.integer("hidden_size", 1, MAX_WIDTH)
    num_heads = fields.integer("num_attention_heads", 1, 1 << 14)
    num_kv_heads = fields.integer("num_key_value_heads", 1, num_heads, default=num_heads)
    if num_heads % num_kv_heads:
        raise fields.refuse("num_key_value_heads", num_kv_heads, f"must divide num_attention_heads = {num_heads}")
    if fields.raw("head_dim") is None and hidden_size % num_heads:
        raise fields.refuse(
            "num_attention_heads", num_heads, f"must divide hidden_size = {hidden_size}; or set head_dim"
        )
    head_dim = fields.integer("head_dim", 2, 1 << 14, default=hidden_size // num_heads)
    if family.qk_norm == "full" and head_dim * num_heads != hidden_size:
        raise fields.refuse("head_dim", head_dim, f"times num_attention_heads must be hidden_size = {hidden_size}")
    moe_layers, moe = _parse_moe(fields, family, num_layers)
    dense_width = fields.integer("intermediate_size", 1, MAX_WIDTH) if len(moe_layers) < num_layers else 0
    max_positions = fields.integer("max_position_embeddings", 1, MAX_POSITIONS)
    _refuse_window(fields, family)
    qk_norm = family.qk_norm
    if qk_norm not in (None, "head", "full"):
        qk_norm = "head" if fields.flag(str(qk_norm), default=False) else None
    return ModelConfig(
        family=name,
        num_layers=num_layers,
        hidden_size=hidden_size,
        vocab_size=fields.integer("vocab_size", 1, MAX_VOCAB),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dense_width=dense_width,
        rotary=_parse_rotary(fields, family, head_dim),
        norm_eps=fields.number("rms_norm_eps", 0, 1),
        max_position_embeddings=max_positions,
        dtype=_parse_dtype(fields),
        moe_layers=moe_layers,
        moe=moe,
        attention_bias=family.qkv_bias is not None and fields.flag(family.qkv_bias, default=False),
        output_bias=family.output_bias is not None and fields.flag(family.output_bias, default=False),
        qk_norm=qk_norm,
        head_tied=fields.flag("tie_word_embeddings", default=False),
    )


def _parse_moe(fields: Fields, family: Family, num_layers: int) -> tuple[tuple[int, ...], MoEConfig | None]:
    spelling = family.moe
    if spelling is None:
        return (), None
    layers = spelling.layers(fields, num_layers)
    if not layers:
        return (), None
    num_experts = fields.integer(spelling.num_experts, 1, MAX_EXPERTS)
    if num_experts * num_layers > MAX_LAYER_EXPERTS:
        why = f"times num_hidden_layers = {num_layers} is more than the {MAX_LAYER_EXPERTS} experts that moewe loads"
        raise fields.refuse(spelling.num_experts, num_experts, why)
    top_k = fields.integer("num_experts_per_tok", 1, num_experts)
    width = fields.integer(spelling.expert_width, 1, MAX_WIDTH)
    shared_width = spelling.shared_width(fields, width) if spelling.shared_width else 0
    routing = RoutingConfig(
        num_experts=num_experts,
        top_k=top_k,
        scoring=spelling.scoring,
        renormalize=fields.flag(spelling.renormalize) if spelling.renormalize else True,
        scaling_factor=fields.number(spelling.scaling_factor, 0, 1e6, default=1.0) if spelling.scaling_factor else 1.0,
    )
    return layers, MoEConfig(
        routing=routing,
        expert_width=width,
        shared_width=shared_width,
        shared_gate=spelling.shared_gate,
        selection_bias=spelling.selection_bias,
    )


def _refuse_what_is_missing_here(fields: Fields) -> None:
    for name, allowed, why in _ONLY:
        value = fields.raw(name)
        if value is not None and not any(value is item or value == item for item in allowed):
            raise fields.refuse(name, value, why)


def _refuse_window(fields: Fields, family: Family) -> None:
    window, kinds = fields.raw("sliding_window"), fields.raw("layer_types")
    if window is not None and not family.gated_window:
        raise fields.refuse(
            "sliding_window",
            window,
            "asks for window attention, which this version does not do; use a model without it",
        )
    if kinds is not None and (not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds)):
        raise fields.refuse("layer_types", kinds, "may only hold full_attention in this version; use another model")


def _parse_rotary(fields: Fields, family: Family, head_dim: int) -> RotaryConfig:
    """Read the v4 spelling (rope_theta, rope_scaling) and the v5 one (rope_parameters); refuse scaled kinds."""
    sections = [fields.section("rope_parameters"), fields.section("rope_scaling")]
    for section in sections:
        for name, value in section.content.items():
            if value is None or name in ("rope_theta", "partial_rotary_factor"):
                continue
            if name not in ("rope_type", "type") or value != "default":
                raise section.refuse(name, value, "scales positions, which this version does not do; use another model")
    theta = _one_value("rope_theta", [*sections, fields], 1e12, default=1e4)
    factor = _one_value("partial_rotary_factor", [*sections, fields], 1.0, default=1.0)
    if factor != 1.0 and not family.partial_rotary:
        why = "rotates a part of each head, which this family does not do; remove it"
        raise fields.refuse("partial_rotary_factor", factor, why)
    rotary_dim = int(head_dim * factor)
    if rotary_dim % 2 or rotary_dim < 2:
        why = f"leaves {rotary_dim} of head_dim = {head_dim} elements to rotate; it must be an even number from 2 on"
        raise fields.refuse("partial_rotary_factor", factor, why)
    return RotaryConfig(theta=theta, rotary_dim=rotary_dim)


def _one_value(name: str, sections: list[Fields], high: float, default: float) -> float:
    given = [section for section in sections if section.content.get(name) is not None]
    values = [section.number(name, 0, high) for section in given]
    if len(set(values)) > 1:
        raise given[0].refuse(
            name, values[0], f"contradicts {given[1].where}: {name} = {values[1]:g}; keep one of them"
        )
    return values[0] if values else sections[-1].number(name, 0, high, default=default)


def _parse_dtype(fields: Fields) -> str:
    value = fields.raw("dtype|torch_dtype")
    if value is None:
        return "float32"
    try:
        return parse_format(value if isinstance(value, str) else show(value)).name
    except ValueError as error:
        raise ConfigError(f"{fields.where}: {error}") from None


def _with_end_tokens(config: ModelConfig, path: Path, fields: Fields) -> ModelConfig:
    """Add begin and end tokens; generation_config.json wins over config.json."""
    sources = [fields]
    if (path / "generation_config.json").exists():
        content = read_object(path / "generation_config.json", MAX_CONFIG_BYTES)
        sources.insert(0, Fields(content=content, where="generation_config.json", defaults={}))
    ends = next(
        (s.integers("eos_token_id", 0, MAX_TOKEN_ID, 256) for s in sources if s.raw("eos_token_id") is not None), ()
    )
    begin = fields.integer("bos_token_id", 0, MAX_TOKEN_ID) if fields.raw("bos_token_id") is not None else None
    return replace(config, eos_token_ids=ends, bos_token_id=begin)
