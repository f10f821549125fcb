"""Tokens by chance in one native call, for logits on a CPU.

Not the sampler (sampler.py), which has the same in torch for every other device and says what is computed.
Shapes: N rows, V vocabulary.
"""

from __future__ import annotations

import ctypes
from typing import Protocol

import numpy as np
import torch

from ...native.library import load
from .randomness import uniform


class DrawSettings(Protocol):
    """What is read of `sampler.SamplingRows`."""

    @property
    def temperature(self) -> np.ndarray:
        """[N] f64."""
        ...

    @property
    def top_p(self) -> np.ndarray:
        """[N] f64."""
        ...

    @property
    def top_k(self) -> np.ndarray:
        """[N] i64."""
        ...

    @property
    def min_p(self) -> np.ndarray:
        """[N] f64."""
        ...

    @property
    def seed(self) -> np.ndarray:
        """[N] u64."""
        ...

    @property
    def position(self) -> np.ndarray:
        """[N] i64."""
        ...


class _DrawArgs(ctypes.Structure):
    """`struct DrawRows` of native/csrc/draw.h."""

    _fields_ = (
        ("logits", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("temperature", ctypes.c_void_p),
        ("min_p", ctypes.c_void_p),
        ("top_k", ctypes.c_void_p),
        ("top_p", ctypes.c_void_p),
        ("chance", ctypes.c_void_p),
        ("tokens", ctypes.c_void_p),
    )


def can_draw_natively(logits: torch.Tensor) -> bool:
    """Tell whether `draw_natively` takes these logits here."""
    return logits.device.type == "cpu" and logits.dtype == torch.float32 and load() is not None


def draw_natively(logits: torch.Tensor, rows: DrawSettings) -> torch.Tensor:
    """Choose a token for each row of `logits` [N, V] f32 by chance, [N] i64; the best of each row is finite."""
    library = load()
    assert library is not None
    logits = logits.contiguous()
    settings = (
        rows.temperature.astype(np.float32),
        rows.min_p.astype(np.float32),
        np.ascontiguousarray(rows.top_k, np.int64),
        np.ascontiguousarray(rows.top_p, np.float64),
        np.ascontiguousarray(uniform(rows.seed, rows.position), np.float64),
    )
    tokens = torch.empty(logits.shape[0], dtype=torch.int64)
    args = _DrawArgs(logits.data_ptr(), *logits.shape, *(each.ctypes.data for each in settings), tokens.data_ptr())
    library.moewe_draw_rows(ctypes.byref(args))
    return tokens
