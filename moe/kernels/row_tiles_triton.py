"""Rows, sorted by slot, cut into tiles in Triton; row_tiles.py launches it, and sorting does it on the way.

Letters: S slots, M rows.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def store_tiles(rows, tiles, num_tiles, part, num_parts, max_tiles, block_m, SLOTS: tl.constexpr):
    """Cut the `rows` [SLOTS] i32 of each slot into tiles of block_m: (slot, first row, end of the slot's rows).

    A slot without rows has none. `tiles` [max_tiles, 3]: behind the last one slots are -1. This is the work of program
    `part` of `num_parts`: the tiles of all slots whose number within their slot falls to it.
    """
    slot = tl.arange(0, SLOTS)
    tiles_of_slot = (rows + block_m - 1) // block_m
    first_tile = tl.cumsum(tiles_of_slot, 0) - tiles_of_slot
    total = tl.sum(tiles_of_slot, 0)
    row_ends = tl.cumsum(rows, 0)
    for number in range(part, tl.max(tiles_of_slot, 0), num_parts):
        here = tiles + (first_tile + number) * 3
        present = number < tiles_of_slot
        tl.store(here, slot, mask=present)
        tl.store(here + 1, row_ends - rows + number * block_m, mask=present)
        tl.store(here + 2, row_ends, mask=present)
    for start in range(total + part * SLOTS, max_tiles, num_parts * SLOTS):
        tl.store(tiles + (start + slot) * 3, -1, mask=start + slot < max_tiles)
    if part == 0:
        tl.store(num_tiles, total)


@triton.jit(do_not_specialize=["num_slots", "max_tiles", "block_m"])
def tiles_kernel(counts, tiles, num_tiles, num_slots, max_tiles, block_m, SLOTS: tl.constexpr):
    """Cut the rows of each slot, `counts` [num_slots] i64."""
    slot = tl.arange(0, SLOTS)
    rows = tl.load(counts + slot, mask=slot < num_slots, other=0).to(tl.int32)
    store_tiles(rows, tiles, num_tiles, tl.program_id(0), tl.num_programs(0), max_tiles, block_m, SLOTS)
