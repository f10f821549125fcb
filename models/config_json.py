"""From the fields of a config.json to a `ModelConfig`, by the rules of a family.

Not the table of families: what differs between them is in their entries, what this file does is the same for all.
Units: token ids, elements. The file comes from strangers: types and ranges are checked, and what this version cannot do
is refused, never ignored.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ..moe.routing import RoutingConfig
from ..quant import parse_format
from .config import ConfigError, ModelConfig, MoEConfig, RotaryConfig
from .family import MAX_LAYERS, MAX_WIDTH, Family
from .json_fields import Fields, read_object, show

MAX_CONFIG_BYTES = 4 << 20
MAX_VOCAB, MAX_POSITIONS, MAX_TOKEN_ID = 1 << 24, 1 << 30, (1 << 31) - 1
MAX_EXPERTS, MAX_LAYER_EXPERTS = 4096, 1 << 17

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


def parse_config(fields: Fields, name: str, family: Family) -> ModelConfig:
    """Return the normalised config of a model of `family`, whose key in the table is `name`."""
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
        attention_scale=head_dim**-0.5,
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


def with_end_tokens(config: ModelConfig, path: Path, fields: Fields) -> ModelConfig:
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
