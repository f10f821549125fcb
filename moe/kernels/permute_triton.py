"""Choices sorted by slot in Triton: a stable counting sort, of which permute.py launches one or two kernels.

Not routing. Letters: T tokens, K top-k, N = T * K choices, S slots, M rows (choices that are not dropped).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .row_tiles_triton import store_tiles


@triton.jit
def slots_of_block(slot_ids, block, num_choices, CHOICES: tl.constexpr):
    """Return the slots of block number `block`, -1 behind the last choice."""
    here = block * CHOICES + tl.arange(0, CHOICES)
    return tl.load(slot_ids + here, mask=here < num_choices, other=-1)


@triton.jit(do_not_specialize=["num_choices"])
def count_kernel(slot_ids, block_counts, num_choices, CHOICES: tl.constexpr, SLOTS: tl.constexpr):
    """Count the slots of a block of choices: block_counts [blocks, SLOTS] i32."""
    block = tl.program_id(0)
    slots = slots_of_block(slot_ids, block, num_choices, CHOICES)
    counts = tl.histogram(tl.where(slots < 0, 0, slots), SLOTS, mask=slots >= 0)
    tl.store(block_counts + block * SLOTS + tl.arange(0, SLOTS), counts)


@triton.jit
def place_of(slots, choice, base):
    """Return the row of each choice of a block: `base` [SLOTS] of its slot, behind earlier choices of the slot."""
    same = (slots[None, :] == slots[:, None]) & (choice[None, :] < choice[:, None])
    return tl.gather(base, tl.where(slots < 0, 0, slots), 0) + tl.sum(same.to(tl.int32), 1)


@triton.jit(do_not_specialize=["num_choices", "num_slots", "num_blocks", "max_tiles", "block_m"])
def place_kernel(
    slot_ids, block_counts, row_tokens, rows, tokens_per_slot, tiles, num_tiles, num_choices, num_slots, num_blocks,
    max_tiles, block_m, CHOICES: tl.constexpr, SLOTS: tl.constexpr, BLOCKS: tl.constexpr, TOP_K: tl.constexpr,
):  # fmt: skip
    """Give each choice of a block its row: behind those of lower slots, of earlier blocks and of the block before it.

    Without `block_counts` every program counts all blocks itself; else it adds them up, BLOCKS at a time. With `tiles`
    rows are cut as well.
    """
    own = tl.program_id(0)
    slot = tl.arange(0, SLOTS)
    total = tl.zeros([SLOTS], tl.int32)
    before = tl.zeros([SLOTS], tl.int32)
    if block_counts is None:
        for block in range(num_blocks):
            others = slots_of_block(slot_ids, block, num_choices, CHOICES)
            counts = tl.histogram(tl.where(others < 0, 0, others), SLOTS, mask=others >= 0)
            total += counts
            before += tl.where(block < own, counts, 0)
    else:
        for start in range(0, num_blocks, BLOCKS):
            block = start + tl.arange(0, BLOCKS)
            some = tl.load(
                block_counts + block[:, None] * SLOTS + slot[None, :], mask=(block < num_blocks)[:, None], other=0
            )
            total += tl.sum(some, 0)
            before += tl.sum(tl.where((block < own)[:, None], some, 0), 0)
    base = tl.cumsum(total, 0) - total + before
    if own == 0:
        tl.store(tokens_per_slot + slot, total.to(tl.int64), mask=slot < num_slots)
    choice = tl.arange(0, CHOICES)
    slots = slots_of_block(slot_ids, own, num_choices, CHOICES)
    row = place_of(slots, choice, base)
    here = own * CHOICES + choice
    tl.store(rows + here, tl.where(slots < 0, -1, row), mask=here < num_choices)
    tl.store(row_tokens + row, here // TOP_K, mask=(here < num_choices) & (slots >= 0))
    if tiles is not None:
        store_tiles(total, tiles, num_tiles, own, num_blocks, max_tiles, block_m, SLOTS)
