"""Gated FFNs: those of the experts of one rank, over rows sorted by slot, and one FFN for all rows.

Not routing and no weights of tokens: rows come out unweighted, in the activation dtype, in the order they came in.
Letters: M rows, S slots of this rank, D width, F expert width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..native.gpu import GpuKernels
from ..quant import Matrix, PackedTensor, QuantTensor, dense
from ..quant.linear import linear
from .activation import SILU, Activation
from .gated import ExpertWeights, GatedFFN
from .kernels.linear import ffn
from .native_experts import native_ffn


def activate(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Return what goes into the second product, from rows that hold gate first, then up: [M, 2F] -> [M, F]."""
    gate, up = gate_up.chunk(2, dim=-1)
    if activation.kind == "silu":
        return F.silu(gate).mul_(up)
    gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    return (gate * activation.alpha).sigmoid_().mul_(gate).mul_(up.add_(1))


def gated_ffn(
    x: torch.Tensor, weights: GatedFFN, activation: Activation = SILU, kernels: GpuKernels | None = None
) -> torch.Tensor:
    """Run all rows through one gated FFN: [T, D] -> [T, D]; `kernels` of a GPU take what torch would dequantise."""
    if isinstance(weights.w13, PackedTensor):
        return native_ffn(x, weights, activation)
    found = ffn(x, weights, activation, kernels)
    if found is not None:
        return found
    return linear(activate(linear(x, weights.w13, weights.b13), activation), weights.w2, weights.b2)


def grouped_ffn(
    rows: torch.Tensor, tokens_per_slot: torch.Tensor, weights: ExpertWeights, activation: Activation = SILU
) -> torch.Tensor:
    """Run each row through the expert of its slot.

    One matrix product a slot that has rows; the weights of a slot without rows are not read. Every output row is
    written by exactly one product, so nothing uninitialised can come out. Biases are added to the rounded product, in
    one native call (packed experts) to the sum.

    Args:
        rows: [M, D] sorted by slot.
        tokens_per_slot: [S] i64 on the CPU, sums to M.
        weights: the experts of the S slots.
        activation: between the two products.

    Returns:
        [M, D] in the dtype of `rows`, unweighted.

    Example:
        tokens_per_slot [2, 0, 1]: rows 0 and 1 go through expert 0, row 2 through expert 2.
    """
    assert len(tokens_per_slot) == weights.w13.shape[0], (tokens_per_slot.shape, weights.w13.shape)
    if isinstance(weights.w13, PackedTensor):
        return native_ffn(rows, weights, activation, tokens_per_slot=tokens_per_slot)
    ends = tokens_per_slot.cumsum(0)
    assert int(ends[-1]) == rows.shape[0], (tokens_per_slot.tolist(), rows.shape)
    if not rows.shape[0]:
        return rows.new_empty(rows.shape)
    product = grouped_product if weights.has_grouped_product else product_per_slot
    slots = None
    if weights.b13 is not None or weights.b2 is not None:
        slots = torch.repeat_interleave(tokens_per_slot).to(rows.device)  # [M] i64
    hidden = _add_bias(product(rows, ends, weights.w13), slots, weights.b13)  # [M, 2F]
    return _add_bias(product(activate(hidden, activation), ends, weights.w2), slots, weights.b2)


def filled_ffn(
    rows: torch.Tensor, tokens_per_slot: torch.Tensor, weights: ExpertWeights, activation: Activation = SILU
) -> torch.Tensor:
    """Run rows of which only the first stand for something, without a look from the host at how many those are.

    Where no grouped product takes the weights and their counts on the device, each slot multiplies all rows: S times
    the work, in fixed shapes.

    Args:
        rows: [M, D], the first ones sorted by slot.
        tokens_per_slot: [S] i64 on their device, sums to M at most.
        weights: the experts of the S slots, not packed.
        activation: between the two products.

    Returns:
        [M, D] in the dtype of `rows`; what stands behind the last slot's rows means nothing.
    """
    if not len(tokens_per_slot):
        return rows.new_empty(rows.shape)
    ends = tokens_per_slot.cumsum(0)
    places = torch.arange(rows.shape[0], device=rows.device)
    # Rows that stand for nothing are taken for the last slot's.
    slots = torch.searchsorted(ends, places, right=True).clamp_(max=len(ends) - 1)  # [M] i64
    has_grouped = weights.has_grouped_product_on_device

    def product(rows: torch.Tensor, matrices: Matrix) -> torch.Tensor:
        return grouped_product(rows, ends, matrices) if has_grouped else _product_of_all(rows, slots, matrices)

    hidden = _add_bias(product(rows, weights.w13), slots, weights.b13)  # [M, 2F]
    return _add_bias(product(activate(hidden, activation), weights.w2), slots, weights.b2)


def _product_of_all(rows: torch.Tensor, slots: torch.Tensor, matrices: Matrix) -> torch.Tensor:
    """Return rows [M, in] times the transposed matrix of their slot [S, out, in], each slot over all rows: [M, out]."""
    assert not isinstance(matrices, PackedTensor), "packed experts are multiplied by native calls"
    output = rows.new_zeros(rows.shape[0], matrices.shape[1])
    for slot in range(matrices.shape[0]):
        matrix = matrices.select(slot) if isinstance(matrices, QuantTensor) else matrices[slot]
        product = rows @ dense(matrix, rows.dtype).T
        output = torch.where((slots == slot).unsqueeze(1), product, output)
    return output


def _add_bias(output: torch.Tensor, slots: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    if bias is None or slots is None:
        return output
    return output.add_(bias.index_select(0, slots))


def grouped_product(rows: torch.Tensor, ends: torch.Tensor, matrices: Matrix) -> torch.Tensor:
    """Return rows [M, in] times the transposed matrix of their slot [S, out, in], in one call: [M, out].

    `ends` [S] i64: slot s has the rows from ends[s - 1] (0 for the first) up to ends[s].
    """
    assert isinstance(matrices, torch.Tensor), "only plain experts have a grouped product"
    return F.grouped_mm(rows, matrices.transpose(1, 2), offs=ends.to(torch.int32))


def product_per_slot(rows: torch.Tensor, ends: torch.Tensor, matrices: Matrix) -> torch.Tensor:
    """Return what `grouped_product` returns, with one call a slot that has rows; takes any width, device and format.

    A quantised matrix is dequantised alone, when its turn comes, so that one of them at most is held as numbers.
    """
    assert not isinstance(matrices, PackedTensor), "packed experts are multiplied by native calls"
    output = rows.new_empty(rows.shape[0], matrices.shape[1])
    start = 0
    for slot, end in enumerate(ends.tolist()):
        if end > start:
            matrix = matrices.select(slot) if isinstance(matrices, QuantTensor) else matrices[slot]
            torch.mm(rows[start:end], dense(matrix, rows.dtype).T, out=output[start:end])
        start = end
    return output
