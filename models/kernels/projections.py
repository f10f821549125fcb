"""Every launch of products of all rows with one matrix, from a model's config alone: what torch does not multiply.

Those are stored weights, and with `batch_invariant` all matrices. Tensors are of device `meta`, which has no memory.
Not routed experts (moe/kernels/launches.py) and nothing that runs. Letters: T rows, N outputs, H heads.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ...moe.activation import SILU
from ...moe.kernels.expert_tiles import ROWS_A_SLOT
from ...moe.kernels.launches import PLAIN, SCALE_A_PART, stacked_matrices
from ...moe.kernels.linear import gated_launches, head_launches, linear_launches
from ...native.gpu import GpuKernels, GpuTarget, Launch
from ...quant import Matrix, QuantTensor
from ..config import LatentConfig, ModelConfig
from ..weights import DenseFFN
from .launches import head_parts

# Parts that are stored side by side, their outputs and their inputs; whether there is a bias.
Projection = tuple[tuple[int, ...], int, bool]


def projection_launches(config: ModelConfig, format_name: str, target: GpuTarget) -> Iterator[Launch]:
    """Yield every launch that differs in its code, for any T, with projections in a format of moe/kernels/launches.py.

    Router, head and what latent attention multiplies head by head are never stored in one.
    """
    fixed = GpuKernels(target=target, batch_invariant=True)
    yield from stored_launches(config, format_name, 1, fixed)  # the same tiles for all T
    if format_name != PLAIN:
        for rows in ROWS_A_SLOT:
            yield from stored_launches(config, format_name, rows, GpuKernels(target=target))
    assert config.moe is not None
    yield from _linear(((config.vocab_size,), config.hidden_size, config.head_bias), PLAIN, 1, fixed)
    router = ((config.moe.routing.num_experts,), config.hidden_size, config.moe.router_bias)
    yield from _linear(router, PLAIN, 1, fixed, torch.float32)
    for part in head_parts(config):
        if part.latent is not None:
            yield from _by_head(part.num_heads, part.latent, fixed)


def stored_launches(config: ModelConfig, format_name: str, rows: int, kernels: GpuKernels) -> Iterator[Launch]:
    """Yield the launches of matrices that a checkpoint may store in a format: of attention, and of FFNs of all rows."""
    assert config.moe is not None
    for projection in dict.fromkeys(each for part in head_parts(config) for each in projections(part)):
        yield from _linear(projection, format_name, rows, kernels)
    dense_width = config.dense_width if len(config.moe_layers) < config.num_layers else 0
    for width in sorted({config.moe.shared_width, dense_width} - {0}):
        yield from _gated(config.hidden_size, width, format_name, rows, kernels)


def projections(config: ModelConfig) -> Iterator[Projection]:
    """Yield those of attention."""
    dim, latent, bias = config.hidden_size, config.latent, config.attention_bias
    heads = config.num_heads * config.head_dim
    if latent is None:
        kv_heads = config.num_kv_heads * config.head_dim
        yield (heads, kv_heads, kv_heads), dim, bias
        yield (dim,), heads, config.output_bias
        return
    if latent.query_rank:
        yield (latent.query_rank,), dim, bias
        yield (heads,), latent.query_rank, False
    else:
        yield (heads,), dim, False
    yield (latent.kv_rank + latent.rope_dim,), dim, bias
    yield (dim,), config.num_heads * latent.value_dim, config.output_bias


def _linear(
    projection: Projection, format_name: str, rows: int, kernels: GpuKernels, dtype: torch.dtype = torch.bfloat16
) -> list[Launch]:
    sections, inputs, has_bias = projection
    outputs = sum(sections)
    weight = _matrix(format_name, outputs, inputs, sections, dtype)
    bias = torch.empty(outputs, dtype=dtype, device="meta") if has_bias else None
    launches = linear_launches(torch.empty(rows, inputs, dtype=dtype, device="meta"), weight, bias, kernels)
    if launches is None:  # parts of unlike sizes with a scale each are left to torch
        assert format_name == SCALE_A_PART and len(set(sections)) > 1, f"no kernel reads {format_name}"
        return []
    return launches[0]


def _gated(width: int, ffn_width: int, format_name: str, rows: int, kernels: GpuKernels) -> list[Launch]:
    weights = DenseFFN(
        w13=_matrix(format_name, 2 * ffn_width, width, (ffn_width, ffn_width)),
        w2=_matrix(format_name, width, ffn_width, (width,)),
    )
    x = torch.empty(rows, width, dtype=torch.bfloat16, device="meta")
    launches = gated_launches(x, weights, SILU, kernels)
    assert launches is not None, f"no kernel reads {format_name}"
    return launches[0]


def _by_head(heads: int, latent: LatentConfig, kernels: GpuKernels) -> Iterator[Launch]:
    """Of queries with the latents' keys, and of sums of latents with their values."""
    for inputs, outputs in ((latent.nope_dim, latent.kv_rank), (latent.kv_rank, latent.value_dim)):
        weight = torch.empty(heads, outputs, inputs, dtype=torch.bfloat16, device="meta")
        yield from head_launches(weight.new_empty(1, heads, inputs), weight, kernels)[0]


def _matrix(
    format_name: str, outputs: int, inputs: int, sections: tuple[int, ...], dtype: torch.dtype = torch.bfloat16
) -> Matrix:
    stack = stacked_matrices(format_name, (1, outputs, inputs), sections, dtype)
    assert isinstance(stack, torch.Tensor | QuantTensor)
    return stack[0] if isinstance(stack, torch.Tensor) else stack.select(0)
