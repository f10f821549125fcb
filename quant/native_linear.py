"""Products with packed weights, each in one native call: y = x weight^T + bias and a residual, or one product a head.

Not a fallback: `linear.linear` decides who multiplies. Products accumulate in fp32, the bias is added in fp32, then the
result is rounded once; a row has the same bits whatever rows stand beside it.
Letters: T rows, H heads, K inputs, N outputs.
"""

from __future__ import annotations

import ctypes

import torch

from ..native.library import load
from .packed import MatrixArgs, PackedTensor, call
from .tiles import BF16


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


def linear_args(weight: object, bias: torch.Tensor | None) -> LinearArgs:
    """Return arguments without rows: a packed `weight` [N, K], rows of `x` and of the result side by side."""
    assert isinstance(weight, PackedTensor), type(weight)
    outputs, inputs = weight.shape
    return LinearArgs(
        weight=weight.args, bias=None if bias is None else bias.data_ptr(), x_stride=inputs, out_stride=outputs
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


class HeadLinearArgs(ctypes.Structure):
    """`struct HeadLinear` of native/csrc/latent.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "out")),
        ("weight", MatrixArgs),
        *(
            (name, ctypes.c_int64)
            for name in ("rows", "heads", "x_stride", "x_head_stride", "out_stride", "out_head_stride")
        ),
    )


def head_linear_args(
    weight: PackedTensor, *, x_strides: tuple[int, int], out_strides: tuple[int, int]
) -> HeadLinearArgs:
    """Return arguments without rows: `weight` [H, N, K] bf16, strides in elements of a row and of a head."""
    heads, _, _ = weight.shape
    assert weight.format == BF16 and not weight.gate_up, (weight.format, weight.gate_up)
    return HeadLinearArgs(
        weight=weight.args,
        heads=heads,
        x_stride=x_strides[0],
        x_head_stride=x_strides[1],
        out_stride=out_strides[0],
        out_head_stride=out_strides[1],
    )


def native_head_linear(x: torch.Tensor, weight: PackedTensor) -> torch.Tensor:
    """Return x[:, h] weight[h]^T of every head, in one call: x [T, H, K] bf16, weight [H, N, K] -> [T, H, N] bf16.

    Rows and heads of `x` may lie apart, the elements of a row may not.
    """
    num_rows, heads, width = x.shape
    assert (heads, width) == (weight.shape[0], weight.shape[2]) and x.dtype == torch.bfloat16, (x.shape, x.dtype)
    if x.stride(2) != 1:
        x = x.contiguous()
    out = torch.empty(num_rows, heads, weight.shape[1], dtype=x.dtype)
    strides = [(rows.stride(0), rows.stride(1)) for rows in (x, out)]
    args = head_linear_args(weight, x_strides=strides[0], out_strides=strides[1])
    args.x, args.out, args.rows = x.data_ptr(), out.data_ptr(), num_rows
    call("moewe_head_linear", args)
    return out
