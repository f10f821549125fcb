"""How close memory traffic and arithmetic come to the ceilings of the machine, and how evenly experts are used.

Pure arithmetic, not a counter and not a measurement: bytes and operations come from telemetry.RankCounters, ceilings
from native/. What binds is judged in bound.py. Units: bytes, operations, seconds; ratios are fractions (1.0 is the
ceiling, or perfect balance).
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


def s_mbu(memory_bytes: float, busy_seconds: float, bandwidth: float) -> float:
    """Return the sparse memory bandwidth utilisation: bytes really touched over what could have been read meanwhile.

    After MoE-CAP (arXiv 2412.07067): S-MBU = B_achieved / B_peak, B_achieved = (S_activated + S_KV) /
    TPOT, where S_activated counts an expert of a layer once if any token of the batch activates it. Here for each rank,
    with shared experts, dense layers, routers, norms and head; time is that of its steps, waiting for other ranks
    included; the peak is the bandwidth measured at start. Over several steps both are summed before they are divided,
    as there. 0 where nothing ran or no ceiling is known.

    Example:
        5e9 bytes in 0.5 busy seconds under a ceiling of 20e9 bytes/s give 0.5.
    """
    possible = busy_seconds * bandwidth
    return memory_bytes / possible if possible > 0 else 0.0


def s_mfu(flops: float, busy_seconds: float, matrix_rate: float) -> float:
    """Return the sparse model FLOPs utilisation: operations of activated experts and all else over what could have run.

    After MoE-CAP (as `s_mbu`): rows count with the experts that computed them, never with those that they did not
    choose; here from rows really run, rank by rank. The peak is the rate of dense products measured at start.
    """
    possible = busy_seconds * matrix_rate
    return flops / possible if possible > 0 else 0.0


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
