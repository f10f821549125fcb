"""Products of rows, sorted by expert, with the matrices of their experts, in Triton; experts.py launches them.

Weights are the left operand, so that few rows fill a tensor-core instruction and decoded weights stay in registers: a
tile of sums is [BLOCK_N outputs, BLOCK_M rows]. Letters: S slots, M rows, D width, F expert width.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...native.gpu.numbers_triton import product, rounded
from .weights_triton import paired_tiles, weight_tile


@triton.jit
def expert_tile(
    x, row_tokens, data, scales, zeros, bias, out, slot, first, end, block_n, inputs, outputs, x_stride,
    scale_rows, scale_columns, up_scales, alpha, limit,
    GATED: tl.constexpr, CLAMPED: tl.constexpr, FORMAT: tl.constexpr, FP8_BYTES: tl.constexpr,
    SCALE_ROWS: tl.constexpr, SCALE_COLUMNS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_N outputs of the rows [first, first + BLOCK_M) of `slot` that lie before `end`.

    GATED: the matrix holds gates, then ups, `outputs` rows each; what comes out is activated. SCALE_COLUMNS: inputs
    that share a scale, 0 where one scale of an output is of all inputs.
    """
    kind: tl.constexpr = x.dtype.element_ty
    PAIRED: tl.constexpr = FORMAT == "int4" or FORMAT == "mxfp4"
    SUM_SCALED: tl.constexpr = FORMAT == "e4m3" or FORMAT == "int8"
    SECTIONS: tl.constexpr = 2 if GATED else 1
    m = first + tl.arange(0, BLOCK_M)
    present = m < end
    row = tl.where(present, m, first).to(tl.int64)
    if row_tokens is None:
        source = row
    else:
        source = tl.load(row_tokens + row).to(tl.int64)
    x_rows = x + source * x_stride
    n = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    output = tl.where(n < outputs, n, 0).to(tl.int64)  # beyond the last: computed, not stored, no mask in the loop
    slot = slot.to(tl.int64)
    row_size = (inputs // (2 if PAIRED else 1)).to(tl.int64)
    data_rows = data + (slot * SECTIONS * outputs + output) * row_size
    up_data = data_rows + outputs * row_size
    scale_rows_here = scales
    up_scale_rows = scales
    zero_rows = zeros
    up_zero_rows = zeros
    if scales is not None:
        at = (slot * scale_rows + output // SCALE_ROWS) * scale_columns
        scale_rows_here = scales + at
        up_scale_rows = scale_rows_here + up_scales * scale_columns
        if zeros is not None:
            zero_rows = zeros + at
            up_zero_rows = zero_rows + up_scales * scale_columns
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up_total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in range(0, inputs, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        if PAIRED:
            # [BLOCK_M, BLOCK_K], whose even and odd inputs meet the lower and upper four bits of bytes.
            if EVEN_K:
                both = tl.load(x_rows[:, None] + k[None, :], mask=present[:, None], other=0.0)
            else:
                both = tl.load(x_rows[:, None] + k[None, :], mask=present[:, None] & (k < inputs)[None, :], other=0.0)
            x_even, x_odd = tl.split(tl.reshape(both, [BLOCK_M, BLOCK_K // 2, 2]))
            even, odd = paired_tiles(data_rows, scale_rows_here, zero_rows, start, inputs, scale_columns, kind, FORMAT,
                                     SCALE_COLUMNS, BLOCK_N, BLOCK_K, EVEN_K)  # fmt: skip
            total = product(odd, tl.trans(x_odd), product(even, tl.trans(x_even), total))
            if GATED:
                even, odd = paired_tiles(up_data, up_scale_rows, up_zero_rows, start, inputs, scale_columns, kind,
                                         FORMAT, SCALE_COLUMNS, BLOCK_N, BLOCK_K, EVEN_K)  # fmt: skip
                up_total = product(odd, tl.trans(x_odd), product(even, tl.trans(x_even), up_total))
        else:
            if EVEN_K:
                x_tile = tl.load(x_rows[None, :] + k[:, None], mask=present[None, :], other=0.0)
            else:
                x_tile = tl.load(x_rows[None, :] + k[:, None], mask=present[None, :] & (k < inputs)[:, None], other=0.0)
            w_tile = weight_tile(data_rows, start, inputs, kind, FORMAT, FP8_BYTES, BLOCK_K, EVEN_K)
            if SUM_SCALED and SCALE_COLUMNS > 0:
                factor = tl.load(scale_rows_here + start // SCALE_COLUMNS)
                total += product(w_tile, x_tile, tl.zeros([BLOCK_N, BLOCK_M], tl.float32)) * factor[:, None]
            else:
                total = product(w_tile, x_tile, total)
            if GATED:
                u_tile = weight_tile(up_data, start, inputs, kind, FORMAT, FP8_BYTES, BLOCK_K, EVEN_K)
                if SUM_SCALED and SCALE_COLUMNS > 0:
                    factor = tl.load(up_scale_rows + start // SCALE_COLUMNS)
                    up_total += product(u_tile, x_tile, tl.zeros([BLOCK_N, BLOCK_M], tl.float32)) * factor[:, None]
                else:
                    up_total = product(u_tile, x_tile, up_total)
    # What outputs and rows need from here on is found anew: as blocks of 64 bits it would wait in registers meanwhile.
    first_output = block_n * BLOCK_N
    own_output, own_row = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M)
    is_output = own_output < outputs - first_output
    if SUM_SCALED and SCALE_COLUMNS == 0:
        own_scales = scales + slot * scale_rows * scale_columns
        scale_row = (first_output + own_output) // SCALE_ROWS
        total = total * tl.load(own_scales + scale_row * scale_columns, mask=is_output, other=0.0)[:, None]
        if GATED:
            scale_row += up_scales
            up_total = up_total * tl.load(own_scales + scale_row * scale_columns, mask=is_output, other=0.0)[:, None]
    if bias is not None:
        own_bias = bias + slot * SECTIONS * outputs + first_output
        total += tl.load(own_bias + own_output, mask=is_output, other=0.0).to(tl.float32)[:, None]
        if GATED:
            up_bias = tl.load(own_bias + outputs + own_output, mask=is_output, other=0.0)
            up_total += up_bias.to(tl.float32)[:, None]
    if GATED:
        if CLAMPED:
            total = tl.where(total > limit, limit, total)  # keeps NaN, as tl.minimum need not
            up_total = tl.where(up_total > limit, limit, up_total)
            up_total = tl.where(up_total < -limit, -limit, up_total)
            total = total * tl.sigmoid(alpha * total) * (up_total + 1.0)
        else:
            total = total * tl.sigmoid(total) * up_total
    places = out + first.to(tl.int64) * outputs + first_output
    stored = (own_row < end - first)[None, :] & is_output[:, None]
    tl.store(places + own_row[None, :] * outputs + own_output[:, None], rounded(total, kind), mask=stored)


@triton.jit
def tile_of(tiles, number, slot_rows, BLOCK_M: tl.constexpr):
    """Return slot, first row and end of the slot's rows of a tile; without `tiles` every slot has `slot_rows` rows."""
    if tiles is None:
        tiles_of_slot = tl.cdiv(slot_rows, BLOCK_M)
        slot = number // tiles_of_slot
        first = slot * slot_rows + number % tiles_of_slot * BLOCK_M
        end = (slot + 1) * slot_rows
    else:
        slot = tl.load(tiles + number * 3)
        first = tl.load(tiles + number * 3 + 1)
        end = tl.load(tiles + number * 3 + 2)
    return slot, first, end


@triton.jit(do_not_specialize=["max_tiles", "slot_rows"])
def streamed_kernel(
    x, row_tokens, data, scales, zeros, bias, out, tiles, num_tiles, max_tiles, slot_rows, inputs, outputs, x_stride,
    scale_rows, scale_columns, up_scales, alpha, limit,
    GATED: tl.constexpr, CLAMPED: tl.constexpr, FORMAT: tl.constexpr, FP8_BYTES: tl.constexpr,
    SCALE_ROWS: tl.constexpr, SCALE_COLUMNS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """A program a tile of rows and of outputs: weights stream through all multiprocessors, few rows meet them.

    Tiles of one slot follow each other along the first axis of the grid, so that they find its weights in cache.
    """
    slot, first, end = tile_of(tiles, tl.program_id(0), slot_rows, BLOCK_M)
    if slot >= 0:
        expert_tile(x, row_tokens, data, scales, zeros, bias, out, slot, first, end, tl.program_id(1), inputs, outputs,
                    x_stride, scale_rows, scale_columns, up_scales, alpha, limit, GATED, CLAMPED, FORMAT, FP8_BYTES,
                    SCALE_ROWS, SCALE_COLUMNS, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K)  # fmt: skip


@triton.jit(do_not_specialize=["max_tiles", "slot_rows"])
def persistent_kernel(
    x, row_tokens, data, scales, zeros, bias, out, tiles, num_tiles, max_tiles, slot_rows, inputs, outputs, x_stride,
    scale_rows, scale_columns, up_scales, alpha, limit,
    GATED: tl.constexpr, CLAMPED: tl.constexpr, FORMAT: tl.constexpr, FP8_BYTES: tl.constexpr,
    SCALE_ROWS: tl.constexpr, SCALE_COLUMNS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """As many programs as run at once walk over all tiles, GROUP_M tiles of rows for each tile of outputs.

    So rows of a group and weights of a tile are met again while they are in the second-level cache.
    """
    rows_tiles = max_tiles
    if num_tiles is not None:
        rows_tiles = tl.load(num_tiles)
    columns_tiles = tl.cdiv(outputs, BLOCK_N)
    for number in range(tl.program_id(0), rows_tiles * columns_tiles, tl.num_programs(0)):
        group = number // (GROUP_M * columns_tiles)
        inside = number % (GROUP_M * columns_tiles)
        height = tl.minimum(rows_tiles - group * GROUP_M, GROUP_M)
        slot, first, end = tile_of(tiles, group * GROUP_M + inside % height, slot_rows, BLOCK_M)
        expert_tile(x, row_tokens, data, scales, zeros, bias, out, slot, first, end, inside // height, inputs, outputs,
                    x_stride, scale_rows, scale_columns, up_scales, alpha, limit, GATED, CLAMPED, FORMAT, FP8_BYTES,
                    SCALE_ROWS, SCALE_COLUMNS, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K)  # fmt: skip
