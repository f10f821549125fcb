"""A matrix, or a stack of them, in the tiles that native kernels multiply with.

Not a product (native_linear.py, moe/native_experts.py) and not a loader (models/packing.py says what is packed). The
order of elements is that of native/csrc/matrix.h: N and K padded to whole tiles with zeros, gate and up tiles in turns.
Letters: N rows (outputs), K columns (inputs), S matrices of a stack. Units: bytes as held, padding included.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from ..native.library import load
from .codes import fp8_numbers, mxfp4_numbers
from .memory import empty_lasting
from .scheme import FP8_BLOCK, MXFP4
from .tiles import BF16, DEPTH, INT4, INT8, ROWS, column_tiles

_FORMATS = {BF16: 0, INT8: 1, INT4: 2, MXFP4: 3, FP8_BLOCK: 4}


class MatrixArgs(ctypes.Structure):
    """`struct Matrix` of native/csrc/matrix.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("data", "scales", "grid")),
        *((name, ctypes.c_int64) for name in ("rows", "columns")),
        *((name, ctypes.c_int32) for name in ("format", "group", "scales_each")),
    )


class _PackArgs(ctypes.Structure):
    """`struct Pack` of native/csrc/pack.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("rows", "tiles")),
        *((name, ctypes.c_int64) for name in ("stack", "num_rows", "num_columns")),
        ("gate_up", ctypes.c_int32),
    )


class _GatherArgs(ctypes.Structure):
    """`struct GatherRows` of native/csrc/pack.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("tiles", "ids", "out")),
        *((name, ctypes.c_int64) for name in ("num_ids", "num_columns")),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedTensor:
    """A packed [N, K] or [S, N, K].

    Attributes:
        data: of C column tiles. `bf16`: [.., C, ceil(K / 32), 16, 16, 2] bf16: pair of inputs, output, which of them.
            `int8`: [.., C, ceil(K / 64), 16, 16, 4] i8: quad of inputs, output, which of them. `int4`:
            [.., C, ceil(K / 64), 8, 16, 2, 2] u8: two quads, output, half of each, and which byte. Of the elements
            a, b of the first quad and c, d of the second the bytes are b + 16 d and c + 16 a. `mxfp4`, `fp8_block`: as
            codes.py has them, [.., C, ceil(K / 32), 256 or 512 bytes].
        shape: of the matrix or stack.
        format: of the numbers: `bf16`, `int8`, `int4`, or as a checkpoint stores them `mxfp4`, `fp8_block`.
        gate_up: the upper half of the rows are gates, the lower are ups: [2F, K] in C = 2 ceil(F / 16) column tiles,
            one of gates and one of ups in turns. Else C = ceil(N / 16).
        scales: of `int8` and `int4`, [.., C, 16] f32, of each output. `mxfp4`: [.., C, K / 32, 16] u8, e8m0.
            `fp8_block`: [.., C, G, 1] f32 of G groups of inputs where all outputs of every column tile share them, else
            [.., C, G, 16].
        grid: of `int4`, [.., C, G, 2, 16] u8: a start, with 128 added, and a step of each group and output. A code of
            four bits stands for (start + (step * code >> 4)) * scale; start and result before scaling fit into i8.
        group: of `int4`, inputs that share start and step: 32, 64 or 128; G groups cover K padded to 64. `fp8_block`:
            inputs that share a scale, any number.

    Example:
        [40, 96]: C = 3, so data is [3, 3, 16, 16, 2]; element [17, 33] stands at data[1, 1, 0, 1, 1].
    """

    data: torch.Tensor
    shape: tuple[int, ...]
    format: str = BF16
    gate_up: bool = False
    scales: torch.Tensor | None = None
    grid: torch.Tensor | None = None
    group: int = 0

    @property
    def num_bytes(self) -> int:
        """Exact bytes held, padding, scales and grid included."""
        return sum(t.nbytes for t in (self.data, self.scales, self.grid) if t is not None)

    @property
    def device(self) -> torch.device:
        """Where it is held."""
        return self.data.device

    @cached_property
    def args(self) -> MatrixArgs:
        """It as kernels are handed it; valid as long as this object lives."""
        return MatrixArgs(
            data=self.data.data_ptr(),
            scales=None if self.scales is None else self.scales.data_ptr(),
            grid=None if self.grid is None else self.grid.data_ptr(),
            rows=self.shape[-2],
            columns=self.shape[-1],
            format=_FORMATS[self.format],
            group=self.group,
            scales_each=self.scales.shape[-1] if self.format == FP8_BLOCK and self.scales is not None else 0,
        )

    def select(self, slot: int) -> PackedTensor:
        """Return matrix number `slot` of a stack, sharing memory with it."""
        assert len(self.shape) == 3, self.shape
        scales, grid = (None if t is None else t[slot] for t in (self.scales, self.grid))
        return replace(self, data=self.data[slot], shape=self.shape[1:], scales=scales, grid=grid)

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the numbers in rows again: `shape`. For tests and for products that no kernel does."""
        *stack, rows, columns = self.shape
        tiles = self._numbers().movedim(-2, -4)  # [.., C, output, tiles along K, pair or quad, which of it]
        bands = tiles.reshape(*stack, -1, ROWS, tiles.shape[-3:].numel())
        if not self.gate_up:
            return bands.flatten(-3, -2)[..., :rows, :columns].to(dtype)
        gates, ups = (bands[..., half::2, :, :].flatten(-3, -2)[..., : rows // 2, :columns] for half in range(2))
        return torch.cat([gates, ups], dim=-2).to(dtype)

    def _numbers(self) -> torch.Tensor:
        """Return what stands in the tiles, scaled: [.., C, tiles along K, pairs or quads, 16, which of it]."""
        if self.scales is None:
            return self.data
        if self.format == MXFP4:
            return mxfp4_numbers(self.data, self.scales)
        if self.format == FP8_BLOCK:
            return fp8_numbers(self.data, self.scales, self.group)
        numbers = self.data if self.format == INT8 else self._as_int8()
        return numbers * self.scales[..., None, None, :, None]

    def _as_int8(self) -> torch.Tensor:
        """Return what the codes of `int4` stand for before they are scaled: [.., C, ceil(K / 64), 16, 16, 4] i8."""
        assert self.grid is not None
        (b, c), (d, a) = ((nibbles[..., 0], nibbles[..., 1]) for nibbles in (self.data & 15, self.data >> 4))
        quads = [torch.stack(pair, dim=-1).flatten(-2) for pair in ((a, b), (c, d))]  # [.., C, chunks, 8, 16, 4] each
        codes = torch.stack(quads, dim=-3).flatten(-4, -3).int()
        # A start and a step for each quad: as many groups as there are, then as many quads as the chunks have.
        *outer, chunks, quads_of_chunk, columns, _ = codes.shape
        grid = self.grid.int().repeat_interleave(self.group // 4, dim=-3)[..., : chunks * quads_of_chunk, :, :]
        starts, steps = (grid[..., i, :].reshape(*outer, chunks, quads_of_chunk, columns, 1) for i in range(2))
        numbers: torch.Tensor = starts - 128 + (steps * codes >> 4)
        return numbers.to(torch.int8)

    def gather_rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Return rows `ids` [T] i64 of one matrix: [T, K] bf16, exactly what was packed."""
        assert self.format == BF16 and len(self.shape) == 2 and not self.gate_up, (self.format, self.shape)
        assert ids.dtype == torch.int64, ids.dtype
        ids = ids.contiguous()
        if ids.numel():  # the kernel reads wherever an id points
            highest = int(ids.numpy().view(np.uint64).max())  # what is negative is huge here
            if highest >= self.shape[0]:
                low, high = map(int, torch.aminmax(ids))
                raise IndexError(f"row {low if low < 0 else high} of a matrix with {self.shape[0]} rows")
        rows = torch.empty(len(ids), self.shape[1], dtype=self.data.dtype)
        call(
            "moewe_gather_rows",
            _GatherArgs(
                tiles=self.data.data_ptr(), ids=ids.data_ptr(), out=rows.data_ptr(), num_ids=len(ids),
                num_columns=self.shape[1],
            ),
        )  # fmt: skip
        return rows


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Return True where native kernels multiply weights of `dtype` on `device`; loads them at the first call."""
    return dtype == torch.bfloat16 and device.type == "cpu" and load() is not None


def pack(matrix: torch.Tensor, *, gate_up: bool = False, in_place: bool = False) -> PackedTensor:
    """Pack a matrix [N, K] or stack [S, N, K] of bf16 on the CPU.

    Args:
        matrix: contiguous.
        gate_up: two halves of N / 2 rows, gates first.
        in_place: the result takes the memory of `matrix`, whose numbers are gone then, where no dim needs padding; else
            it is a copy all the same. One matrix at most is held twice meanwhile, in place, or the whole stack.
    """
    assert matrix.dtype == torch.bfloat16 and matrix.is_contiguous() and matrix.device.type == "cpu", matrix.dtype
    *stack, rows, columns = matrix.shape
    assert len(stack) <= 1 and not (gate_up and rows % 2), matrix.shape
    num_tiles = column_tiles(rows, gate_up=gate_up)
    tiled = (*stack, num_tiles, -(-columns // DEPTH), DEPTH // 2, ROWS, 2)
    fits = num_tiles * ROWS == rows and columns % DEPTH == 0
    data = matrix.view(tiled) if in_place and fits else empty_lasting(tiled, matrix.dtype)
    call(
        "moewe_pack",
        _PackArgs(
            rows=matrix.data_ptr(), tiles=data.data_ptr(), stack=stack[0] if stack else 1, num_rows=rows,
            num_columns=columns, gate_up=gate_up,
        ),
    )  # fmt: skip
    return PackedTensor(data=data, shape=tuple(matrix.shape), gate_up=gate_up)


def call(name: str, args: ctypes.Structure) -> None:
    """Call a function of the native kernels, which must be there."""
    library = load()
    assert library is not None, "no native kernels, so nothing can be packed"
    getattr(library, name)(ctypes.byref(args))
