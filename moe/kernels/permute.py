"""Choices of one rank sorted by slot on a GPU, with counts that stay there: what exchanges/pairs.py does with torch.

Not routing and not an exchange. The reference is wide_ep/exchanges/reference.py `dispatch_reference`.
Letters: T tokens, K top-k, N = T * K choices, S slots, M rows (choices that are not dropped).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...native.gpu import Launch
from .row_tiles import RowTiles, padded_slots

_CHOICES = 128  # of a program, which compares each with each
_MOST_COUNTED = 4  # blocks that every program counts itself: one launch less
_BLOCKS = 16  # whose counts are added up at once


class Permuted(NamedTuple):
    """Where rows of experts come from and go to.

    Attributes:
        row_tokens: [N] i32, the token of each of the first M rows; rows stand by slot, then token, then k. What is
            behind them is not written.
        rows: [T, K] i32, the row of each choice, -1 for a dropped one.
        tokens_per_slot: [S] i64.
    """

    row_tokens: torch.Tensor
    rows: torch.Tensor
    tokens_per_slot: torch.Tensor


def triton_permute(
    slot_ids: torch.Tensor, num_slots: int, counts: torch.Tensor | None = None, cut: RowTiles | None = None
) -> Permuted:
    """Sort choices by slot; those of one slot stay in order.

    Args:
        slot_ids: [T, K] i32 below `num_slots`, -1 for a dropped choice.
        num_slots: S.
        counts: [S] i64, what becomes `tokens_per_slot`; None makes it.
        cut: filled with the tiles of the M rows, see `empty_tiles`.

    Example:
        ids [[1, 0], [1, -1]] and S = 2: row_tokens [0, 0, 1, ..], rows [[1, 0], [2, -1]], tokens_per_slot [1, 2].
    """
    launches, permuted = permute_launches(slot_ids, num_slots, counts, cut)
    for launch in launches:
        launch.run()
    return permuted


def permute_launches(
    slot_ids: torch.Tensor, num_slots: int, counts: torch.Tensor | None = None, cut: RowTiles | None = None
) -> tuple[list[Launch], Permuted]:
    """Return the launches behind `triton_permute`, in order, and where its results will stand."""
    from .permute_triton import count_kernel, place_kernel

    assert slot_ids.dtype == torch.int32 and slot_ids.is_contiguous(), slot_ids.dtype
    num_choices, device = slot_ids.numel(), slot_ids.device
    if counts is None:
        counts = torch.empty(num_slots, dtype=torch.int64, device=device)
    assert counts.shape == (num_slots,) and counts.dtype == torch.int64 and counts.is_contiguous(), counts.shape
    permuted = empty_permuted(slot_ids, counts)
    slots = padded_slots(num_slots)
    blocks = max(1, -(-num_choices // _CHOICES))  # one at least: counts of nothing are zeros
    launches, block_counts = [], None
    if blocks > _MOST_COUNTED:
        block_counts = torch.empty(blocks, slots, dtype=torch.int32, device=device)
        launches.append(
            Launch(
                kernel=count_kernel,
                grid=(blocks,),
                arguments={"slot_ids": slot_ids, "block_counts": block_counts, "num_choices": num_choices},
                constants={"CHOICES": _CHOICES, "SLOTS": slots},
            )
        )
    place = Launch(
        kernel=place_kernel,
        grid=(blocks,),
        arguments={
            "slot_ids": slot_ids, "block_counts": block_counts, "row_tokens": permuted.row_tokens,
            "rows": permuted.rows, "tokens_per_slot": permuted.tokens_per_slot, "tiles": cut and cut.tiles,
            "num_tiles": cut and cut.num_tiles, "num_choices": num_choices, "num_slots": num_slots,
            "num_blocks": blocks, "max_tiles": cut.max_tiles if cut else 0,
            "block_m": cut.block_m if cut else 0,
        },
        constants={"CHOICES": _CHOICES, "SLOTS": slots, "BLOCKS": _BLOCKS, "TOP_K": slot_ids.shape[1]},
    )  # fmt: skip
    return [*launches, place], permuted


def empty_permuted(slot_ids: torch.Tensor, counts: torch.Tensor) -> Permuted:
    """Return memory for choices like `slot_ids` [T, K], not filled; `counts` is part of it."""
    return Permuted(
        row_tokens=torch.empty(slot_ids.numel(), dtype=torch.int32, device=slot_ids.device),
        rows=torch.empty(slot_ids.shape, dtype=torch.int32, device=slot_ids.device),
        tokens_per_slot=counts,
    )
