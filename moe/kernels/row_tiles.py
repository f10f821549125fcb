"""Rows of experts, sorted by slot, cut into tiles on a GPU: products walk over them, and slots without rows have none.

Not products (experts.py) and not how large tiles are (expert_tiles.py). Whoever sorts rows cuts them in the same launch
(permute.py, route_permute.py); rows that came sorted are cut here.
Letters: S slots, M rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...native.gpu import Launch
from .expert_tiles import most_tiles

_MOST_PROGRAMS = 16
_FEWEST_SLOTS = 32  # that a kernel is compiled for: a warp takes as long for fewer


class RowTiles(NamedTuple):
    """Tiles of rows.

    Attributes:
        tiles: [max_tiles, 3] i32, of each tile its slot, its first row, and the end of the slot's rows; behind the last
            tile slots are -1. None: every slot has `slot_rows` rows, from which a program finds its tile.
        num_tiles: [1] i32, or None.
        block_m: rows of a tile.
        max_tiles: what there can be at most, however rows fall on slots.
        slot_rows: of every slot; 0 where `tiles` say it.
    """

    tiles: torch.Tensor | None
    num_tiles: torch.Tensor | None
    block_m: int
    max_tiles: int
    slot_rows: int = 0


def empty_tiles(num_rows: int, num_slots: int, block_m: int, device: torch.device) -> RowTiles:
    """Return memory for the tiles of `num_rows` rows, not filled."""
    max_tiles = most_tiles(num_rows, num_slots, block_m)
    return RowTiles(
        tiles=torch.empty(max_tiles, 3, dtype=torch.int32, device=device),
        num_tiles=torch.empty(1, dtype=torch.int32, device=device),
        block_m=block_m,
        max_tiles=max_tiles,
    )


def even_tiles(num_rows: int, num_slots: int, block_m: int) -> RowTiles:
    """Return the tiles of rows of which every slot has as many: nothing is launched for them.

    Example:
        6 rows on 2 slots in tiles of 2: (0, 0, 3), (0, 2, 3), (1, 3, 6), (1, 5, 6).
    """
    slot_rows, rest = divmod(num_rows, num_slots)
    assert not rest, (num_rows, num_slots)
    max_tiles = num_slots * -(-slot_rows // block_m)
    return RowTiles(tiles=None, num_tiles=None, block_m=block_m, max_tiles=max_tiles, slot_rows=slot_rows)


def tiles_launch(counts: torch.Tensor, num_rows: int, block_m: int) -> tuple[Launch, RowTiles]:
    """Return the launch that cuts rows, and where their tiles will stand.

    Args:
        counts: [S] i64, rows of each slot.
        num_rows: M, at least their sum.
        block_m: rows of a tile.

    Example:
        counts [3, 0, 1] in tiles of 2: (0, 0, 3), (0, 2, 3), (2, 3, 4).
    """
    from .row_tiles_triton import tiles_kernel

    num_slots = len(counts)
    slots = padded_slots(num_slots)
    made = empty_tiles(num_rows, num_slots, block_m, counts.device)
    launch = Launch(
        kernel=tiles_kernel,
        grid=(min(-(-made.max_tiles // slots), _MOST_PROGRAMS),),
        arguments={
            "counts": counts, "tiles": made.tiles, "num_tiles": made.num_tiles, "num_slots": num_slots,
            "max_tiles": made.max_tiles, "block_m": block_m,
        },
        constants={"SLOTS": slots},
    )  # fmt: skip
    return launch, made


def padded_slots(num_slots: int) -> int:
    """Return the power of two of slots that kernels hold."""
    return max(_FEWEST_SLOTS, 1 << (num_slots - 1).bit_length())
