"""Products of all rows with one matrix on a GPU, by the kernels of experts: for quantised weights, and fixed tiles.

torch multiplies plain weights; it dequantises others first, and which way it adds up depends on the number of rows.
Here all rows are those of one slot, or of as many slots as there are heads.
Letters: T rows, H heads, K inputs, N outputs.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ...native.gpu import GpuKernels, Launch
from ...quant import Matrix, PackedTensor, QuantTensor
from ...quant.linear import head_linear as plain_head_linear
from ...quant.linear import linear as plain_linear
from ...quant.linear import logits as plain_logits
from ..activation import SILU, Activation
from ..gated import ExpertWeights, GatedFFN
from .experts import can_multiply, ffn_launches, product_launches
from .weights import kernel_weights


def linear(
    x: torch.Tensor, weight: Matrix, bias: torch.Tensor | None = None, kernels: GpuKernels | None = None
) -> torch.Tensor:
    """Return x weight^T + bias: x [T, K], weight [N, K], bias [N] -> [T, N] in the dtype of `x`.

    With `kernels` they multiply quantised weights, and all of them where a row's bits may not depend on others.
    """
    if kernels is None or not _takes(weight, kernels):
        return plain_linear(x, weight, bias)
    launches = linear_launches(x, weight, bias, kernels)
    if launches is None:
        return plain_linear(x, weight, bias)
    return _run(*launches)


def head_linear(
    x: torch.Tensor, weight: torch.Tensor | PackedTensor, kernels: GpuKernels | None = None
) -> torch.Tensor:
    """Return x[:, h] weight[h]^T of every head: x [T, H, K], weight [H, N, K] -> [T, H, N] in the dtype of `x`."""
    if kernels is None or not kernels.batch_invariant or not len(x):
        return plain_head_linear(x, weight)
    assert isinstance(weight, torch.Tensor)
    return _run(*head_launches(x, weight, kernels))


def logits(
    x: torch.Tensor,
    head: torch.Tensor | PackedTensor,
    bias: torch.Tensor | None = None,
    kernels: GpuKernels | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return x head^T + bias in fp32: [S, K] -> [S, N]; `out` as of `quant.linear.logits`."""
    if kernels is None or not _takes(head, kernels):
        return plain_logits(x, head, bias, out=out)
    return linear(x, head, bias, kernels).float()


def ffn(
    x: torch.Tensor, weights: GatedFFN, activation: Activation = SILU, kernels: GpuKernels | None = None
) -> torch.Tensor | None:
    """Run all rows [T, D] through one gated FFN; None where torch does it, see `linear`."""
    if kernels is None or not len(x) or not (_takes(weights.w13, kernels) or _takes(weights.w2, kernels)):
        return None
    launches = gated_launches(x, weights, activation, kernels)
    return None if launches is None else _run(*launches)


def linear_launches(
    x: torch.Tensor, weight: Matrix, bias: torch.Tensor | None, kernels: GpuKernels
) -> tuple[list[Launch], torch.Tensor] | None:
    """Return the launches behind `linear` and where its result will stand; None where no kernel reads the format."""
    part = kernel_weights(_stacked(weight), kernels.target, gated=False)
    if part is None:
        return None
    return product_launches(x, part, (1, weight.shape[0]), None if bias is None else bias[None], kernels)


def head_launches(x: torch.Tensor, weight: torch.Tensor, kernels: GpuKernels) -> tuple[list[Launch], torch.Tensor]:
    """Return the launches behind `head_linear` and where its result will stand."""
    num_rows, heads, width = x.shape
    rows = x.transpose(0, 1).reshape(heads * num_rows, width)  # by head
    part = kernel_weights(weight.contiguous(), kernels.target, gated=False)
    assert part is not None
    launches, out = product_launches(rows, part, (heads, weight.shape[1]), None, kernels)
    return launches, out.view(heads, num_rows, -1).transpose(0, 1)


def gated_launches(
    x: torch.Tensor, weights: GatedFFN, activation: Activation, kernels: GpuKernels
) -> tuple[list[Launch], torch.Tensor] | None:
    """Return the launches behind `ffn` and where its result will stand; None where no kernel reads the formats."""
    biases = [None if bias is None else bias[None] for bias in (weights.b13, weights.b2)]
    stacked = ExpertWeights(w13=_stacked(weights.w13), w2=_stacked(weights.w2), b13=biases[0], b2=biases[1])
    if not can_multiply(stacked, kernels.target):
        return None
    return ffn_launches(x, None, stacked, activation, kernels=kernels)


def _takes(weight: Matrix, kernels: GpuKernels) -> bool:
    return isinstance(weight, QuantTensor) or kernels.batch_invariant


def _stacked(weight: Matrix) -> Matrix:
    """Return a stack of one matrix, sharing memory with it."""
    if isinstance(weight, torch.Tensor):
        return weight[None]
    assert isinstance(weight, QuantTensor), "packed weights are for a CPU"
    zeros = None if weight.zeros is None else weight.zeros[None]
    return replace(weight, data=weight.data[None], scales=weight.scales[None], zeros=zeros, shape=(1, *weight.shape))


def _run(launches: list[Launch], out: torch.Tensor) -> torch.Tensor:
    for launch in launches:
        launch.run()
    return out
