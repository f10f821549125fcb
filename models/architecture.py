"""From a config to what a planner asks of a model: bytes by kind in the formats to plan in, and arithmetic by kind.

Not a loader: no weights are read. Bytes in formats that moewe runs are those of `model_footprint`, which tests hold
against loaded tensors; nvfp4 is only planned. Units: numbers of matrices, FLOPs, bytes.
"""

from __future__ import annotations

from dataclasses import replace

from ..quant import FP8_BLOCK, MXFP4, MXFP4_SCHEME, Quantization, QuantScheme, parse_format, parse_kv_format
from ..quant.schemes import SCHEMES, weight_scheme
from ..topologies.planner.architecture import BF16, FP4, FP8, INT8, PAYLOAD_ITEMSIZES, Architecture, Scores
from .config import ConfigError, ModelConfig
from .footprint import matrix_numbers, model_footprint
from .parameters import (
    Parameter,
    Parameters,
    attention_parameters,
    dense_parameters,
    expert_parameters,
    is_quantized_at_load,
    router_parameters,
    shared_parameters,
)

CHECKPOINT, PLAIN, FP8_WEIGHTS, NVFP4 = "checkpoint", "bf16", "fp8", "nvfp4"
WEIGHT_FORMATS = (CHECKPOINT, PLAIN, FP8_WEIGHTS, MXFP4, NVFP4, *SCHEMES)
_BLOCKS = QuantScheme(kind=FP8_BLOCK, block=(128, 128))  # as DeepSeek-V3's config.json has it
# NVFP4 (NVIDIA, 2025): e2m1 numbers with an fp8 scale for each 16 of them. NVIDIA's checkpoints of DeepSeek leave the
# projections into queries and latents in bf16, and quantise the output projection (hf_quant_config.json).
_NVFP4_BLOCK = 16
_KEPT = tuple(f"self_attn.{name}_proj." for name in ("q", "k", "v", "q_a", "q_b", "kv_a"))


def architecture(config: ModelConfig, *, name: str, weights: str = CHECKPOINT, kv: str = "auto") -> Architecture:
    """Return what a planner needs of the model.

    Args:
        config: of the model.
        name: what a printed plan calls it.
        weights: one of WEIGHT_FORMATS; `checkpoint` as config.json says.
        kv: format of KV, as `--kv-cache-dtype` takes it.

    Raises:
        ConfigError: the format is not known, or the matrices do not divide into its blocks.
    """
    if weights not in WEIGHT_FORMATS:
        raise ConfigError(f"weights = {weights!r} is not a format; use one of: {', '.join(WEIGHT_FORMATS)}")
    held = parse_format(config.dtype if weights == CHECKPOINT else "bfloat16")
    if weights in SCHEMES and config.quantization is not None:
        config = replace(config, quantization=None)
    planned = _requantised(config, weights)
    footprint = model_footprint(
        planned,
        name=name,
        dtype=held,
        scheme=weight_scheme(weights) if weights in SCHEMES else None,
        kv_dtype=parse_kv_format(kv, held),
        foreign=_nvfp4_bytes if weights == NVFP4 else None,
    )
    attention, ffn = _precisions(planned, weights)
    plain = replace(planned, quantization=None)
    moe = plain.moe
    layers = range(plain.num_layers)
    dense = [dense_parameters(plain, layer) for layer in layers if moe is None or not plain.is_moe(layer)]
    return Architecture(
        footprint=footprint,
        attention_numbers=_numbers([attention_parameters(plain, layer) for layer in layers]),
        dense_numbers=_numbers(dense),
        router_numbers=len(plain.moe_layers) * matrix_numbers(router_parameters(plain, moe)) if moe else 0,
        shared_numbers=_numbers([shared_parameters(plain, moe, layer) for layer in plain.moe_layers]) if moe else 0,
        expert_numbers=matrix_numbers(expert_parameters(plain, moe, plain.moe_layers[0])) if moe else 0,
        head_numbers=plain.vocab_size * plain.hidden_size,
        attention_precision=attention,
        ffn_precision=ffn,
        score_precision=FP8 if parse_kv_format(kv, held).name == "fp8" else BF16,
        row_bytes=_row_bytes(plain, PAYLOAD_ITEMSIZES[ffn]),
        scores=tuple(_scores(plain, group.window) for group in footprint.kv_groups),
        num_groups=moe.routing.num_groups if moe else 1,
        top_groups=moe.routing.top_groups if moe else 1,
    )


def _numbers(parameters: list[Parameters]) -> int:
    return sum(map(matrix_numbers, parameters))


def _requantised(config: ModelConfig, weights: str) -> ModelConfig:
    """Return `config` with its matrices held as `weights`."""
    schemes = {FP8_WEIGHTS: _BLOCKS, MXFP4: MXFP4_SCHEME}
    if weights in schemes:
        same = config.quantization is not None and config.quantization.scheme.kind == schemes[weights].kind
        return config if same else replace(config, quantization=Quantization(scheme=schemes[weights]))
    return config if weights == CHECKPOINT else replace(config, quantization=None)


def _precisions(config: ModelConfig, weights: str) -> tuple[str, str]:
    """Return what products of attention and of FFNs run in, where a machine can."""
    if weights == NVFP4:
        return BF16, FP4
    if weights in SCHEMES:
        return INT8, INT8  # int4 as well: it is unpacked to int8
    if config.quantization is None:
        return BF16, BF16
    # gpt-oss multiplies MXFP4 weights with bf16 activations (its model card); blocks of fp8 meet fp8 activations.
    return (BF16, BF16) if config.quantization.scheme.kind == MXFP4 else (FP8, FP8)


def _nvfp4_bytes(name: str, parameter: Parameter) -> int | None:
    if not is_quantized_at_load(name) or name.startswith(_KEPT):
        return None
    rows, columns = parameter.shape
    return rows * (-(-columns // 2) + -(-columns // _NVFP4_BLOCK))


def _row_bytes(config: ModelConfig, payload: float) -> float:
    """Return what is written and read again of a row between products, in all layers.

    Rows are bf16 but for those that go into experts (`payload` bytes an element). Two norms and two additions read and
    write D each; every other tensor is written once and read once.
    """
    dim, heads, latent = config.hidden_size, config.num_heads, config.latent
    if latent is None:
        attention = (2 * heads + 2 * config.num_kv_heads) * config.head_dim
    else:
        attention = latent.query_rank + latent.kv_rank + latent.rope_dim + heads * (
            latent.nope_dim + latent.rope_dim + latent.kv_rank + latent.rope_dim + latent.kv_rank + latent.value_dim
        )  # fmt: skip
    total = 0.0
    for layer in range(config.num_layers):
        widths = [config.dense_width]
        if config.moe is not None and config.is_moe(layer):
            widths = [config.moe.expert_width] * config.moe.routing.top_k
            widths += [config.moe.shared_width] if config.moe.shared_width else []
        ffn = sum(2 * dim * payload + 2 * 2 * width * 2 + 2 * width * payload + 2 * dim * 2 for width in widths)
        total += 8 * dim * 2 + 2 * attention * 2 + ffn
    return total


def _scores(config: ModelConfig, window: int) -> Scores:
    """Return the arithmetic of attention of the layers of one cache group."""
    layers = sum(
        config.latent is not None or (config.attention_of(layer).window or config.attention_of(layer).chunk) == window
        for layer in range(config.num_layers)
    )
    if config.latent is None:
        flops = 2 * layers * config.num_heads * 2 * config.head_dim
        return Scores(decode_flops=flops, prefill_flops=flops)
    latent = config.latent
    return Scores(
        decode_flops=2 * layers * config.num_heads * (2 * latent.kv_rank + latent.rope_dim),
        prefill_flops=2 * layers * config.num_heads * (latent.nope_dim + latent.rope_dim + latent.value_dim),
    )
