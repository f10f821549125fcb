"""An expert's matrices as kernels take them: tensors, and what of their format is fixed when a kernel is compiled.

Not a format (quant/tensor.py) and no copy: what checkpoints store is read where it lies.
Letters: S slots, N outputs, K inputs, G rows of scales.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...native.gpu import GpuTarget
from ...quant import FP8_BLOCK, INT4_GROUP, INT8_BLOCK, MXFP4, Matrix, QuantTensor

PLAIN = "plain"
_FORMATS = {FP8_BLOCK: "e4m3", INT8_BLOCK: "int8", INT4_GROUP: "int4", MXFP4: "mxfp4"}
_BITS = {"e4m3": 8, "int8": 8, "int4": 4, "mxfp4": 4}
# A step along the inputs takes at most so many; blocks of scales must be whole steps, or steps whole blocks.
SMALLEST_STEP, LARGEST_STEP = 32, 128


@dataclass(frozen=True, kw_only=True)
class Weights:
    """A stack of matrices [S, N, K].

    Attributes:
        data: the numbers, or their codes.
        scales: [S, G, columns], None for plain numbers.
        zeros: like `scales`, or None.
        format: as weights_triton.py calls it.
        bits: of a number, without scales.
        scale_rows: outputs that share a scale.
        scale_columns: inputs that do; 0: all of them.
        up_scales: of a matrix of gates and ups, the row of scales at which those of ups begin.
        fp8_bytes: e4m3 is decoded from bytes, as the target has no instruction for it.
    """

    data: torch.Tensor
    scales: torch.Tensor | None = None
    zeros: torch.Tensor | None = None
    format: str = PLAIN
    bits: int = 16
    scale_rows: int = 1
    scale_columns: int = 0
    up_scales: int = 0
    fp8_bytes: bool = False

    @property
    def scales_sums(self) -> bool:
        """Whether sums are multiplied by scales, and not each number."""
        return self.format in ("e4m3", "int8")


def kernel_weights(matrix: Matrix, target: GpuTarget, *, gated: bool) -> Weights | None:
    """Return [S, N, K] for a kernel, or None where no kernel reads such a format (torch dequantises it then).

    Args:
        matrix: contiguous.
        target: where it is multiplied.
        gated: N is gates, then ups.
    """
    if isinstance(matrix, torch.Tensor):
        assert matrix.is_contiguous(), matrix.stride()
        return Weights(data=matrix, bits=8 * matrix.element_size())
    if not isinstance(matrix, QuantTensor):
        return None
    scheme, (_, outputs, inputs) = matrix.scheme, matrix.shape
    rows, columns = scheme.block
    rows = min(rows, outputs)
    whole = columns >= inputs and not scheme.is_two_a_byte
    if not whole and (columns < SMALLEST_STEP or columns & (columns - 1) or columns > LARGEST_STEP):
        return None
    half = outputs // 2
    if gated and matrix.sections != (half, half) and (matrix.sections != (outputs,) or half % rows):
        return None
    if not gated and any(section % rows for section in matrix.sections[:-1]):
        return None
    assert matrix.data.is_contiguous() and matrix.scales.is_contiguous(), matrix.data.stride()
    format_name = _FORMATS[scheme.kind]
    return Weights(
        data=matrix.data.view(torch.uint8) if scheme.kind == FP8_BLOCK else matrix.data,
        scales=matrix.scales,
        zeros=matrix.zeros,
        format=format_name,
        bits=_BITS[format_name],
        scale_rows=rows,
        scale_columns=0 if whole else columns,
        up_scales=-(-half // rows) if gated else 0,
        fp8_bytes=not target.has_fp8,
    )
