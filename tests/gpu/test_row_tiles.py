"""`tiles_launch` and tiles cut while sorting, against a loop."""

from __future__ import annotations

import pytest
import torch

from moewe.moe.kernels.permute import triton_permute
from moewe.moe.kernels.row_tiles import empty_tiles, tiles_launch
from tests.support.cases import random_ids
from tests.support.numerics import assert_same
from tests.support.routed import tiles_reference


def check(cut: tuple[torch.Tensor, torch.Tensor, int], counts: list[int], block_m: int) -> None:
    want = tiles_reference(counts, block_m)
    assert cut[1].tolist() == [len(want)] and cut[2] == block_m
    assert cut[0][: len(want)].tolist() == want
    assert set(cut[0][len(want) :, 0].tolist()) <= {-1}


@pytest.mark.parametrize("counts", [[3, 0, 1], [0, 0], [33], [1] * 5, [0, 40, 0, 7, 16, 0], [0] * 9 + [129]])
@pytest.mark.parametrize("block_m", [2, 16])
def test_slots_are_cut_into_tiles(counts: list[int], block_m: int) -> None:
    launch, cut = tiles_launch(torch.tensor(counts), sum(counts) + 9, block_m)
    launch.run()
    check(cut, counts, block_m)


@pytest.mark.parametrize("num_tokens", [0, 3, 43, 190])  # none, one block of choices, some, more than all count
def test_sorting_cuts_as_well(num_tokens: int) -> None:
    ids = random_ids(num_tokens, 4, 16) if num_tokens else torch.empty(0, 4, dtype=torch.int32)
    ids[::3, 1] = -1
    cut = empty_tiles(ids.numel(), 16, 4, ids.device)
    permuted = triton_permute(ids, 16, cut=cut)
    check(cut, permuted.tokens_per_slot.tolist(), 4)
    assert_same(permuted.rows, triton_permute(ids, 16).rows)
