"""Matrices as quantised checkpoints store them, made of noise: any code may stand anywhere.

Not checkpoints (quantised.py) and not quantisers. Letters: N rows (outputs), D columns (inputs), S matrices of a stack.
"""

from __future__ import annotations

import pytest
import torch

from moewe.quant import FP8_BLOCK, INT4_GROUP, INT8_BLOCK, MXFP4, MXFP4_SCHEME, QuantScheme, QuantTensor

# Of fp8: as DeepSeek-V3 stores it; blocks of as many rows as a tile; groups that a tile of inputs does not divide;
# blocks that divide nothing; a scale for each output; groups that change between two inputs of a pair.
FP8_BLOCKS = [(128, 128), (16, 64), (48, 40), (24, 40), (1, 96), (5, 7)]
SCHEMES = [MXFP4_SCHEME, *(QuantScheme(kind=FP8_BLOCK, block=block) for block in FP8_BLOCKS)]
NAMED = {f"{scheme.kind}-{scheme.block[0]}x{scheme.block[1]}": scheme for scheme in SCHEMES}
schemes = pytest.mark.parametrize("scheme", NAMED.values(), ids=NAMED.keys())


def stored(scheme: QuantScheme, *shape: int, sections: int = 1, seed: int = 0, has_zeros: bool = False) -> QuantTensor:
    """Return [N, D] or [S, N, D] of numbers around D ** -0.5; its rows are so many equal sections."""
    generator = torch.Generator().manual_seed(seed)
    *stack, rows, columns = shape
    parts = (rows // sections,) * sections
    counts = [scheme.scales_shape(part, columns) for part in parts]
    scales_shape = (*stack, sum(count[0] for count in counts), counts[0][1])
    data_shape = (*stack, *scheme.data_shape(rows, columns))
    zeros = None
    if scheme.kind == FP8_BLOCK:
        data = (torch.randn(data_shape, generator=generator) * 40).to(torch.float8_e4m3fn)
        scales = (torch.rand(scales_shape, generator=generator) + 0.5) * columns**-0.5 / 40
    elif scheme.kind == INT8_BLOCK:
        data = torch.randint(-128, 128, data_shape, generator=generator, dtype=torch.int8)
        scales = (torch.rand(scales_shape, generator=generator) + 0.5) * columns**-0.5 / 74
    elif scheme.kind == INT4_GROUP:
        data = torch.randint(0, 256, data_shape, generator=generator, dtype=torch.uint8)
        scales = ((torch.rand(scales_shape, generator=generator) + 0.5) * columns**-0.5 / 5).to(torch.float16)
        if has_zeros:
            zeros = torch.randint(4, 12, scales_shape, generator=generator, dtype=torch.uint8)
    else:
        assert scheme.kind == MXFP4
        data = torch.randint(0, 256, data_shape, generator=generator, dtype=torch.uint8)
        exponent = 126 - columns.bit_length() // 2
        scales = torch.randint(exponent - 3, exponent + 1, scales_shape, generator=generator, dtype=torch.uint8)
    return QuantTensor(data=data, scales=scales, scheme=scheme, shape=shape, sections=parts, zeros=zeros)


def clone(tensor: QuantTensor) -> QuantTensor:
    """Return the same in memory of its own."""
    return QuantTensor(
        data=tensor.data.clone(), scales=tensor.scales.clone(), scheme=tensor.scheme, shape=tensor.shape,
        sections=tensor.sections,
    )  # fmt: skip
