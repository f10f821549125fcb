"""Seeds of random choices: scrambled 64-bit numbers, and one seed for each choice of a request.

Not the random numbers themselves (runtime/ranks/randomness.py). Pure; units: bits.
"""

from __future__ import annotations

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def mix(value: int) -> int:
    """Scramble 64 bits (the finaliser of splitmix64)."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def choice_seed(seed: int | None, choice: int) -> int | None:
    """Return the seed of choice number `choice` (from 0) of a request: choice 0 has the request's own."""
    if seed is None or choice == 0:
        return seed
    return mix(mix(seed & MASK) ^ (GOLDEN * choice & MASK)) >> 1
