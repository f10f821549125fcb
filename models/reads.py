"""Reads: byte ranges of weight files and the memory that they fill, straight or by way of a staging buffer.

Not names and not a plan of what a rank holds: `loading` says which pieces and which memory.
Units: bytes; a read reports the address ranges that it filled.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from ..quant import QuantScheme, QuantTensor
from .name_map import Piece
from .safetensors_file import SafetensorsFile, StoredTensor

CHUNK_BYTES = 16 << 20
STORED_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
}
Spans = list[tuple[int, int]]


@dataclass
class Staging(threading.local):
    """A buffer per thread for elements that change type, device or order on the way; it grows to the largest piece."""

    buffer: torch.Tensor = field(default_factory=lambda: torch.empty(CHUNK_BYTES, dtype=torch.uint8))

    def take(self, num_bytes: int) -> torch.Tensor:
        """Return the first `num_bytes` of the buffer."""
        if len(self.buffer) < num_bytes:
            self.buffer = torch.empty(num_bytes, dtype=torch.uint8)
        return self.buffer[:num_bytes]


class Read(Protocol):
    """Something to be read from one file."""

    @property
    def num_bytes(self) -> int:
        """Read from the file."""
        ...

    @property
    def position(self) -> tuple[str, int]:
        """Name of the file and first byte in it."""
        ...

    def run(self, staging: Staging) -> Spans:
        """Read and write; returns the address ranges that were written."""
        ...


@dataclass(frozen=True, kw_only=True)
class RunRead:
    """A run of elements that is held as it lies in the file, in one or more places ([n], contiguous)."""

    file: SafetensorsFile
    offset: int
    num_bytes: int
    dtype: torch.dtype
    targets: tuple[torch.Tensor, ...]

    @property
    def position(self) -> tuple[str, int]:
        """Name of the file and first byte in it."""
        return self.file.path.name, self.offset

    def run(self, staging: Staging) -> Spans:
        """Read straight into the first target where its type and device allow it, and copy to the others."""
        first, *others = self.targets
        if first.device.type == "cpu" and first.dtype == self.dtype:
            self.file.read_into(first.view(torch.uint8).numpy().data, self.offset)
        else:
            stored = staging.take(self.num_bytes)
            self.file.read_into(stored.numpy().data, self.offset)
            first.copy_(stored.view(self.dtype))
        for other in others:
            other.copy_(first)
        return [_span(target) for target in self.targets]


@dataclass(frozen=True, kw_only=True)
class ColumnsRead:
    """Some columns of consecutive rows, which lie apart in the file, in one or more places ([rows, columns])."""

    file: SafetensorsFile
    offset: int
    row_bytes: int  # from the begin of one row in the file to that of the next
    dtype: torch.dtype
    targets: tuple[torch.Tensor, ...]

    @property
    def num_bytes(self) -> int:
        """Read from the file."""
        return self.targets[0].numel() * self.dtype.itemsize

    @property
    def position(self) -> tuple[str, int]:
        """Name of the file and first byte in it."""
        return self.file.path.name, self.offset

    def run(self, staging: Staging) -> Spans:
        """Read row by row, straight into the first target where its type and device allow it."""
        first, *others = self.targets
        is_straight = first.device.type == "cpu" and first.dtype == self.dtype
        stored = first if is_straight else staging.take(self.num_bytes).view(self.dtype).view(first.shape)
        for i, row in enumerate(stored.view(torch.uint8).numpy()):
            self.file.read_into(row.data, self.offset + i * self.row_bytes)
        if not is_straight:
            first.copy_(stored)
        for other in others:
            other.copy_(first)
        return [_span(target) for target in self.targets]


@dataclass(frozen=True, kw_only=True)
class RearrangedRead:
    """A piece whose parts lie interleaved, transposed or quantised in the file; `targets` has the places of each."""

    piece: Piece
    targets: tuple[tuple[torch.Tensor, ...], ...]

    @property
    def num_bytes(self) -> int:
        """Read from the file."""
        scales = self.piece.scales
        return self._piece_bytes + (scales[0].num_bytes if scales is not None else 0)

    @property
    def position(self) -> tuple[str, int]:
        """Name of the file and first byte in it."""
        return self.piece.stored.file.path.name, self._offset

    @property
    def _itemsize(self) -> int:
        return STORED_DTYPES[self.piece.stored.dtype].itemsize

    @property
    def _piece_bytes(self) -> int:
        return torch.Size(self.piece.shape).numel() * self._itemsize

    @property
    def _offset(self) -> int:
        return self.piece.stored.offset + self.piece.offset * self._itemsize

    def run(self, staging: Staging) -> Spans:
        """Read the piece whole, and copy each part to where it belongs."""
        piece, buffer = self.piece, staging.take(self._piece_bytes)
        piece.stored.file.read_into(buffer.numpy().data, self._offset)
        rows = buffer.view(STORED_DTYPES[piece.stored.dtype]).view(piece.shape)
        if piece.scales is not None:
            rows = _dequantized(rows, *piece.scales)
        if piece.transposed:
            rows = rows.T
        grouped, spans = torch.unflatten(rows, 0, (piece.groups, -1)), Spans()  # [groups, rows of all parts, ...]
        shares = [count // piece.groups for count in piece.rows]
        for part, targets in zip(torch.split(grouped, shares, dim=1), self.targets):
            for target in targets:
                target.view(part.shape).copy_(part)
                spans.append(_span(target))
        return spans


def plan_piece(piece: Piece, targets: dict[str, list[torch.Tensor]]) -> list[Read]:
    """Return the reads of one piece: none where this rank holds none of its parts; runs of at most CHUNK_BYTES."""
    places = tuple(tuple(targets.get(part, ())) for part in piece.parts)
    if not any(places):
        return []
    if not piece.is_plain:
        return [RearrangedRead(piece=piece, targets=places)]
    reads: list[Read] = []
    position = piece.offset
    for rows, views in zip(piece.rows, places):
        size = torch.Size(piece.shape).numel() // sum(piece.rows) * rows
        if views and piece.row_stride:
            reads += _plan_columns(piece, views)
        elif views:
            reads += _plan_runs(piece.stored, position, [view.view(-1) for view in views])
        position += size
    return reads


def _plan_runs(stored: StoredTensor, position: int, views: Sequence[torch.Tensor]) -> list[Read]:
    dtype = STORED_DTYPES[stored.dtype]
    chunk = max(CHUNK_BYTES // dtype.itemsize, 1)
    return [
        RunRead(
            file=stored.file,
            offset=stored.offset + (position + start) * dtype.itemsize,
            num_bytes=min(chunk, len(views[0]) - start) * dtype.itemsize,
            dtype=dtype,
            targets=tuple(view[start : start + chunk] for view in views),
        )
        for start in range(0, len(views[0]), chunk)
    ]


def _plan_columns(piece: Piece, views: Sequence[torch.Tensor]) -> list[Read]:
    """Return the reads of a piece of one part that has but some columns of its rows."""
    dtype = STORED_DTYPES[piece.stored.dtype]
    num_rows, columns = piece.shape
    step = max(CHUNK_BYTES // (columns * dtype.itemsize), 1)
    return [
        ColumnsRead(
            file=piece.stored.file,
            offset=piece.stored.offset + (piece.offset + start * piece.row_stride) * dtype.itemsize,
            row_bytes=piece.row_stride * dtype.itemsize,
            dtype=dtype,
            targets=tuple(view[start : start + step] for view in views),
        )
        for start in range(0, num_rows, step)
    ]


def _dequantized(data: torch.Tensor, stored_scales: StoredTensor, scheme: QuantScheme) -> torch.Tensor:
    raw = torch.empty(stored_scales.num_bytes, dtype=torch.uint8)
    stored_scales.file.read_into(raw.numpy().data, stored_scales.offset)
    scales = raw.view(STORED_DTYPES[stored_scales.dtype]).view(stored_scales.shape).float()
    rows, columns = data.shape
    tensor = QuantTensor(data=data, scales=scales, scheme=scheme, shape=(rows, columns), sections=(rows,))
    return tensor.dequantize(torch.float32)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
