"""How close memory traffic comes to the ceiling of the machine, and how evenly experts are used: pure arithmetic.

Not a counter and not a measurement: bytes come from telemetry.RankCounters, ceilings from native/bandwidth.py.
Units: bytes, seconds, bytes/s; ratios are fractions (1.0 is the ceiling, or perfect balance).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...telemetry import COMPONENTS

# What a step must fetch from memory. Activations stay in caches and exchange bytes travel on a link.
MEMORY_COMPONENTS = tuple(name for name in COMPONENTS if name not in ("activations", "exchange"))
_COLUMNS = [COMPONENTS.index(name) for name in MEMORY_COMPONENTS]


def memory_bytes(bytes_moved: np.ndarray) -> np.ndarray:
    """Return the bytes of weights and KV per phase.

    Args:
        bytes_moved: [phase, component] i64.

    Returns:
        [phase] i64.
    """
    total: np.ndarray = bytes_moved[:, _COLUMNS].sum(axis=1)
    return total


def saturation(num_bytes: float, busy_seconds: float, ceiling: float) -> float:
    """Return bytes / (busy seconds x ceiling), or 0.0 when nothing ran or no ceiling is known.

    Example:
        5e9 bytes in 0.5 busy seconds under a ceiling of 20e9 bytes/s give 0.5.
    """
    if busy_seconds <= 0 or ceiling <= 0:
        return 0.0
    return float(num_bytes) / (busy_seconds * ceiling)


def imbalance(tokens: np.ndarray) -> float:
    """Return max / mean over the last axis, averaged over the rows that saw any token; 1.0 is even, 0.0 no traffic.

    Args:
        tokens: [L, N] tokens of N experts slots or ranks in each of L layers.

    Example:
        [[4, 0], [2, 2]] gives (2 + 1) / 2 = 1.5.
    """
    if tokens.size == 0:
        return 0.0
    seen = tokens[tokens.sum(axis=1) > 0]
    return float((seen.max(axis=1) / seen.mean(axis=1)).mean()) if len(seen) else 0.0


def expert_imbalance(expert_tokens: Sequence[np.ndarray]) -> tuple[float, float]:
    """Return the imbalance over ranks and over expert slots.

    Args:
        expert_tokens: per rank [L_moe, P_local], the same L_moe for all.
    """
    if not expert_tokens or not all(tokens.size for tokens in expert_tokens):
        return 0.0, 0.0
    by_rank = np.stack([tokens.sum(axis=1) for tokens in expert_tokens], axis=1)  # [L_moe, W]
    return imbalance(by_rank), imbalance(np.concatenate(list(expert_tokens), axis=1))
