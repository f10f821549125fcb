"""Sizes of the tiles that native kernels multiply with, and what a packed matrix takes.

Not the packing (packed.py). No torch: whoever plans reads this. Units: bytes as held, padding included.
"""

from __future__ import annotations

BF16, INT8, INT4 = "bf16", "int8", "int4"
ROWS, DEPTH = 16, 32  # of a tile of weights in bf16: 16 outputs, 32 inputs


def column_tiles(rows: int, *, gate_up: bool) -> int:
    """Return how many column tiles of 16 outputs a matrix of so many rows has."""
    return 2 * -(-(rows // 2) // ROWS) if gate_up else -(-rows // ROWS)


def packed_bytes(stack: int, rows: int, columns: int) -> int:
    """Return what `stack` matrices [rows, columns] of bf16 take when they are packed, padding included."""
    return stack * column_tiles(rows, gate_up=False) * ROWS * -(-columns // DEPTH) * DEPTH * 2
