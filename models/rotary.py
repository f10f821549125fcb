"""Rotary position embedding (Su et al., 2021): frequencies of every kind of scaling, and the rotation of heads.

Not an attention block (models/layers.py, models/latent.py) and no reading of config.json. cos and sin are kept in fp32.
Shapes: T rows, Dh head width, R = rotary_dim, R / 2 frequencies in radians a token.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch

from .config import RotaryConfig, RotaryScaling

_FEWEST_ANGLES = 1024  # positions in a table


class Angles(NamedTuple):
    """cos and sin of each row's position, [T, 1, R] f32 each, laid out and signed as `Rotary.rotate` wants them."""

    cos: torch.Tensor
    sin: torch.Tensor


def frequencies(config: RotaryConfig, *, long: bool = False) -> torch.Tensor:
    """Return the radians that each pair of elements turns by from one token to the next: [R / 2] f32.

    Args:
        config: base, width and scaling.
        long: of `longrope`: those of sequences that may grow beyond `original_max_position`.

    Raises:
        ValueError: a kind of scaling that is not known.
    """
    exponents = torch.arange(0, config.rotary_dim, 2, dtype=torch.int64).float() / config.rotary_dim
    plain, scaling = 1.0 / config.theta**exponents, config.scaling
    if scaling is None:
        return plain
    match scaling.kind:
        case "linear":
            return plain / scaling.factor
        case "yarn":
            return _yarn(plain, config, scaling)
        case "llama3":
            return _llama3(plain, scaling)
        case "longrope":
            factors = torch.tensor(scaling.long_factors if long else scaling.short_factors)
            assert factors.shape == plain.shape, (factors.shape, plain.shape)
            return plain / factors
    raise ValueError(f"rotary scaling {scaling.kind!r} is not known; use linear, yarn, llama3 or longrope")


def _yarn(plain: torch.Tensor, config: RotaryConfig, scaling: RotaryScaling) -> torch.Tensor:
    """Keep fast frequencies, divide slow ones by the factor, and blend along a ramp between (Peng et al., 2023)."""
    half = config.rotary_dim // 2

    def dim_of(num_turns: float) -> float:
        """Return the pair that makes so many turns over the original length."""
        return half * math.log(scaling.original_max_position / (num_turns * 2 * math.pi)) / math.log(config.theta)

    first, last = dim_of(scaling.beta_fast), dim_of(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, config.rotary_dim - 1)
    width = last - first or 1e-3  # a ramp of no width is a step
    divided = ((torch.arange(half, dtype=torch.float32) - first) / width).clamp(0, 1)  # share of the slow form
    return plain / scaling.factor * divided + plain * (1 - divided)


def _llama3(plain: torch.Tensor, scaling: RotaryScaling) -> torch.Tensor:
    """Divide frequencies of few turns over the original length by the factor, keep those of many, blend between."""
    num_turns = scaling.original_max_position * plain / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((num_turns - low) / (high - low)).clamp(0, 1)
    return plain / scaling.factor * (1 - kept) + plain * kept


class Rotary:
    """Turns pairs of elements of heads by angles that grow with the position.

    Args:
        config: base, width, layout and scaling.
        device: of the tables.
    """

    def __init__(self, config: RotaryConfig, device: torch.device) -> None:
        scaling = config.scaling
        self._rotary_dim, self._interleaved = config.rotary_dim, config.interleaved
        self._inverse = frequencies(config).to(device)  # [R / 2]
        self._amplitude = scaling.amplitude if scaling is not None else 1.0
        self._cos_table = self._sin_table = np.empty((0, 1, 0), np.float32)  # [positions, 1, R]
        self._found: Angles | None = None
        self._found_rows: tuple[np.ndarray, np.ndarray]
        self._long: tuple[torch.Tensor, float] | None = None
        if scaling is not None and scaling.kind == "longrope":
            self._long = frequencies(config, long=True).to(device), scaling.long_amplitude

    def angles(self, positions: torch.Tensor, long_rows: torch.Tensor | None = None) -> Angles:
        """Return the angles of each row, once a step.

        Args:
            positions: [T] i64.
            long_rows: [T] bool, or numbers other than 0, rows of sequences that may grow beyond the original length
                (`longrope`).
        """
        wide = positions.float()[:, None]
        angle = wide * self._inverse  # [T, R / 2]
        amplitude: float | torch.Tensor = self._amplitude
        if self._long is not None and long_rows is not None:
            inverse, long_amplitude = self._long
            long_rows = long_rows.bool()
            angle = torch.where(long_rows[:, None], wide * inverse, angle)
            amplitude = torch.where(long_rows, long_amplitude, self._amplitude)[:, None]
        cos, sin = angle.cos(), angle.sin()
        if isinstance(amplitude, torch.Tensor) or amplitude != 1.0:
            cos, sin = cos * amplitude, sin * amplitude
        # The element that is subtracted has its sin negated here, so that `rotate` needs no negated copy of the heads.
        if self._interleaved:
            return Angles(cos.repeat_interleave(2, -1)[:, None], torch.stack([-sin, sin], dim=-1).flatten(1)[:, None])
        return Angles(torch.cat([cos, cos], dim=-1)[:, None], torch.cat([-sin, sin], dim=-1)[:, None])

    def lookup(self, positions: torch.Tensor) -> Angles:
        """Return what `angles` does, from tables that grow with the positions asked for; valid until the next call.

        On a CPU, and not for rows of long sequences (`longrope`). The tables take some hundredths of what the KV of so
        many tokens takes.
        """
        rows = positions.numpy()
        most = int(rows.max()) + 1
        if most > len(self._cos_table):
            whole = self.angles(torch.arange(max(_FEWEST_ANGLES, 1 << (most - 1).bit_length())))
            self._cos_table, self._sin_table = whole.cos.numpy(), whole.sin.numpy()
        if self._found is None or len(self._found.cos) != len(rows):
            shape = (len(rows), *self._cos_table.shape[1:])
            self._found = Angles(torch.empty(shape), torch.empty(shape))
            self._found_rows = self._found.cos.numpy(), self._found.sin.numpy()
        cos, sin = self._found_rows
        np.take(self._cos_table, rows, axis=0, out=cos, mode="clip")  # positions are not negative; "raise" would copy
        np.take(self._sin_table, rows, axis=0, out=sin, mode="clip")
        return self._found

    def rotate(self, heads: torch.Tensor, angles: Angles) -> torch.Tensor:
        """Rotate [T, heads, Dh] in fp32, rounded once; elements past `rotary_dim` pass through."""
        partial = heads.shape[-1] > self._rotary_dim
        wide = (heads[..., : self._rotary_dim] if partial else heads).float()
        if self._interleaved:
            partner = wide.reshape(*wide.shape[:-1], -1, 2).flip(-1).flatten(-2)
        else:
            partner = wide.roll(self._rotary_dim // 2, -1)
        turned = (wide * angles.cos).addcmul_(partner, angles.sin).to(heads.dtype)
        return torch.cat([turned, heads[..., self._rotary_dim :]], dim=-1) if partial else turned
