"""What dequantising must give: one number at a time, from the definitions of the formats.

Not fast and not used at run time; it shares no table and no code with `tensor`.
Letters: N rows, D columns; matrices only, no stacks.
"""

from __future__ import annotations

import struct

import torch

from .tensor import QuantTensor


def dequantize_reference(tensor: QuantTensor) -> torch.Tensor:
    """Return the numbers of a quantised [N, D] in fp32."""
    number = _mxfp4_number if tensor.scheme.kind == "mxfp4" else _fp8_number
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


def _fp8_number(tensor: QuantTensor, row: int, column: int) -> float:
    block_rows, block_columns = tensor.scheme.block
    scale_row, inside = 0, row
    for section in tensor.sections:
        if inside < section:
            break
        inside -= section
        scale_row += (section + block_rows - 1) // block_rows
    scale = float(tensor.scales[scale_row + inside // block_rows, column // block_columns])
    product = e4m3(int(tensor.data.view(torch.uint8)[row, column])) * scale  # exact in double, rounded once below
    return float(struct.unpack("f", struct.pack("f", product))[0])
