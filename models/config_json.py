"""From the fields of a config.json to a `ModelConfig`, by the rules of a family.

Not the table of families: what differs between them is in their entries, what this file does is the same for all.
Units: token ids, elements. The file comes from strangers: types and ranges are checked, and what this version cannot do
is refused, never ignored.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from ..moe.routing import RoutingConfig
from ..quant import parse_format
from .config import ConfigError, LatentConfig, LayerAttention, ModelConfig, MoEConfig
from .family import MAX_WIDTH, Family, Groups, MoEFamily, switched
from .json_fields import Fields, read_object, show
from .layer_rules import MAX_LAYERS
from .quantization_json import parse_quantization
from .rotary_json import parse_positions

MAX_CONFIG_BYTES = 4 << 20
DTYPE = "dtype|torch_dtype"
MAX_VOCAB, MAX_TOKEN_ID, MAX_HEADS = 1 << 24, (1 << 31) - 1, 1 << 14
MAX_EXPERTS, MAX_LAYER_EXPERTS = 4096, 1 << 17

# Fields that change what a model computes and that this version does not do: the only values that may stand there.
_ONLY: tuple[tuple[str, tuple[object, ...], str], ...] = (
    ("hidden_act", ("silu", "swish"), "is an activation that this version does not have; use a model with silu"),
    ("compression_config", (), "marks a quantised checkpoint, which this version does not load; use the bf16 weights"),
    ("clip_qkv", (), "clips q, k and v, which this version does not do; use a model without it"),
    ("mlp_bias", (False,), "puts biases into the FFN, which this version does not do; use a model without them"),
    ("use_sliding_window", (False,), "switches windows on, which this family does not have; set it to false"),
    ("attention_chunk_size", (), "cuts attention into chunks, which this family does not do; remove it"),
    ("dual_chunk_attention_config", (), "cuts attention into chunks, which this family does not do; remove it"),
    ("attn_logit_softcapping", (), "caps scores, which this family does not do; remove it"),
    ("final_logit_softcapping", (), "caps logits, which this family does not do; remove it"),
    ("n_group", (1,), "routes by expert groups, which this family does not do; use a model with one group"),
    ("topk_group", (1,), "routes by expert groups, which this family does not do; use a model with one group"),
)


@dataclass(frozen=True, kw_only=True)
class _Heads:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_width: int
    latent: LatentConfig | None = None


def parse_config(fields: Fields, name: str, family: Family) -> ModelConfig:
    """Return the normalised config of a model of `family`, whose key in the table is `name`."""
    _refuse_what_is_missing_here(fields, family)
    num_layers = fields.integer("num_hidden_layers", 1, MAX_LAYERS)
    hidden_size = fields.integer("hidden_size", 1, MAX_WIDTH)
    heads = _parse_latent_heads(fields) if family.latent else _parse_heads(fields, family, hidden_size)
    positions = parse_positions(fields, family, heads.rotary_width)
    moe_layers, moe = _parse_moe(fields, family, num_layers)
    config = ModelConfig(
        family=name,
        num_layers=num_layers,
        hidden_size=hidden_size,
        vocab_size=fields.integer("vocab_size", 1, MAX_VOCAB),
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        attention_scale=heads.head_dim**-0.5 * (positions.score_factor if family.latent else 1.0),
        dense_width=fields.integer(family.dense_width, 1, MAX_WIDTH) if len(moe_layers) < num_layers else 0,
        rotary=positions.rotary,
        norm_eps=fields.number("rms_norm_eps", 0, 1),
        max_position_embeddings=positions.max_position,
        dtype=_parse_dtype(fields),
        quantization=parse_quantization(fields, family),
        layer_attention=_parse_attention(fields, family, num_layers, positions.max_position),
        latent=heads.latent,
        moe_layers=moe_layers,
        moe=moe,
        attention_bias=switched(fields, family.qkv_bias),
        output_bias=switched(fields, family.output_bias),
        dense_bias=switched(fields, family.dense_bias),
        qk_norm=family.qk_norm if switched(fields, family.qk_norm_flag or True) else None,
        qk_norm_after_rotary=family.qk_norm_after_rotary,
        sinks=family.sinks,
        norm=family.norm,
        norm_after=family.norm_after,
        head_tied=fields.flag("tie_word_embeddings", default=False),
        head_bias=switched(fields, family.head_bias),
    )
    return replace(config, **family.more(fields)) if family.more else config


def _parse_heads(fields: Fields, family: Family, hidden_size: int) -> _Heads:
    num_heads = fields.integer("num_attention_heads", 1, MAX_HEADS)
    num_kv_heads = fields.integer("num_key_value_heads", 1, num_heads, default=num_heads)
    if num_heads % num_kv_heads:
        raise fields.refuse("num_key_value_heads", num_kv_heads, f"must divide num_attention_heads = {num_heads}")
    if fields.raw("head_dim") is None and hidden_size % num_heads:
        raise fields.refuse(
            "num_attention_heads", num_heads, f"must divide hidden_size = {hidden_size}; or set head_dim"
        )
    head_dim = fields.integer("head_dim", 2, 1 << 14, default=hidden_size // num_heads)
    if family.splits_hidden and head_dim * num_heads != hidden_size:
        raise fields.refuse("head_dim", head_dim, f"times num_attention_heads must be hidden_size = {hidden_size}")
    return _Heads(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, rotary_width=head_dim)


def _parse_latent_heads(fields: Fields) -> _Heads:
    num_heads = fields.integer("num_attention_heads", 1, MAX_HEADS)
    num_kv_heads = fields.integer("num_key_value_heads", 1, MAX_HEADS, default=num_heads)
    if num_kv_heads != num_heads:
        why = f"must be num_attention_heads = {num_heads}: latent attention makes keys and values for every head"
        raise fields.refuse("num_key_value_heads", num_kv_heads, why)
    compressed = fields.stated("q_lora_rank") is not None
    latent = LatentConfig(
        kv_rank=fields.integer("kv_lora_rank", 1, MAX_WIDTH),
        rope_dim=fields.integer("qk_rope_head_dim", 2, 1 << 14),
        nope_dim=fields.integer("qk_nope_head_dim", 1, 1 << 14),
        value_dim=fields.integer("v_head_dim", 1, 1 << 14),
        query_rank=fields.integer("q_lora_rank", 1, MAX_WIDTH) if compressed else 0,
    )
    head_dim = latent.nope_dim + latent.rope_dim
    return _Heads(
        num_heads=num_heads, num_kv_heads=num_heads, head_dim=head_dim, rotary_width=latent.rope_dim, latent=latent
    )


def _parse_attention(fields: Fields, family: Family, num_layers: int, max_position: int) -> tuple[LayerAttention, ...]:
    """Return what is special about each layer; windows and chunks as long as the longest sequence are not."""
    layers = tuple(
        replace(
            layer,
            window=layer.window if layer.window < max_position else 0,
            chunk=layer.chunk if layer.chunk < max_position else 0,
        )
        for layer in family.attention(fields, num_layers)
    )
    return layers if any(layer != LayerAttention() for layer in layers) else ()


def _parse_moe(fields: Fields, family: Family, num_layers: int) -> tuple[tuple[int, ...], MoEConfig | None]:
    spelling = family.moe
    if spelling is None:
        return (), None
    layers = spelling.layers(fields, num_layers)
    if not layers:
        return (), None
    width = fields.integer(spelling.expert_width, 1, MAX_WIDTH)
    shared_width = spelling.shared_width(fields, width) if spelling.shared_width else 0
    return layers, MoEConfig(
        routing=_parse_routing(fields, spelling, num_layers),
        expert_width=width,
        activation=spelling.activation(fields),
        shared_width=shared_width,
        shared_gate=spelling.shared_gate,
        shared_bias=shared_width > 0 and switched(fields, spelling.shared_bias),
        selection_bias=spelling.selection_bias,
        router_bias=spelling.router_bias,
        expert_bias=spelling.expert_bias,
        weigh_input=spelling.weigh_input,
        router_fp32=spelling.router_fp32,
    )


def _parse_routing(fields: Fields, spelling: MoEFamily, num_layers: int) -> RoutingConfig:
    num_experts = fields.repeated_integer(spelling.num_experts, 1, MAX_EXPERTS)
    if num_experts * num_layers > MAX_LAYER_EXPERTS:
        why = f"times num_hidden_layers = {num_layers} is more than the {MAX_LAYER_EXPERTS} experts that moewe loads"
        raise fields.refuse(spelling.num_experts, num_experts, why)
    top_k = fields.repeated_integer(spelling.top_k, 1, num_experts)
    needed = 1 if spelling.weigh_input else 2 if spelling.scoring == "sparsemixer" else top_k
    if top_k != needed:
        raise fields.refuse(spelling.top_k, top_k, f"must be {needed}: this family's router chooses no other number")
    groups = spelling.groups(fields) if spelling.groups else Groups()
    size = num_experts // groups.count
    if num_experts % groups.count or (groups.count > 1 and spelling.group_score == "top2" and size < 2):
        raise fields.refuse(
            "n_group", groups.count, f"must split {num_experts} experts into equal groups of at least 2"
        )
    if not 1 <= groups.chosen <= groups.count or groups.chosen * size < top_k:
        why = f"must be at most n_group = {groups.count}, and its groups of {size} must hold {top_k} experts"
        raise fields.refuse("topk_group", groups.chosen, why)
    minimum, jitter, factor = spelling.min_weight_sum, spelling.jitter, spelling.scaling_factor
    return RoutingConfig(
        num_experts=num_experts,
        top_k=top_k,
        scoring=spelling.scoring,
        renormalize=switched(fields, spelling.renormalize),
        min_weight_sum=fields.number(minimum, 0, 1, closed=True) if minimum else 0.0,
        scaling_factor=fields.number(factor, 0, 1e6, default=1.0) if factor else 1.0,
        num_groups=groups.count,
        top_groups=groups.chosen,
        group_score=spelling.group_score,
        jitter=fields.number(jitter, 0, 1, closed=True) if jitter else RoutingConfig.jitter,
    )


def _refuse_what_is_missing_here(fields: Fields, family: Family) -> None:
    for name, allowed, why in _ONLY:
        if name not in family.reads and name not in family.only:
            _refuse_other(fields, name, allowed, why)
    for name, allowed in family.only.items():
        may = ", ".join(map(show, allowed)) or "nothing"
        _refuse_other(fields, name, allowed, f"is not supported in this family ({may} is); use another model")


def _refuse_other(fields: Fields, name: str, allowed: tuple[object, ...], why: str) -> None:
    value = fields.raw(name)
    items = value if isinstance(value, list) else [value]
    if value is not None and not all(any(item == one for one in allowed) for item in items):
        raise fields.refuse(name, value, why)


def _parse_dtype(fields: Fields) -> str:
    value = fields.raw(DTYPE)
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
    given = [source for source in sources if source.raw("eos_token_id") is not None]  # what loses was read as well
    ends = given[0].integers("eos_token_id", 0, MAX_TOKEN_ID, 256) if given else ()
    begin = fields.integer("bos_token_id", 0, MAX_TOKEN_ID) if fields.raw("bos_token_id") is not None else None
    return replace(config, eos_token_ids=ends, bos_token_id=begin)
