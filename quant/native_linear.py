"""A matrix product with a packed weight, in one native call: y = x weight^T + bias, and a residual if there is one.

Not a fallback: `linear.linear` decides who multiplies. Products accumulate in fp32, the bias is added in fp32, then the
result is rounded once; a row has the same bits whatever rows stand beside it.
Letters: T rows, K inputs, N outputs.
"""

from __future__ import annotations

import ctypes

import torch

from ..native.library import load
from .packed import MatrixArgs, PackedTensor


class LinearArgs(ctypes.Structure):
    """`struct Linear` of native/csrc/linear.h."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("weight", MatrixArgs),
        *((name, ctypes.c_void_p) for name in ("bias", "residual", "out")),
        *((name, ctypes.c_int64) for name in ("rows", "x_stride", "out_stride")),
        ("f32_out", ctypes.c_int32),
        ("scratch", ctypes.c_void_p),
    )


def native_linear(
    x: torch.Tensor,
    weight: PackedTensor,
    bias: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return x weight^T + bias.

    Args:
        x: [T, K] bf16; rows may lie apart, the elements of a row may not.
        weight: [N, K].
        bias: [N] bf16.
        residual: [T, N] bf16 contiguous, added to the rounded product; rounded again.
        dtype: bf16, or fp32 for results that are not rounded (without a residual).
        out: [T, N] in `dtype`, contiguous, where the result goes; None makes it.

    Returns:
        [T, N] in `dtype`.
    """
    num_rows, width = x.shape
    outputs, inputs = weight.shape
    assert width == inputs and x.dtype == torch.bfloat16 and not weight.gate_up, (x.shape, x.dtype, weight.shape)
    if x.stride(1) != 1:
        x = x.contiguous()
    if out is None:
        out = torch.empty(num_rows, outputs, dtype=dtype)
    assert out.shape == (num_rows, outputs) and out.dtype == dtype and out.is_contiguous(), (out.shape, out.dtype)
    args = LinearArgs(
        x=x.data_ptr(),
        weight=weight.args,
        out=out.data_ptr(),
        rows=num_rows,
        x_stride=x.stride(0),
        out_stride=outputs,
        f32_out=dtype == torch.float32,
    )
    if bias is not None:
        assert bias.dtype == torch.bfloat16 and bias.shape == (outputs,) and bias.is_contiguous(), bias.dtype
        args.bias = bias.data_ptr()
    if residual is not None:
        assert residual.shape == out.shape and residual.is_contiguous() and residual.dtype == dtype == torch.bfloat16
        args.residual = residual.data_ptr()
    library = load()
    assert library is not None, "a packed weight, but no native kernels"
    library.moewe_linear(ctypes.byref(args))
    return out
