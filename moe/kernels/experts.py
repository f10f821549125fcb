"""Gated FFNs of the experts of one rank on a GPU, over rows sorted by slot, without a look from the host at counts.

Not routing and no weights of tokens: rows come out unweighted, rounded to their dtype. The reference is
`grouped_ffn_reference`. Letters: M rows, R rows of the source, S slots of this rank, D width, F expert width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...native.gpu import GpuKernels, GpuTarget, Launch
from ..activation import SILU, Activation
from ..gated import ExpertWeights
from .expert_tiles import ProductConfig, ProductSize, pick_config
from .row_tiles import RowTiles, even_tiles, tiles_launch
from .weights import Weights, kernel_weights


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """What a product reads: [R, in], row numbers [M] i32 or None, and how its rows are cut into tiles."""

    source: torch.Tensor
    row_tokens: torch.Tensor | None
    cut: RowTiles


def triton_ffn(
    x: torch.Tensor,
    tokens_per_slot: torch.Tensor,
    weights: ExpertWeights,
    activation: Activation = SILU,
    *,
    kernels: GpuKernels,
    row_tokens: torch.Tensor | None = None,
    cut: RowTiles | None = None,
    expected_rows: int | None = None,
) -> torch.Tensor:
    """Run each row through the expert of its slot.

    Args:
        x: [R, D] where rows lie.
        tokens_per_slot: [S] i64 on the device of `x`; sums to M at most: rows behind the last slot's stand for nothing.
        weights: the experts of the S slots, in a format that `can_multiply` knows.
        activation: between the two products.
        kernels: how they are launched; batch-invariant: with the same tiles for every number of rows.
        row_tokens: [M] i32, which row of `x` each sorted one is; None: `x` holds just them, in order.
        cut: the rows in tiles of `rows_of_tile`; None: they are cut here.
        expected_rows: how many rows stand for something, more or less, for which tiles are chosen; None: all.

    Returns:
        [M, D] in the dtype of `x`; what stands behind the last slot's rows is not written.
    """
    launches, out = ffn_launches(
        x, tokens_per_slot, weights, activation, kernels=kernels, row_tokens=row_tokens, cut=cut,
        expected_rows=expected_rows,
    )  # fmt: skip
    for launch in launches:
        launch.run()
    return out


def can_multiply(weights: ExpertWeights, target: GpuTarget) -> bool:
    """Return whether kernels read the formats of `weights`."""
    parts = ((weights.w13, True), (weights.w2, False))
    return all(kernel_weights(matrix, target, gated=gated) is not None for matrix, gated in parts)


def ffn_launches(
    x: torch.Tensor,
    tokens_per_slot: torch.Tensor | None,
    weights: ExpertWeights,
    activation: Activation = SILU,
    *,
    kernels: GpuKernels,
    row_tokens: torch.Tensor | None = None,
    cut: RowTiles | None = None,
    expected_rows: int | None = None,
) -> tuple[list[Launch], torch.Tensor]:
    """Return the launches behind `triton_ffn`, in order, and where its result will stand.

    Without `tokens_per_slot` every slot has as many rows, which nobody has to count.
    """
    w13, w2 = _parts(weights, kernels.target)
    num_slots, width, ffn_width = weights.w2.shape
    assert weights.w13.shape == (num_slots, 2 * ffn_width, width) and x.shape[1] == width, (x.shape, weights.w13.shape)
    assert tokens_per_slot is None or tokens_per_slot.shape == (num_slots,), tokens_per_slot.shape
    assert x.stride(1) == 1, x.stride()
    num_rows = len(x if row_tokens is None else row_tokens)
    hidden, out = x.new_empty(num_rows, ffn_width), x.new_empty(num_rows, width)
    if not num_rows or not num_slots:
        return [], out

    chosen_for = num_rows if expected_rows is None else expected_rows
    first = _config(w13, chosen_for, (num_slots, ffn_width, width), kernels, gated=True)
    second = _config(w2, chosen_for, (num_slots, width, ffn_width), kernels, gated=False)
    assert first.block_m == second.block_m, "both products walk over the same tiles of rows"
    launches = []
    if tokens_per_slot is None:
        cut = even_tiles(num_rows, num_slots, first.block_m)
    elif cut is None:
        launch, cut = tiles_launch(tokens_per_slot, num_rows, first.block_m)
        launches.append(launch)
    assert cut.block_m == first.block_m, (cut.block_m, first.block_m)
    rows = _Rows(source=x, row_tokens=row_tokens, cut=cut)
    again = _Rows(source=hidden, row_tokens=None, cut=cut)
    return [
        *launches,
        _product_launch(rows, w13, weights.b13, hidden, first, kernels.target, activation),
        _product_launch(again, w2, weights.b2, out, second, kernels.target, None),
    ], out


def ffn_products(weights: ExpertWeights, target: GpuTarget) -> tuple[ProductSize, ProductSize]:
    """Return both products of `weights`, of no rows yet."""
    w13, w2 = _parts(weights, target)
    slots, width, ffn_width = weights.w2.shape
    return _size(w13, 0, (slots, ffn_width, width), gated=True), _size(w2, 0, (slots, width, ffn_width), gated=False)


def product_launches(
    x: torch.Tensor, weights: Weights, shape: tuple[int, int], bias: torch.Tensor | None, kernels: GpuKernels
) -> tuple[list[Launch], torch.Tensor]:
    """Return the launches of a product of rows with matrices, as many rows with each, and where it will stand.

    Args:
        x: [M, K], M / S rows of each slot after the other.
        weights: [S, N, K].
        shape: S, N.
        bias: [S, N].
        kernels: how they are launched.
    """
    (num_rows, inputs), (num_slots, outputs) = x.shape, shape
    out = x.new_empty(num_rows, outputs)
    if not num_rows:
        return [], out
    config = _config(weights, num_rows, (num_slots, outputs, inputs), kernels, gated=False)
    rows = _Rows(source=x, row_tokens=None, cut=even_tiles(num_rows, num_slots, config.block_m))
    return [_product_launch(rows, weights, bias, out, config, kernels.target, None)], out


def _parts(weights: ExpertWeights, target: GpuTarget) -> tuple[Weights, Weights]:
    w13 = kernel_weights(weights.w13, target, gated=True)
    w2 = kernel_weights(weights.w2, target, gated=False)
    assert w13 is not None and w2 is not None, "no kernel reads experts of this format; ask can_multiply"
    return w13, w2


def _config(
    part: Weights, num_rows: int, shape: tuple[int, int, int], kernels: GpuKernels, *, gated: bool
) -> ProductConfig:
    """Return the tiles of a product with matrices [S, N, K]; with `gated` N counts gates alone."""
    size = _size(part, num_rows, shape, gated=gated)
    return pick_config(size, kernels.target, batch_invariant=kernels.batch_invariant)


def _size(part: Weights, num_rows: int, shape: tuple[int, int, int], *, gated: bool) -> ProductSize:
    slots, outputs, inputs = shape
    return ProductSize(
        rows=num_rows, slots=slots, outputs=outputs, inputs=inputs, gated=gated, bits=part.bits,
        scale_columns=part.scale_columns if part.scales_sums else 0,
    )  # fmt: skip


def _product_launch(
    rows: _Rows,
    weights: Weights,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    config: ProductConfig,
    target: GpuTarget,
    activation: Activation | None,
) -> Launch:
    """`activation` None: the second product."""
    from .experts_triton import persistent_kernel, streamed_kernel

    inputs, outputs = rows.source.shape[1], out.shape[1]
    assert bias is None or bias.is_contiguous()
    scales_shape = (1, 1) if weights.scales is None else weights.scales.shape[1:]
    cut, blocks = rows.cut, -(-outputs // config.block_n)
    constants: dict[str, int | bool | str] = {
        "GATED": activation is not None,
        "CLAMPED": activation is not None and activation.kind == "clamped",
        "FORMAT": weights.format,
        "FP8_BYTES": weights.fp8_bytes and weights.format == "e4m3",
        "SCALE_ROWS": weights.scale_rows,
        "SCALE_COLUMNS": weights.scale_columns,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "EVEN_K": inputs % config.block_k == 0,
    }
    if config.persistent:
        constants["GROUP_M"] = config.group_m
    return Launch(
        kernel=persistent_kernel if config.persistent else streamed_kernel,
        grid=(min(target.num_sms, cut.max_tiles * blocks),) if config.persistent else (cut.max_tiles, blocks),
        arguments={
            "x": rows.source, "row_tokens": rows.row_tokens, "data": weights.data, "scales": weights.scales,
            "zeros": weights.zeros, "bias": bias, "out": out, "tiles": cut.tiles, "num_tiles": cut.num_tiles,
            "max_tiles": cut.max_tiles, "slot_rows": cut.slot_rows,
            "inputs": inputs, "outputs": outputs, "x_stride": rows.source.stride(0),
            "scale_rows": scales_shape[0], "scale_columns": scales_shape[1], "up_scales": weights.up_scales,
            "alpha": SILU.alpha if activation is None else activation.alpha,
            "limit": SILU.limit if activation is None else activation.limit,
        },
        constants=constants,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )  # fmt: skip
