"""Counter-based random numbers: what a request draws depends on (seed, position, draw) alone, never on its batch mates.

Not a generator with state: Philox 4x32 with ten rounds (Salmon et al., 2011), vectorised over rows.
Shapes: N rows; words are u64 arrays that hold 32-bit values; uniforms are f64 in [0, 1) with 53 random bits.
"""

from __future__ import annotations

import numpy as np

_LOW = np.uint64(0xFFFF_FFFF)
_HALF = np.uint64(32)
_MULTIPLIERS = (np.uint64(0xD251_1F53), np.uint64(0xCD9E_8D57))
_KEY_STEPS = (np.uint64(0x9E37_79B9), np.uint64(0xBB67_AE85))
_NUM_ROUNDS = 10

Words = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def philox(counter: Words, key: tuple[np.ndarray, np.ndarray]) -> Words:
    """Return the four output words of Philox 4x32-10 for every row, each [N] u64 below 2**32."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_NUM_ROUNDS):
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (second >> _HALF) ^ c1 ^ k0, second & _LOW, (first >> _HALF) ^ c3 ^ k1, first & _LOW
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return c0, c1, c2, c3


def uniform(seed: np.ndarray, position: np.ndarray, draw: int = 0) -> np.ndarray:
    """Return one number in [0, 1) a row, [N] f64.

    Args:
        seed: [N] u64.
        position: [N] i64, index in the sequence of the token to choose.
        draw: which of the choices at that position (0 is the token itself).
    """
    at = position.astype(np.uint64)
    number = np.full_like(at, draw)
    zero = np.zeros_like(at)
    words = philox((at & _LOW, at >> _HALF, number, zero), (seed & _LOW, seed >> _HALF))
    bits = (words[0] << np.uint64(21)) | (words[1] >> np.uint64(11))  # 53 bits
    result: np.ndarray = bits.astype(np.float64) * 2.0**-53
    return result
