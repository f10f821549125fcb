"""Quantises a matrix, or a stack of them, to int8 or int4, rounded to nearest, straight into tiles of native kernels.

Not a loader: models/loading.py says when, models/packing.py what. What it must give stands in reference.py.
Letters: N rows (outputs), K columns (inputs), S matrices of a stack.
"""

from __future__ import annotations

import ctypes

import torch

from .memory import empty_lasting
from .packed import MatrixArgs, PackedTensor, call
from .schemes import MOST_INPUTS, WeightScheme
from .tiles import INT8, column_tiles

_SOURCES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}


class _QuantizeArgs(ctypes.Structure):
    """`struct Quantize` of native/csrc/quantize.h."""

    _fields_ = (
        ("rows", ctypes.c_void_p),
        ("stack", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("source", "gate_up")),
        ("matrix", MatrixArgs),
    )


def quantize(matrix: torch.Tensor, scheme: WeightScheme, *, gate_up: bool = False) -> PackedTensor:
    """Quantise [N, K] or [S, N, K] in bf16, fp16 or fp32 on the CPU, which stays as it is.

    Args:
        matrix: contiguous. An output with a number that is not finite becomes NaN.
        scheme: the format.
        gate_up: two halves of N / 2 rows, gates first.
    """
    assert matrix.is_contiguous() and matrix.device.type == "cpu" and matrix.dtype in _SOURCES, matrix.dtype
    *stack, rows, columns = matrix.shape
    assert len(stack) <= 1 and not (gate_up and rows % 2) and columns <= MOST_INPUTS, matrix.shape
    tiles, depth, grid = column_tiles(rows, gate_up=gate_up), -(-columns // 64), None
    scales = empty_lasting((*stack, tiles, 16), torch.float32)
    if scheme.kind == INT8:
        data = empty_lasting((*stack, tiles, depth, 16, 16, 4), torch.int8)
    else:
        data = empty_lasting((*stack, tiles, depth, 8, 16, 2, 2), torch.uint8)
        grid = empty_lasting((*stack, tiles, -(-depth * 64 // scheme.group), 2, 16), torch.uint8)
    packed = PackedTensor(
        data=data, shape=tuple(matrix.shape), format=scheme.kind, gate_up=gate_up, scales=scales, grid=grid,
        group=scheme.group,
    )  # fmt: skip
    call(
        "moewe_quantize",
        _QuantizeArgs(
            rows=matrix.data_ptr(), stack=stack[0] if stack else 1, source=_SOURCES[matrix.dtype], gate_up=gate_up,
            matrix=packed.args,
        ),
    )  # fmt: skip
    return packed
