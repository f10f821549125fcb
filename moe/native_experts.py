"""Gated FFNs with packed weights in one native call, alone or with the combine of a group of one rank.

Not routing (native_route.py) and not an exchange. The same bits whether rows are gathered here or before, and whether
`combine` follows in the same call or later. Letters: T tokens, K top-k, M rows, S slots, D width, F expert width.
"""

from __future__ import annotations

import ctypes

import torch

from ..native.library import load
from ..quant.packed import MatrixArgs, PackedTensor
from .activation import SILU, Activation
from .gated import ExpertWeights, GatedFFN
from .native_route import Routed
from .wide_ep.exchanges.native_combine import combine_args

_ACTIVATIONS = {"silu": 0, "clamped": 1}


class ExpertFfnArgs(ctypes.Structure):
    """`struct ExpertFfn` of native/csrc/experts.h."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("row_tokens", "tokens_per_slot")),
        *((name, ctypes.c_int64) for name in ("slots", "rows")),
        ("w13", MatrixArgs),
        ("w2", MatrixArgs),
        *((name, ctypes.c_void_p) for name in ("b13", "b2")),
        ("activation", ctypes.c_int32),
        *((name, ctypes.c_float) for name in ("alpha", "limit")),
        *((name, ctypes.c_void_p) for name in ("out", "scratch")),
    )


def ffn_args(weights: GatedFFN | ExpertWeights, activation: Activation) -> ExpertFfnArgs:
    """Return what a call needs to know of the weights; rows, counts and the output are still to be filled in."""
    w13, w2, b13, b2 = weights.w13, weights.w2, weights.b13, weights.b2
    assert isinstance(w13, PackedTensor) and isinstance(w2, PackedTensor) and w13.gate_up and not w2.gate_up
    *stack, width, ffn_width = w2.shape
    assert w13.shape == (*stack, 2 * ffn_width, width), (w13.shape, w2.shape)
    for bias, shape in ((b13, w13.shape[:-1]), (b2, w2.shape[:-1])):
        assert bias is None or (bias.dtype == torch.bfloat16 and bias.shape == shape and bias.is_contiguous()), shape
    return ExpertFfnArgs(
        slots=stack[0] if stack else 1,
        w13=w13.args,
        w2=w2.args,
        b13=None if b13 is None else b13.data_ptr(),
        b2=None if b2 is None else b2.data_ptr(),
        activation=_ACTIVATIONS[activation.kind],
        alpha=activation.alpha,
        limit=activation.limit,
    )


def native_ffn(
    x: torch.Tensor,
    weights: GatedFFN | ExpertWeights,
    activation: Activation = SILU,
    *,
    tokens_per_slot: torch.Tensor | None = None,
    row_tokens: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run each row through the FFN of its slot, and all through one where there are no slots.

    Args:
        x: [T, D] bf16.
        weights: packed: stacks of S, or one FFN.
        activation: between the two products.
        tokens_per_slot: [S] i64, sums to M; None for one FFN.
        row_tokens: [M] i32, the row of `x` that each row is, sorted by slot; None: the rows of `x` are sorted.
        out: [M, D] bf16, where the result goes; None makes it.

    Returns:
        [M, D] bf16, unweighted.
    """
    if x.stride(1) != 1:
        x = x.contiguous()
    num_rows = x.shape[0] if row_tokens is None else row_tokens.shape[0]
    if out is None:
        out = torch.empty(num_rows, x.shape[1], dtype=torch.bfloat16)
    assert out.shape == (num_rows, x.shape[1]) and out.is_contiguous() and out.dtype == torch.bfloat16, out.shape
    args = _prepared(x, out, weights, activation, tokens_per_slot, row_tokens)
    _library().moewe_expert_ffn(ctypes.byref(args))
    return out


def native_ffn_combine(
    x: torch.Tensor,
    weights: ExpertWeights,
    activation: Activation,
    routed: Routed,
    *,
    shared: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return what `native_combine` makes of `native_ffn` for the rows that `routed` sorted, in one call; see both."""
    rows = torch.empty(routed.row_tokens.shape[0], x.shape[1], dtype=torch.bfloat16)
    args = _prepared(x, rows, weights, activation, routed.tokens_per_slot, routed.row_tokens)
    after, out = combine_args(rows, routed.weights, routed.rows, shared, residual)
    _library().moewe_expert_ffn_combine(ctypes.byref(args), ctypes.byref(after))
    return out


def _prepared(
    x: torch.Tensor,
    out: torch.Tensor,
    weights: GatedFFN | ExpertWeights,
    activation: Activation,
    tokens_per_slot: torch.Tensor | None,
    row_tokens: torch.Tensor | None,
) -> ExpertFfnArgs:
    """Return the arguments of a call; what they point to is `x`, `out`, the weights, and the two tensors of rows."""
    args = ffn_args(weights, activation)
    assert x.dtype == torch.bfloat16 and x.shape[1] == args.w2.rows and x.stride(1) == 1, (x.dtype, x.shape)
    args.x, args.x_stride, args.out, args.rows = x.data_ptr(), x.stride(0), out.data_ptr(), out.shape[0]
    if tokens_per_slot is not None:
        assert tokens_per_slot.dtype == torch.int64 and tokens_per_slot.shape == (args.slots,), tokens_per_slot
        args.tokens_per_slot = tokens_per_slot.data_ptr()
    if row_tokens is not None:
        assert row_tokens.dtype == torch.int32 and row_tokens.is_contiguous(), row_tokens.dtype
        args.row_tokens = row_tokens.data_ptr()
    return args


def _library() -> ctypes.CDLL:
    library = load()
    assert library is not None, "packed experts, but no native kernels"
    return library
