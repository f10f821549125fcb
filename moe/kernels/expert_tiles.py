"""Which tiles the products of experts are cut into: a pure choice from sizes and a GPU, the same in every process.

Not a kernel. Two schedules: `streamed` for few rows an expert (decode: all multiprocessors pull weights), `persistent`
for many (prefill: tiles are walked so that caches serve both operands).
Letters: M rows, S slots. Units: bytes of shared memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ...native.gpu import GpuTarget

_SMALLEST_ROWS, _LARGEST_ROWS = 16, 128
ROWS_A_SLOT = (1, 17, 33, 65)  # the fewest for each height of a tile
# Outputs of a streamed tile: wide ones read longer runs, narrow ones occupy more multiprocessors.
_STREAMED_OUTPUTS = (128, 64, 32)
# Of codes and few rows: tiles that Hopper multiplies by mma, not wgmma, whose operands it would load 4 or 8 bytes wide.
_DECODED_OUTPUTS, _DECODED_ROWS = 32, 32
_PROGRAMS_A_SM = 2
_RESERVED = 4 << 10  # of shared memory: what the compiler takes besides tiles
_MOST_STAGES = 5
_INVARIANT_ROWS, _INVARIANT_OUTPUTS = 64, 64


@dataclass(frozen=True, kw_only=True)
class ProductSize:
    """How large a product of rows with their experts' matrices is.

    Attributes:
        rows: M, at most.
        slots: S.
        outputs: of one expert; with `gated` gates alone.
        inputs: of one expert.
        gated: twice as many outputs are computed and become one.
        bits: of a weight.
        scale_columns: inputs that share a scale by which sums are multiplied; 0: all of them, or numbers are scaled.
    """

    rows: int
    slots: int
    outputs: int
    inputs: int
    gated: bool
    bits: int
    scale_columns: int = 0


@dataclass(frozen=True, kw_only=True)
class ProductConfig:
    """How a product is cut.

    Attributes:
        persistent: the schedule.
        block_m, block_n, block_k: rows, outputs and inputs of a tile.
        group_m: tiles of rows that meet the same weights one after the other; of `persistent`.
        num_warps, num_stages: of the compiler.
    """

    persistent: bool
    block_m: int
    block_n: int
    block_k: int
    group_m: int
    num_warps: int
    num_stages: int


def pick_config(size: ProductSize, target: GpuTarget, *, batch_invariant: bool = False) -> ProductConfig:
    """Choose tiles. `batch_invariant`: the same ones for every number of rows.

    Example:
        128 slots of 1,536 x 2,048 and 8 rows on 132 multiprocessors: 8 slots at most have a row, so 32 outputs a tile
        give 8 * 24 programs; with 65,536 rows 512 meet each matrix, and tiles of 128 rows are walked.
    """
    active = min(size.rows, size.slots)
    block_m = rows_of_tile(size.rows, size.slots, batch_invariant=batch_invariant)
    persistent = block_m == _LARGEST_ROWS
    sections = 2 if size.gated else 1
    is_coded = size.bits < 16
    # Decoded weights of 128 outputs beside their sums fit Hopper's registers only: sums of others take more of them.
    has_short_registers = is_coded and target.capability != 90
    if batch_invariant:
        block_n = _INVARIANT_OUTPUTS
    elif persistent:
        block_n = 64 if has_short_registers else 128 // sections
    else:
        most = _DECODED_OUTPUTS if is_coded and block_m <= _DECODED_ROWS else 128 // sections
        fitting = (n for n in _STREAMED_OUTPUTS if active >= _filling(size, n, target) and n <= most)
        block_n = next(fitting, _STREAMED_OUTPUTS[-1])
    block_k = next((k for k in (128, 64, 32) if size.inputs % k == 0), 64)
    if persistent or (is_coded and block_m > _DECODED_ROWS):
        block_k = min(block_k, 64)
    if size.scale_columns:
        block_k = min(block_k, size.scale_columns)
    if size.bits == 32:  # no tensor core takes them: each thread holds its rows and columns of a tile in registers
        block_k = 16
    return ProductConfig(
        persistent=persistent,
        block_m=block_m,
        block_n=block_n,
        block_k=block_k,
        group_m=8,
        num_warps=8 if persistent else 4,
        num_stages=_stages(size, target, (block_m, block_n * sections, block_k), persistent=persistent),
    )


def rows_of_tile(rows: int, slots: int, *, batch_invariant: bool = False) -> int:
    """Return into tiles of how many rows `rows` on `slots` are cut, for any product of them."""
    if batch_invariant:
        return _INVARIANT_ROWS
    mean_rows = -(-rows // slots)
    return min(max(1 << (mean_rows - 1).bit_length(), _SMALLEST_ROWS), _LARGEST_ROWS)


def every_size(size: ProductSize, target: GpuTarget) -> Iterator[ProductSize]:
    """Yield sizes for which `pick_config` makes every choice that it makes for any rows and up to `size.slots` slots.

    What counts is how many rows a slot has, in powers of two, and whether slots with a row fill the GPU.

    Example:
        128 slots of 1,536 outputs on 132 multiprocessors: 1, 6, 11 and 22 slots, with 1, 17, 33 and 65 rows each.
    """
    filling = (_filling(size, outputs, target) for outputs in _STREAMED_OUTPUTS)
    for slots in sorted({1, *(number for number in filling if number <= size.slots)}):
        for rows_a_slot in ROWS_A_SLOT:
            yield replace(size, rows=rows_a_slot * slots, slots=slots)


def _filling(size: ProductSize, block_n: int, target: GpuTarget) -> int:
    """Return how many slots must have rows so that tiles of `block_n` outputs occupy all multiprocessors."""
    return -(-_PROGRAMS_A_SM * target.num_sms // -(-size.outputs // block_n))


def most_tiles(num_rows: int, num_slots: int, block_m: int) -> int:
    """Return how many tiles of block_m rows there can be, however rows fall on slots.

    Example:
        9 rows on 4 slots in tiles of 4: counts 6, 1, 1, 1 make 5.
    """
    return (num_rows + min(num_rows, num_slots) * (block_m - 1)) // block_m


def _stages(size: ProductSize, target: GpuTarget, block: tuple[int, int, int], *, persistent: bool) -> int:
    """Return how many tiles are under way at once: what fits beside other programs of a multiprocessor."""
    block_m, block_n, block_k = block
    stage = block_k * (block_n * size.bits // 8 + block_m * 2)
    decoded = 0 if size.bits >= 16 else block_k * block_n * 2  # on its way into the instruction
    budget = target.shared_bytes // (1 if persistent else _PROGRAMS_A_SM) - decoded - _RESERVED
    return max(2, min(budget // stage, _MOST_STAGES))
