"""The norms around blocks in one native call: the residual sum, RMSNorm or LayerNorm, rounded as models/layers.py does.

Not the torch norms (models/layers.py says what is computed; a mean is added up in another order here, so that a result
may differ by one rounding) and not the norm of heads. For a CPU with native kernels and bf16 rows.
Letters: T rows, D width.
"""

from __future__ import annotations

import ctypes

import torch

from ..native.library import function

_KINDS = {"rms": 0, "layer": 1}


class NormArgs(ctypes.Structure):
    """`struct Norm` of native/csrc/norm.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "added", "weight", "bias", "out")),
        *((name, ctypes.c_int64) for name in ("rows", "width")),
        *((name, ctypes.c_float) for name in ("eps", "multiplier")),
        *((name, ctypes.c_int32) for name in ("kind", "tiles", "norms_added")),
    )


class NativeNorm:
    """One norm of a layer.

    Args:
        kind: `rms` or `layer`.
        weight: [D] bf16.
        bias: [D] bf16 of a LayerNorm.
        eps: added to the mean of squares, or to the variance.
        multiplier: on what is added to the residual stream.
    """

    def __init__(
        self,
        kind: str,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        eps: float,
        multiplier: float = 1.0,
    ) -> None:
        assert (bias is None) == (kind == "rms")
        self._call = function("moewe_norm", NormArgs)
        self._weight, self._bias = weight.contiguous(), None if bias is None else bias.contiguous()
        self.args = NormArgs(
            weight=self._weight.data_ptr(),
            bias=None if self._bias is None else self._bias.data_ptr(),
            width=weight.shape[0],
            eps=eps,
            multiplier=multiplier,
            kind=_KINDS[kind],
        )

    def __call__(self, x: torch.Tensor, added: torch.Tensor | None = None) -> torch.Tensor:
        """Return `x` [T, D], normed; with `added` [T, D] it is added to `x`, in place, before."""
        out = torch.empty_like(x)
        self._run(x, added, out)
        return out

    def add_normed(self, x: torch.Tensor, added: torch.Tensor) -> None:
        """Add `added` [T, D], normed, to `x` [T, D] in place."""
        self._run(x, added, None)

    def _run(self, x: torch.Tensor, added: torch.Tensor | None, out: torch.Tensor | None) -> None:
        args = self.args
        assert x.dtype == torch.bfloat16 and x.is_contiguous() and x.shape[1] == args.width, (x.dtype, x.shape)
        assert added is None or (added.shape == x.shape and added.is_contiguous()), "another shape than the rows"
        args.x, args.rows = x.data_ptr(), x.shape[0]
        args.added = None if added is None else added.data_ptr()
        args.out, args.norms_added = (None, 1) if out is None else (out.data_ptr(), 0)
        self._call(args)
