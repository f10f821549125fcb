"""Names and shapes: every parameter of a model, and which stored tensor holds it.

Not reading and not about ranks: parameters are those of the whole model, one name an expert and projection.
Shapes are those that a checkpoint stores, row-major; offsets count elements of the stored tensor.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from .config import ConfigError, ModelConfig, MoEConfig
from .families import FAMILIES
from .family import TensorNames
from .json_fields import show
from .safetensors_file import StoredTensor

EMBEDDING, HEAD, FINAL_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
LOADABLE = ("F32", "F16", "BF16")
_IGNORED = re.compile(r"(^|\.)rotary_emb\.inv_freq$")
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where a parameter lies: from element `offset` of a stored tensor on."""

    stored: StoredTensor
    offset: int


@dataclass(frozen=True, kw_only=True)
class Matched:
    """What the tensors of a checkpoint are.

    Attributes:
        sources: for every parameter of the model, where it lies.
        ignored: stored tensors that nothing needs, by the explicit list.
    """

    sources: dict[str, Source]
    ignored: tuple[str, ...]


def layer_prefix(layer: int) -> str:
    """Return what the names of all tensors of a decoder layer begin with."""
    return f"model.layers.{layer}."


def attention_shapes(config: ModelConfig) -> Shapes:
    """Return the attention parameters of one layer with their norms, by name inside the layer."""
    dim, head = config.hidden_size, config.head_dim
    rows = {
        "q_proj": config.num_heads * head,
        "k_proj": config.num_kv_heads * head,
        "v_proj": config.num_kv_heads * head,
    }
    shapes: Shapes = {"input_layernorm.weight": (dim,)}
    shapes |= {f"self_attn.{name}.weight": (n, dim) for name, n in rows.items()}
    if config.attention_bias:
        shapes |= {f"self_attn.{name}.bias": (n,) for name, n in rows.items()}
    shapes["self_attn.o_proj.weight"] = (dim, config.num_heads * head)
    if config.output_bias:
        shapes["self_attn.o_proj.bias"] = (dim,)
    if config.qk_norm is not None:
        full = config.qk_norm == "full"
        shapes["self_attn.q_norm.weight"] = (rows["q_proj"] if full else head,)
        shapes["self_attn.k_norm.weight"] = (rows["k_proj"] if full else head,)
    return shapes


def ffn_shapes(prefix: str, projections: tuple[str, str, str], width: int, dim: int) -> Shapes:
    """Return gate, up and down of one gated FFN."""
    gate, up, down = projections
    return {
        f"{prefix}{gate}.weight": (width, dim),
        f"{prefix}{up}.weight": (width, dim),
        f"{prefix}{down}.weight": (dim, width),
    }


def router_shapes(config: ModelConfig, moe: MoEConfig) -> Shapes:
    """Return the router's parameters of one MoE layer, by name inside the layer."""
    block, experts = tensor_names(config).block, moe.routing.num_experts
    shapes: Shapes = {f"{block}.gate.weight": (experts, config.hidden_size)}
    if moe.selection_bias:
        shapes[f"{block}.gate.e_score_correction_bias"] = (experts,)
    return shapes


def shared_shapes(config: ModelConfig, moe: MoEConfig) -> Shapes:
    """Return the shared expert of one MoE layer with its gate, by name inside the layer; empty without one."""
    if not moe.shared_width:
        return {}
    names = tensor_names(config)
    shapes = ffn_shapes(
        f"{names.block}.{names.shared}.", TensorNames().projections, moe.shared_width, config.hidden_size
    )
    if moe.shared_gate:
        shapes[f"{names.block}.{names.shared}_gate.weight"] = (1, config.hidden_size)
    return shapes


def expert_shapes(config: ModelConfig, moe: MoEConfig, expert: int) -> Shapes:
    """Return one routed expert of one MoE layer, by name inside the layer: gate, up, down."""
    names = tensor_names(config)
    return ffn_shapes(f"{names.block}.experts.{expert}.", names.projections, moe.expert_width, config.hidden_size)


def dense_shapes(config: ModelConfig) -> Shapes:
    """Return the FFN of one dense layer, by name inside the layer: gate, up, down."""
    return ffn_shapes("mlp.", TensorNames().projections, config.dense_width, config.hidden_size)


def parameter_shapes(config: ModelConfig) -> Shapes:
    """Return every parameter of the whole model with its shape."""
    dim = config.hidden_size
    shapes: Shapes = {EMBEDDING: (config.vocab_size, dim)}
    for layer in range(config.num_layers):
        inside = attention_shapes(config) | {"post_attention_layernorm.weight": (dim,)}
        if config.moe is not None and config.is_moe(layer):
            inside |= router_shapes(config, config.moe) | shared_shapes(config, config.moe)
            for expert in range(config.moe.routing.num_experts):
                inside |= expert_shapes(config, config.moe, expert)
        else:
            inside |= dense_shapes(config)
        shapes |= {layer_prefix(layer) + name: shape for name, shape in inside.items()}
    shapes[FINAL_NORM] = (dim,)
    if not config.head_tied:
        shapes[HEAD] = (config.vocab_size, dim)
    return shapes


def tensor_names(config: ModelConfig) -> TensorNames:
    """Return how the family of `config` spells its tensors."""
    return FAMILIES[config.family].names


def keeps_fp32(config: ModelConfig, name: str) -> bool:
    """True when the parameter is held in fp32 whatever the dtype of the model."""
    if name.endswith(".e_score_correction_bias"):
        return True
    moe = FAMILIES[config.family].moe
    return moe is not None and moe.router_fp32 and name.endswith(f".{tensor_names(config).block}.gate.weight")


def match_tensors(tensors: Mapping[str, StoredTensor], config: ModelConfig) -> Matched:
    """Find the stored tensor of every parameter, experts one by one or stacked.

    Raises:
        ConfigError: a parameter is missing or given twice, a tensor has another shape or number format than the config
            calls for, or a tensor is neither a parameter nor on the list of those to ignore.
    """
    shapes = parameter_shapes(config)
    sources: dict[str, Source] = {}
    ignored, unknown = [], []
    for name, stored in tensors.items():
        own_name = _own_spelling(name, config)
        if _IGNORED.search(name) or (config.head_tied and name == HEAD):
            ignored.append(name)
            continue
        pieces = [(own_name, 0)] if own_name in shapes else list(_stacked_pieces(own_name, stored, shapes, config))
        if not pieces:
            unknown.append(name)
            continue
        _check_shape(stored, shapes.get(own_name, stored.shape))
        for parameter, offset in pieces:
            if parameter in sources:
                other = show(sources[parameter].stored.name)
                raise ConfigError(f"{show(name)} and {other} both hold {parameter}; remove one of them")
            sources[parameter] = Source(stored=stored, offset=offset)
    if unknown:
        raise ConfigError(
            f"weight files hold {_count(unknown)} that {config.family} with this config.json does not have; "
            "config.json belongs to another model, or the model has a part that this version does not run"
        )
    missing = [name for name in shapes if name not in sources]
    if missing:
        raise ConfigError(_missing(missing))
    return Matched(sources=sources, ignored=tuple(ignored))


def _own_spelling(name: str, config: ModelConfig) -> str:
    for other, own in tensor_names(config).aliases:
        name = name.replace(other, own)
    return name


def _stacked_pieces(
    name: str, stored: StoredTensor, shapes: Mapping[str, tuple[int, ...]], config: ModelConfig
) -> Iterator[tuple[str, int]]:
    """Yield (parameter, offset) of a tensor [E, 2F, D] or [E, D, F] that stacks all experts of a layer."""
    names = tensor_names(config)
    found = re.fullmatch(rf"(model\.layers\.\d+\.{names.block}\.experts\.)(gate_up_proj|down_proj)", name)
    if found is None or config.moe is None:
        return
    gate, up, down = names.projections
    parts = (gate, up) if found[2] == "gate_up_proj" else (down,)
    if f"{found[1]}0.{down}.weight" not in shapes:
        return
    rows, columns = shapes[f"{found[1]}0.{parts[0]}.weight"]
    num_experts, size = config.moe.routing.num_experts, rows * columns
    _check_shape(stored, (num_experts, len(parts) * rows, columns))
    for i, (expert, part) in enumerate((e, p) for e in range(num_experts) for p in parts):
        yield f"{found[1]}{expert}.{part}.weight", i * size


def _check_shape(stored: StoredTensor, shape: tuple[int, ...]) -> None:
    if stored.shape != shape:
        raise ConfigError(
            f"{show(stored.name)} has shape {list(stored.shape)} where config.json calls for {list(shape)}; "
            "config.json belongs to another model, or the weights do"
        )
    if stored.dtype not in LOADABLE:
        raise ConfigError(
            f"{show(stored.name)} is stored as {stored.dtype}, which this version does not load; "
            "use weights in bfloat16, float16 or float32"
        )
    assert math.prod(shape) > 0


def _missing(names: list[str]) -> str:
    if names == [HEAD]:
        return (
            f"weight files lack {HEAD}, and config.json does not tie it: set tie_word_embeddings to true in it if the "
            "head is the embedding matrix, or supply the tensor"
        )
    return f"weight files lack {_count(names)}; an incomplete download, or config.json belongs to another model"


def _count(names: list[str], limit: int = 5) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return f"{len(names)} tensor{'s' * (len(names) > 1)} ({', '.join(show(n) for n in names[:limit])}{more})"
