"""A matrix product whose weight may be quantised.

Not a fast kernel: a quantised weight is dequantised to the dtype of the rows first, which is right on every device.
Letters: T rows, D inputs, N outputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .tensor import QuantTensor


def dense(weight: torch.Tensor | QuantTensor, dtype: torch.dtype) -> torch.Tensor:
    """Return `weight` as a plain tensor: itself, or dequantised to `dtype`."""
    return weight.dequantize(dtype) if isinstance(weight, QuantTensor) else weight


def linear(x: torch.Tensor, weight: torch.Tensor | QuantTensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return x weight^T + bias: x [T, D], weight [N, D], bias [N] -> [T, N] in the dtype of `x`."""
    return F.linear(x, dense(weight, x.dtype), bias)
