"""What quantising and dequantising must give, from the definitions of the formats.

Not fast and not used at run time; it shares no table and no code with `tensor` and the native kernels.
Letters: N rows, D columns; matrices only, no stacks.
"""

from __future__ import annotations

import math
import struct

import torch

from .packed import PackedTensor
from .tensor import QuantTensor


def dequantize_reference(tensor: QuantTensor) -> torch.Tensor:
    """Return the numbers of a quantised [N, D] in fp32."""
    number = {"mxfp4": _mxfp4_number, "int4_group": _int4_number}.get(tensor.scheme.kind, _block_number)
    rows, columns = tensor.shape
    return torch.tensor([[number(tensor, row, column) for column in range(columns)] for row in range(rows)])


def e2m1(code: int) -> float:
    """Return the number that four bits stand for: sign, two bits of exponent (bias 1), one bit of mantissa."""
    sign = -1.0 if code & 0b1000 else 1.0
    exponent, mantissa = (code >> 1) & 0b11, code & 1
    return sign * (mantissa * 0.5 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1))


def e8m0(code: int) -> float:
    """Return the power of two that eight bits stand for (bias 127; 255 is no number)."""
    return float("nan") if code == 255 else 2.0 ** (code - 127)


def e4m3(code: int) -> float:
    """Return the number that eight bits stand for: sign, four of exponent (bias 7), three of mantissa, no infinity."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code >> 3) & 0xF, code & 0x7
    if (exponent, mantissa) == (15, 7):
        return float("nan")
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def _mxfp4_number(tensor: QuantTensor, row: int, column: int) -> float:
    byte = int(tensor.data[row, column // 2])
    code = byte >> 4 if column % 2 else byte & 15
    return e2m1(code) * e8m0(int(tensor.scales[row, column // 32]))


def _int4_number(tensor: QuantTensor, row: int, column: int) -> float:
    byte = int(tensor.data[row, column // 2])
    code = byte >> 4 if column % 2 else byte & 15
    at = row, column // tensor.scheme.block[1]
    zero = 8 if tensor.zeros is None else int(tensor.zeros[at])
    return _fp32((code - zero) * float(tensor.scales[at]))


def _block_number(tensor: QuantTensor, row: int, column: int) -> float:
    block_rows, block_columns = tensor.scheme.block
    scale_row, inside = 0, row
    for section in tensor.sections:
        if inside < section:
            break
        inside -= section
        scale_row += (section + block_rows - 1) // block_rows
    scale = float(tensor.scales[scale_row + inside // block_rows, column // block_columns])
    is_whole = tensor.data.dtype == torch.int8
    return _fp32(
        (int(tensor.data[row, column]) if is_whole else e4m3(int(tensor.data.view(torch.uint8)[row, column]))) * scale
    )


def _fp32(exact: float) -> float:
    """Return a number that is exact in double, rounded once."""
    return float(struct.unpack("f", struct.pack("f", exact))[0])


def quantized_rows_reference(rows: torch.Tensor, group: int) -> torch.Tensor:
    """Return rows [T, D] as products with int8 and int4 weights see them, in fp64: whole numbers times a scale a group.

    The scale of `group` elements that follow each other is their largest magnitude over 127, and a number becomes the
    nearest whole one to it times 127 over the largest magnitude, both in fp32.
    """
    if not len(rows):
        return rows.double()
    return torch.cat(
        [torch.stack([_scaled(row) for row in part]) for part in torch.split(rows.float(), group, dim=1)], dim=1
    )


def _scaled(numbers: torch.Tensor) -> torch.Tensor:
    largest = numbers.abs().max()
    if not largest > 1e-30:
        return torch.full_like(numbers, 0.0 if largest <= 1e-30 else torch.nan, dtype=torch.float64)
    codes = torch.round(numbers * (torch.full_like(largest, 127.0) / largest))
    return codes.double() * (largest / 127).double()


def quantize_int8_reference(matrix: torch.Tensor) -> torch.Tensor:
    """Return what [N, D] becomes in int8, in fp32: for each row, whole numbers up to 127 times one scale."""
    quantized = [[0.0] * matrix.shape[1] for _ in range(matrix.shape[0])]
    for i, row in enumerate(matrix.float()):
        scale = row.abs().max() / 127
        for j, number in enumerate(row):
            quantized[i][j] = float(torch.round(number / scale) * scale) + 0.0 if scale > 0 else 0.0  # no -0
    return torch.tensor(quantized)


def int4_grids_reference(packed: PackedTensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what each code of an int4 [N, K] can stand for, and what is between two neighbours of int8.

    Returns:
        [N, G, 16] fp32 and [N] fp32.
    """
    assert packed.grid is not None and packed.scales is not None and not packed.gate_up
    rows, groups = packed.shape[0], packed.grid.shape[1]
    numbers = torch.empty(rows, groups, 16)
    for row in range(rows):
        scale = packed.scales[row // 16, row % 16]
        for group in range(groups):
            start, step = (int(byte) for byte in packed.grid[row // 16, group, :, row % 16])
            for code in range(16):
                whole = start - 128 + math.floor(step * code / 16)
                numbers[row, group, code] = whole * scale
    return numbers, packed.scales.flatten()[:rows]
