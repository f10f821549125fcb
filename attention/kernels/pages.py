"""Pages of storage as Triton kernels take them: e4m3 as bytes, with the name of the format.

Not storage (kvcache/storage.py) and not a kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...kvcache.storage import Pages

_FORMATS = {torch.int8: "int8", torch.float8_e4m3fn: "e4m3"}


@dataclass(frozen=True, eq=False)
class KernelPages:
    """K or V of one layer.

    Attributes:
        elements: [num_blocks, block_size, Hkv, W], u8 for e4m3.
        scales: [num_blocks, block_size, Hkv] bf16, or None.
        format: `plain`, `int8` or `e4m3`.
    """

    elements: torch.Tensor
    scales: torch.Tensor | None
    format: str


def kernel_pages(pages: Pages) -> KernelPages:
    """Return views of `pages`."""
    elements = pages.elements
    name = _FORMATS.get(elements.dtype, "plain")
    assert (pages.scales is not None) == (name != "plain"), "scales go with formats of one byte"
    return KernelPages(elements.view(torch.uint8) if name == "e4m3" else elements, pages.scales, name)
