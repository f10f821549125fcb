"""The parameters of a model in our own names: shape, number format, and which of them a quantised checkpoint packs.

Not stored names (`tensor_names`) and not about ranks: parameters are those of the whole model.
Names are those inside a layer, with `#` for the number of an expert; shapes are those held, row-major.
Letters: V vocabulary, D width, H query heads, Hkv KV heads, F FFN width, E experts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..quant import FP8_BLOCK, MXFP4, Quantization, QuantScheme
from ..quant.scheme import DATA_TYPES, SCALE_TYPES
from .config import ConfigError, LatentConfig, ModelConfig, MoEConfig
from .tensor_names import EXPERT, NAMES, TensorNames

EMBEDDING, HEAD, HEAD_BIAS = "model.embed_tokens.weight", "lm_head.weight", "lm_head.bias"
FINAL_NORM, FINAL_NORM_BIAS = "model.norm.weight", "model.norm.bias"
ROUTER, SELECTION_BIAS, SINKS = "mlp.router.weight", "mlp.selection_bias", "self_attn.sinks"
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One parameter: `shape` as held, name of the torch type or None for the model's, `packed` numbers an element."""

    shape: tuple[int, ...]
    dtype: str | None = None
    packed: int = 1

    @property
    def num_elements(self) -> int:
        """Elements held."""
        return math.prod(self.shape)

    def num_bytes(self, itemsize: int) -> int:
        """Return exact bytes where the model's dtype takes `itemsize` bytes."""
        return self.num_elements * (itemsize if self.dtype is None else _ITEMSIZES[self.dtype])


Parameters = dict[str, Parameter]
_FP32 = "float32"
_ITEMSIZES = {_FP32: 4, "uint8": 1, "int8": 1, "float8_e4m3fn": 1}


def layer_prefix(layer: int) -> str:
    """Return what the names of all tensors of a decoder layer begin with."""
    return f"model.layers.{layer}."


def names_of(config: ModelConfig) -> TensorNames:
    """Return how the family of `config` spells its tensors."""
    return NAMES[config.family]


def global_parameters(config: ModelConfig) -> Parameters:
    """Return the parameters that belong to no layer, by whole name."""
    matrix, norm = Parameter(shape=(config.vocab_size, config.hidden_size)), Parameter(shape=(config.hidden_size,))
    parameters = {EMBEDDING: matrix, FINAL_NORM: norm}
    if config.norm == "layer":
        parameters[FINAL_NORM_BIAS] = norm
    if not config.head_tied:
        parameters[HEAD] = matrix
    if config.head_bias:
        parameters[HEAD_BIAS] = Parameter(shape=(config.vocab_size,))
    return parameters


def attention_parameters(config: ModelConfig, layer: int) -> Parameters:
    """Return attention of one layer with its norms."""
    dim, head = config.hidden_size, config.head_dim
    parameters = _norm(config, "input_layernorm")
    if config.latent is not None:
        parameters |= _latent(config, config.latent, layer)
        value_width = config.num_heads * config.latent.value_dim
    else:
        rows = {p: (config.num_heads if p == "q" else config.num_kv_heads) * head for p in "qkv"}
        modules = {f"self_attn.{p}_proj": (count, dim) for p, count in rows.items()}
        parameters |= _matrices(config, layer, modules, bias=config.attention_bias)
        value_width = rows["q"]
        if config.qk_norm in ("head", "full"):
            full = config.qk_norm == "full"
            parameters["self_attn.q_norm.weight"] = Parameter(shape=(rows["q"] if full else head,))
            parameters["self_attn.k_norm.weight"] = Parameter(shape=(rows["k"] if full else head,))
    if config.sinks:
        parameters[SINKS] = Parameter(shape=(config.num_heads,), dtype=_FP32)
    return parameters | _matrices(config, layer, {"self_attn.o_proj": (dim, value_width)}, bias=config.output_bias)


def _latent(config: ModelConfig, latent: LatentConfig, layer: int) -> Parameters:
    dim, heads = config.hidden_size, config.num_heads
    query_rows = heads * (latent.nope_dim + latent.rope_dim)
    if latent.query_rank:
        q_a = {"self_attn.q_a_proj": (latent.query_rank, dim)}
        parameters = _matrices(config, layer, q_a, bias=config.attention_bias)
        parameters["self_attn.q_a_layernorm.weight"] = Parameter(shape=(latent.query_rank,))
        parameters |= _matrices(config, layer, {"self_attn.q_b_proj": (query_rows, latent.query_rank)})
    else:
        parameters = _matrices(config, layer, {"self_attn.q_proj": (query_rows, dim)})
    kv_a = {"self_attn.kv_a_proj": (latent.kv_rank + latent.rope_dim, dim)}
    return (
        parameters
        | _matrices(config, layer, kv_a, bias=config.attention_bias)
        | {
            "self_attn.kv_a_layernorm.weight": Parameter(shape=(latent.kv_rank,)),
            "self_attn.kv_b_k.weight": Parameter(shape=(heads, latent.nope_dim, latent.kv_rank)),
            "self_attn.kv_b_v.weight": Parameter(shape=(heads, latent.value_dim, latent.kv_rank)),
        }
    )


def ffn_norm_parameters(config: ModelConfig) -> Parameters:
    """Return the norm that belongs to the FFN of a layer."""
    return _norm(config, "post_attention_layernorm")


def dense_parameters(config: ModelConfig, layer: int) -> Parameters:
    """Return the FFN of one dense layer."""
    return _gated(config, layer, "mlp", config.dense_width, bias=config.dense_bias)


def router_parameters(config: ModelConfig, moe: MoEConfig) -> Parameters:
    """Return the router of one MoE layer."""
    count, in_fp32 = moe.routing.num_experts, _FP32 if moe.router_fp32 else None
    parameters = {ROUTER: Parameter(shape=(count, config.hidden_size), dtype=in_fp32)}
    if moe.router_bias:
        parameters["mlp.router.bias"] = Parameter(shape=(count,), dtype=in_fp32)
    if moe.selection_bias:
        parameters[SELECTION_BIAS] = Parameter(shape=(count,), dtype=_FP32)
    return parameters


def shared_parameters(config: ModelConfig, moe: MoEConfig, layer: int) -> Parameters:
    """Return the shared expert of one MoE layer with its gate; empty without one."""
    if not moe.shared_width:
        return {}
    parameters = _gated(config, layer, "mlp.shared", moe.shared_width, bias=moe.shared_bias)
    if moe.shared_gate:
        parameters["mlp.shared_gate.weight"] = Parameter(shape=(1, config.hidden_size))
    return parameters


def expert_parameters(config: ModelConfig, moe: MoEConfig, layer: int) -> Parameters:
    """Return one routed expert of one MoE layer; they are all alike, so names hold `#`."""
    return _gated(config, layer, EXPERT, moe.expert_width, bias=moe.expert_bias)


def layer_parameters(config: ModelConfig, layer: int) -> Parameters:
    """Return everything in one layer, its experts once with `#` in their names."""
    parameters = attention_parameters(config, layer) | ffn_norm_parameters(config)
    if config.moe is None or not config.is_moe(layer):
        return parameters | dense_parameters(config, layer)
    moe = config.moe
    parameters |= router_parameters(config, moe) | shared_parameters(config, moe, layer)
    return parameters | expert_parameters(config, moe, layer)


def is_quantized_at_load(name: str) -> bool:
    """Return True for a matrix of a layer that `--quantization` quantises; the head is not in a layer.

    Neither routers nor gates of shared experts, nor the factors that latent attention multiplies head by head.
    """
    module, _, kind = name.rpartition(".")
    return kind == "weight" and module.endswith("_proj")


def packed_by_head(name: str, shape: tuple[int, ...]) -> tuple[int, int, int] | None:
    """Return (heads, outputs, inputs) of what latent attention multiplies head by head, None for all else."""
    if name == "self_attn.kv_b_k.weight":  # queries are multiplied with it from the other side
        return shape[0], shape[2], shape[1]
    return (shape[0], shape[1], shape[2]) if name == "self_attn.kv_b_v.weight" else None


def is_down_of_all(name: str) -> bool:
    """Return True for the down projection of an FFN that every token passes: of a dense layer, or shared."""
    return name in ("mlp.down_proj.weight", "mlp.shared.down_proj.weight")


def scheme_of(config: ModelConfig, layer: int, modules: list[str]) -> QuantScheme | None:
    """Return how `modules` (our names) of a layer are quantised, None where they are not.

    Raises:
        ConfigError: they are held in one tensor, and config.json quantises some of them only.
    """
    quantization = config.quantization
    if quantization is None or (quantization.scheme.kind == MXFP4 and not modules[0].startswith(EXPERT)):
        return None
    chosen = [not _is_excluded(config, quantization, layer, module) for module in modules]
    if any(chosen) != all(chosen):
        left_out = modules[chosen.index(False)]
        raise ConfigError(
            f"config.json: modules_to_not_convert leaves out {left_out} of layer {layer} but not "
            f"{modules[chosen.index(True)]}, which is held in one tensor with it; list both or neither"
        )
    return quantization.scheme if all(chosen) else None


def _is_excluded(config: ModelConfig, quantization: Quantization, layer: int, module: str) -> bool:
    stored = {name.removesuffix(".weight") for name in names_of(config).stored_for(f"{module}.weight")}
    return any(quantization.excludes(layer_prefix(layer) + name.replace("#", "0")) for name in stored)


def _norm(config: ModelConfig, module: str) -> Parameters:
    parameters = {f"{module}.weight": Parameter(shape=(config.hidden_size,))}
    if config.norm == "layer":
        parameters[f"{module}.bias"] = Parameter(shape=(config.hidden_size,))
    return parameters


def _gated(config: ModelConfig, layer: int, prefix: str, width: int, *, bias: bool) -> Parameters:
    gate, up, down = (f"{prefix}.{projection}" for projection in PROJECTIONS)
    dim = config.hidden_size
    return _matrices(config, layer, {gate: (width, dim), up: (width, dim)}, bias=bias) | _matrices(
        config, layer, {down: (dim, width)}, bias=bias
    )


def _matrices(
    config: ModelConfig, layer: int, modules: dict[str, tuple[int, int]], *, bias: bool = False
) -> Parameters:
    """Return weight, scales and bias of modules that are held one below the other, [rows, columns] each."""
    scheme, parameters = scheme_of(config, layer, list(modules)), Parameters()
    for module, (rows, columns) in modules.items():
        if scheme is None:
            parameters[f"{module}.weight"] = Parameter(shape=(rows, columns))
        else:
            _check_width(scheme, module, columns)
            data, packed = scheme.data_shape(rows, columns), 2 if scheme.kind == MXFP4 else 1
            parameters[f"{module}.weight"] = Parameter(shape=data, dtype=DATA_TYPES[scheme.kind], packed=packed)
            parameters[f"{module}.weight_scale"] = Parameter(
                shape=scheme.scales_shape(rows, columns), dtype=SCALE_TYPES[scheme.kind]
            )
        if bias:
            parameters[f"{module}.bias"] = Parameter(shape=(rows,))
    return parameters


def _check_width(scheme: QuantScheme, module: str, columns: int) -> None:
    if scheme.kind != FP8_BLOCK and columns % scheme.block[1]:
        raise ConfigError(
            f"config.json: {module} has {columns} columns, which blocks of {scheme.block[1]} ({scheme.kind}) do not "
            "divide; config.json belongs to another model"
        )
