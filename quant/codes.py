"""What the tiles of packed MXFP4 and fp8 stand for, in torch: the way back from the formats of native/csrc/.

Not used by products. Letters: C column tiles of 16 outputs, K inputs, G groups of inputs that share scales.
"""

from __future__ import annotations

import torch

from .tensor import E2M1, E8M0_BIAS, E8M0_NAN


def mxfp4_numbers(data: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return fp32 [.., C, K / 32, 16 pairs of inputs, 16 outputs, 2].

    Args:
        data: [.., C, K / 32, 4, 16, 2, 2] u8: four pairs, output, which of each pair, byte: the first two of the pairs
            in byte 0, the lower four bits first.
        scales: [.., C, K / 32, 16] u8.
    """
    codes = torch.stack([data & 15, data >> 4], dim=-1)  # [.., 4, 16, 2, bytes, halves of them]
    codes = codes.movedim((-2, -1), (-4, -3)).flatten(-5, -3)  # [.., 16, 16, 2]
    powers = torch.ldexp(torch.ones_like(scales, dtype=torch.float32), scales.int() - E8M0_BIAS)
    powers.masked_fill_(scales == E8M0_NAN, torch.nan)
    return torch.tensor(E2M1)[codes.int()] * powers[..., None, :, None]


def fp8_numbers(data: torch.Tensor, scales: torch.Tensor, group: int) -> torch.Tensor:
    """Return fp32 [.., C, ceil(K / 32), 16 pairs of inputs, 16 outputs, 2].

    Args:
        data: [.., C, ceil(K / 32), 8, 4, 2, 4, 2] u8, e4m3: two pairs, four outputs, which pair, output, which of it.
        scales: [.., C, G, 1 or 16] f32.
        group: inputs that share scales.
    """
    tiles = data.shape[-6]
    codes = data.movedim(-3, -4).flatten(-3, -2).flatten(-4, -3)  # [.., tiles, 16, 16, 2]
    numbers = codes.contiguous().view(torch.float8_e4m3fn).float()
    # Of each input; those that pad K are zeros under any scale.
    groups = (torch.arange(tiles * 32) // group).clamp(max=scales.shape[-2] - 1)
    factors = torch.unflatten(scales.index_select(-2, groups), -2, (tiles, 16, 2))  # [.., tiles, 16, 2, 1 or 16]
    scaled: torch.Tensor = numbers * factors.transpose(-1, -2)
    return scaled
