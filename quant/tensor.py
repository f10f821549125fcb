"""A matrix, or a stack of them, in a quantised format: packed data, scales and the scheme that joins them.

Not a kernel and not a quantiser: it selects, dequantises and knows its exact bytes.
Letters: N rows (outputs), D columns (inputs), S matrices of a stack. Units: bytes of data and scales as held.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from .scheme import INT4_GROUP, MXFP4, QuantScheme

# e2m1: sign, two bits of exponent, one of mantissa (Open Compute Project, Microscaling formats, 2023).
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
E8M0_BIAS, E8M0_NAN = 127, 255
INT4_MIDDLE = 8  # what stands for zero where there are no `zeros`


@dataclass(frozen=True, kw_only=True)
class QuantTensor:
    """A quantised [N, D] or [S, N, D].

    Attributes:
        data: [.., N, D / 2] u8 for `mxfp4` and `int4_group`, [.., N, D] float8_e4m3fn for `fp8_block`, i8 for
            `int8_block`.
        scales: [.., N, D / 32] u8 for `mxfp4`; else [.., G, ceil(D / block columns)], where G is the sum over
            `sections` of ceil(rows / block rows), f32; of `int4_group` fp16 or bf16, too.
        scheme: what they mean.
        shape: of the numbers.
        sections: rows of the parts that were put one below the other, each with blocks counted from its own first row;
            they sum to N.
        zeros: of `int4_group`, u8 in the shape of `scales`: the code that stands for zero; None: INT4_MIDDLE does.

    Example:
        Gate and up of 1000 rows each in blocks of 128: sections (1000, 1000), G = 8 + 8; row 1000 uses scale row 8.
    """

    data: torch.Tensor
    scales: torch.Tensor
    scheme: QuantScheme
    shape: tuple[int, ...]
    sections: tuple[int, ...]
    zeros: torch.Tensor | None = None

    def __post_init__(self) -> None:
        *stack, rows, columns = self.shape
        parts = [self.scheme.scales_shape(section, columns) for section in self.sections]
        assert sum(self.sections) == rows, (self.sections, self.shape)
        assert tuple(self.data.shape) == (*stack, *self.scheme.data_shape(rows, columns)), self.data.shape
        assert tuple(self.scales.shape) == (*stack, sum(part[0] for part in parts), parts[0][1]), self.scales.shape
        assert self.zeros is None or (self.scheme.kind == INT4_GROUP and self.zeros.shape == self.scales.shape)

    @property
    def num_bytes(self) -> int:
        """Exact bytes of data, scales and zeros."""
        return self.data.nbytes + self.scales.nbytes + (0 if self.zeros is None else self.zeros.nbytes)

    def select(self, slot: int) -> QuantTensor:
        """Return matrix number `slot` of a stack, sharing memory with it."""
        assert len(self.shape) == 3, self.shape
        zeros = None if self.zeros is None else self.zeros[slot]
        return replace(self, data=self.data[slot], scales=self.scales[slot], zeros=zeros, shape=self.shape[1:])

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the numbers, multiplied in fp32 and rounded once to `dtype`: `shape`."""
        if self.scheme.kind == MXFP4:
            return _from_mxfp4(self.data, self.scales, self.scheme.block[1]).to(dtype)
        if self.scheme.kind == INT4_GROUP:
            return _from_int4(self.data, self.scales, self.zeros, self.scheme.block[1]).to(dtype)
        parts = zip(torch.split(self.data, list(self.sections), dim=-2), _section_scales(self))
        return torch.cat([_from_blocks(data, scales, self.scheme.block) for data, scales in parts], dim=-2).to(dtype)


def _section_scales(tensor: QuantTensor) -> Iterator[torch.Tensor]:
    block_rows = [-(-section // tensor.scheme.block[0]) for section in tensor.sections]
    yield from torch.split(tensor.scales, block_rows, dim=-2)


def _from_mxfp4(data: torch.Tensor, scales: torch.Tensor, block: int) -> torch.Tensor:
    codes = torch.stack([data & 15, data >> 4], dim=-1).flatten(-2).to(torch.int32)  # [.., N, D]
    numbers = torch.tensor(E2M1, device=data.device)[codes]
    powers = torch.ldexp(torch.ones_like(scales, dtype=torch.float32), scales.to(torch.int32) - E8M0_BIAS)
    powers.masked_fill_(scales == E8M0_NAN, torch.nan)
    return numbers * powers.repeat_interleave(block, dim=-1)


def _from_int4(data: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, group: int) -> torch.Tensor:
    codes = torch.stack([data & 15, data >> 4], dim=-1).flatten(-2).float()  # [.., N, D]
    columns = codes.shape[-1]
    middle = torch.full_like(scales, INT4_MIDDLE) if zeros is None else zeros
    middles, factors = (t.float().repeat_interleave(group, dim=-1)[..., :columns] for t in (middle, scales))
    return (codes - middles) * factors


def _from_blocks(data: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    rows, columns = data.shape[-2:]
    per_row = scales.repeat_interleave(block[0], dim=-2)[..., :rows, :]
    return data.float() * per_row.repeat_interleave(block[1], dim=-1)[..., :columns]
