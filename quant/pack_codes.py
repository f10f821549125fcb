"""Put quantised matrices of a checkpoint into the tiles that native kernels multiply with: codes move, none changes.

Not a quantiser (quantize.py) and not a product. Letters: N rows (outputs), K columns (inputs), S matrices of a stack,
C column tiles of 16 outputs.
"""

from __future__ import annotations

import ctypes

import torch

from .memory import empty_lasting
from .packed import MatrixArgs, PackedTensor, call
from .scheme import FP8_BLOCK, MXFP4
from .tensor import QuantTensor
from .tiles import column_tiles

_ROWS, _DEPTH = 16, 32  # of a tile: outputs, inputs


class _PackCodesArgs(ctypes.Structure):
    """`struct PackCodes` of native/csrc/pack_codes.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("rows", "scales")),
        ("stack", ctypes.c_int64),
        ("gate_up", ctypes.c_int32),
        ("matrix", MatrixArgs),
    )


def pack_codes(matrix: QuantTensor, *, gate_up: bool = False, in_place: bool = False) -> PackedTensor:
    """Pack a quantised matrix [N, K] or stack [S, N, K] on the CPU.

    Args:
        matrix: with contiguous data and scales.
        gate_up: two halves of N / 2 rows, gates first.
        in_place: the result takes the memory of `matrix`, which is of no use then, where no dim needs padding; else it
            is a copy all the same. One matrix at most is held twice meanwhile, in place, or the whole stack. Scales of
            fp8 are copied always: they are few.
    """
    *stack, rows, columns = matrix.shape
    assert len(stack) <= 1 and not (gate_up and rows % 2), matrix.shape
    assert matrix.data.is_contiguous() and matrix.data.device.type == "cpu", matrix.data.device
    tiles, depth = column_tiles(rows, gate_up=gate_up), -(-columns // _DEPTH)
    in_place = in_place and tiles * _ROWS == rows and columns % _DEPTH == 0
    assert matrix.scheme.kind in (MXFP4, FP8_BLOCK), f"native kernels have no {matrix.scheme.kind}"
    is_mxfp4 = matrix.scheme.kind == MXFP4
    if is_mxfp4:
        assert columns % _DEPTH == 0 and matrix.scheme.block == (1, _DEPTH) and matrix.scales.is_contiguous()
        data = _memory(matrix.data, (*stack, tiles, depth, 4, 16, 2, 2), in_place)
        scales = _memory(matrix.scales, (*stack, tiles, depth, 16), in_place)
    else:
        data = _memory(matrix.data, (*stack, tiles, depth, 8, 4, 2, 4, 2), in_place)
        scales = _scales_of_tiles(matrix, tiles, gate_up=gate_up)
    packed = PackedTensor(
        data=data, shape=matrix.shape, format=matrix.scheme.kind, gate_up=gate_up, scales=scales,
        group=0 if is_mxfp4 else matrix.scheme.block[1],
    )  # fmt: skip
    call(
        "moewe_pack_codes",
        _PackCodesArgs(
            rows=matrix.data.data_ptr(), scales=matrix.scales.data_ptr() if is_mxfp4 else None,
            stack=stack[0] if stack else 1, gate_up=gate_up, matrix=packed.args,
        ),
    )  # fmt: skip
    return packed


def _memory(source: torch.Tensor, shape: tuple[int, ...], in_place: bool) -> torch.Tensor:
    return source.view(torch.uint8).view(shape) if in_place else empty_lasting(shape, torch.uint8)


def _scales_of_tiles(matrix: QuantTensor, tiles: int, *, gate_up: bool) -> torch.Tensor:
    """Return the scales of fp8 as column tiles need them: [.., C, G, 1] where outputs of each share them, else 16."""
    rows, (block_rows, _) = matrix.shape[-2], matrix.scheme.block
    scale_rows, begin = [], 0
    for section in matrix.sections:
        scale_rows.append(begin + torch.arange(section) // block_rows)
        begin += -(-section // block_rows)
    if gate_up:  # [C / 2, 16] each; the last row also stands for rows that are lacking
        half = torch.arange(tiles // 2 * _ROWS).clamp(max=rows // 2 - 1).view(-1, _ROWS)
        outputs = torch.stack([half, half + rows // 2], dim=1).flatten(0, 1)
    else:
        outputs = torch.arange(tiles * _ROWS).clamp(max=rows - 1).view(-1, _ROWS)
    of_output = torch.cat(scale_rows)[outputs]  # [C, 16] row of scales
    is_shared = bool((of_output == of_output[:, :1]).all())
    found = matrix.scales[..., of_output[:, :1] if is_shared else of_output, :].transpose(-1, -2)
    return empty_lasting(found.shape, torch.float32).copy_(found)
