"""KV in one byte an element: heads to elements with a scale each, and back.

Not the kernels (native/csrc/kv_format.h stores the same bits, and attention reads them in place) and no paging. What
torch does where there are no kernels, and what tests hold the kernels against.
Shapes: a head is the last dim, W wide; value = element * scale, with one bf16 scale a token and head.
"""

from __future__ import annotations

import torch

from ..quant import SCALE_FORMAT, NumberFormat

# A head whose largest magnitude is below this counts as zeros, so that no scale is so small that bits are lost.
SMALLEST_HEAD = 2.0**-100


def quantize_heads(values: torch.Tensor, number_format: NumberFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Return elements and scales of `values` [..., W], each head by itself.

    The scale is the largest magnitude over the largest element of the format, rounded up to bf16, so that nothing is
    cut off; elements are rounded to nearest, ties to even. A head with a number that is not finite has the scale NaN,
    so that whoever reads it notices; one of zeros has the scale 0.

    Returns:
        [..., W] in the format's type, and [...] bf16.
    """
    values = values.float()
    largest = values.abs().amax(-1)
    bits = (largest / number_format.largest).view(torch.int32)
    scales = ((bits + 0xFFFF) & -0x10000).view(torch.float32)
    scales = scales.masked_fill(largest < SMALLEST_HEAD, 0.0)
    elements = values / scales[..., None]
    bad = ~largest.isfinite()
    elements = elements.masked_fill((bad | (scales == 0))[..., None], 0.0)
    if not number_format.torch_dtype.is_floating_point:
        elements = elements.round()
    return elements.to(number_format.torch_dtype), scales.to(SCALE_FORMAT.torch_dtype).masked_fill(bad, torch.nan)


def dequantize_heads(elements: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the values of `elements` [..., W] with `scales` [...], in f32: only a product is rounded."""
    return elements.float() * scales.float()[..., None]
