"""How a row looks on a link: a few i32 in front (which slots it is for), then the row itself, as it is or in fp8.

Not a link (links.py) and not a choice of slots. Bytes are those of the machine: all ranks have the same.
Shapes: x [T, D]; a body is u8 [T, B]; a wire row is u8 [4 * H + B] with H numbers in front.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

FP8_COLUMNS = 128  # that share a scale
_E4M3 = torch.float8_e4m3fn
_LARGEST = 448.0
_SMALLEST = 1e-30  # a block without a larger number becomes zeros: its scale would be too small to divide by


def pack(header: torch.Tensor, body: torch.Tensor) -> torch.Tensor:
    """Put `header` [T, H] i32 in front of `body` [T, B] u8."""
    return torch.cat((header.contiguous().view(torch.uint8), body), dim=1)


def unpack(rows: torch.Tensor, num_numbers: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the header [T, H] i32 and the body [T, B] u8 (a view) of wire rows with H numbers."""
    split = 4 * num_numbers
    return _numbers(rows[:, :split], torch.int32), rows[:, split:]


class Payload(Protocol):
    """How the numbers of a row are written."""

    name: str

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """[T, D] -> [T, B] u8."""
        ...

    def decode(self, body: torch.Tensor, dtype: torch.dtype, width: int) -> torch.Tensor:
        """[T, B] u8, rows may lie apart -> [T, width] of `dtype`, the one that was encoded."""
        ...


class PlainPayload:
    """As they are."""

    name = "auto"

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """Return the bytes of `x`."""
        return x.contiguous().view(torch.uint8)

    def decode(self, body: torch.Tensor, dtype: torch.dtype, width: int) -> torch.Tensor:
        """Return the numbers in `body`."""
        return _numbers(body, dtype)


class Fp8Payload:
    """In e4m3 with an fp32 scale for each 128 columns of a row: 1.03 bytes a number instead of 2.

    All rows are written so, also those that stay on their rank: what a token gets must not depend on where it is.
    The largest of 128 numbers becomes 448; any other is off by 1/16 of itself at most, or by 2^-10 of a scale where it
    is below 2^-6 of one. A block with a number that is not finite comes out without a finite one.
    """

    name = "fp8"

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """Return codes [T, D], then the scales of a row."""
        blocks = _blocks(x.float())  # [T, G, 128]
        largest = blocks.abs().amax(2)
        scales = torch.where(largest < _SMALLEST, 1.0, largest / _LARGEST)  # [T, G] f32
        codes = (blocks / scales.unsqueeze(2)).clamp_(-_LARGEST, _LARGEST).to(_E4M3)
        written = codes.view(torch.uint8).flatten(1)[:, : x.shape[1]]
        return torch.cat((written, scales.view(torch.uint8)), dim=1)

    def decode(self, body: torch.Tensor, dtype: torch.dtype, width: int) -> torch.Tensor:
        """Return the numbers: codes times scales in fp32, rounded once."""
        codes = _blocks(_numbers(body[:, :width], _E4M3).float())
        scales = _numbers(body[:, width:], torch.float32)
        return (codes * scales.unsqueeze(2)).flatten(1)[:, :width].to(dtype)


def make_payload(name: str) -> Payload:
    """Return the payload that is called `name`."""
    assert name in ("auto", "fp8"), name
    return Fp8Payload() if name == "fp8" else PlainPayload()


def _numbers(columns: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Read bytes as numbers. A copy: a single row counts as contiguous where it lies, at any address."""
    return columns.clone(memory_format=torch.contiguous_format).view(dtype)


def _blocks(x: torch.Tensor) -> torch.Tensor:
    """[T, D] f32 -> [T, ceil(D / 128), 128], zeros at the end."""
    padded = F.pad(x, (0, -x.shape[1] % FP8_COLUMNS))
    return padded.view(len(x), padded.shape[1] // FP8_COLUMNS, FP8_COLUMNS)
