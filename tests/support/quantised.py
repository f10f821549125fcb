"""Quantised checkpoints made from plain ones, and the plain checkpoints of the numbers that they stand for.

Not moewe's own quantisation: packing and unpacking are written out here, with loops where they are clearer.
Letters: N rows (outputs), D columns (inputs), E experts. Folders are fresh, free to edit.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import torch

from .fixtures import checkpoint, copy_checkpoint, edit_config, rewrite_tensors

E4M3_LARGEST = 448.0
E2M1_VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
# What DeepSeek's own checkpoints leave as it is.
KEPT = re.compile(r"(norm|\.gate|embed_tokens|lm_head|eh_proj)\.weight$|bias$")
GPT_OSS_KEPT = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]

Tensors = dict[str, torch.Tensor]


def fp8_blocks(weight: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return e4m3 [N, D], scales f32 [ceil(N / rows), ceil(D / columns)], and the numbers that these two stand for."""
    rows, columns = weight.shape
    scales = torch.empty(-(-rows // block[0]), -(-columns // block[1]))
    data, numbers = torch.empty(rows, columns, dtype=torch.float8_e4m3fn), torch.empty(rows, columns)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = (slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1]))
            scales[i, j] = weight[part].abs().max() / E4M3_LARGEST
            data[part] = (weight[part] / scales[i, j]).to(torch.float8_e4m3fn)
            numbers[part] = data[part].float() * scales[i, j]
    return data, scales, numbers


def mxfp4_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return bytes [.., N, D / 32, 16], exponents [.., N, D / 32] u8 with bias 127, and the numbers [.., N, D]."""
    parts = weight.unflatten(-1, (-1, 32))
    exponents = parts.abs().amax(-1).log2().floor() - 2  # the largest e2m1 number has exponent 2
    scaled = parts / exponents.exp2()[..., None]
    codes = (scaled.abs()[..., None] - E2M1_VALUES).abs().argmin(-1)
    numbers = E2M1_VALUES[codes] * scaled.sign() * exponents.exp2()[..., None]
    codes = (codes + 8 * (scaled < 0)).to(torch.uint8)
    packed = codes[..., 0::2] | codes[..., 1::2] << 4
    return packed, (exponents + 127).to(torch.uint8), numbers.flatten(-2)


def fp8_checkpoint(name: str, block: tuple[int, int], **config: object) -> tuple[Path, Path]:
    """Return a copy of a fixture in block-scaled fp8, as DeepSeek publishes it, and one of its numbers in fp32."""
    plain = checkpoint(name, **config)

    def quantise(tensors: Tensors) -> Tensors:
        made: Tensors = {}
        for key, tensor in tensors.items():
            if KEPT.search(key):
                made[key] = tensor
            else:
                made[key], made[key + "_scale_inv"], _ = fp8_blocks(tensor, block)
        return made

    def round_trip(tensors: Tensors) -> Tensors:
        return {key: t if KEPT.search(key) else fp8_blocks(t, block)[2] for key, t in tensors.items()}

    return _pair(
        plain,
        quantise,
        round_trip,
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(block)},
    )


def mxfp4_checkpoint(name: str, **config: object) -> tuple[Path, Path]:
    """Return a copy of a gpt-oss fixture with experts in MXFP4, as OpenAI publishes it, and one of its numbers."""
    plain = checkpoint(name, **config)

    def is_expert(key: str) -> bool:
        return key.endswith(("experts.gate_up_proj", "experts.down_proj"))

    def quantise(tensors: Tensors) -> Tensors:
        made: Tensors = {}
        for key, tensor in tensors.items():
            if is_expert(key):  # stored [E, D, N], packed along the inputs of [E, N, D]
                made[key + "_blocks"], made[key + "_scales"], _ = mxfp4_blocks(tensor.transpose(1, 2).contiguous())
            else:
                made[key] = tensor
        return made

    def round_trip(tensors: Tensors) -> Tensors:
        return {
            key: mxfp4_blocks(t.transpose(1, 2).contiguous())[2].transpose(1, 2) if is_expert(key) else t
            for key, t in tensors.items()
        }

    return _pair(plain, quantise, round_trip, {"quant_method": "mxfp4", "modules_to_not_convert": GPT_OSS_KEPT})


def _pair(
    plain: Path,
    quantise: Callable[[Tensors], Tensors],
    round_trip: Callable[[Tensors], Tensors],
    quantization_config: dict[str, object],
) -> tuple[Path, Path]:
    quantised = rewrite_tensors(copy_checkpoint(plain), quantise)
    edit_config(quantised, quantization_config=quantization_config)
    return quantised, rewrite_tensors(copy_checkpoint(plain), round_trip)
