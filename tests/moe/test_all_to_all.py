"""The exchange over torch.distributed between real processes, bit for bit against the reference."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp

from moewe.moe.wide_ep import AllToAllExchange, linear_placement
from moewe.telemetry import ProgressBoard
from moewe.topologies.groups import destroy_group, init_group
from tests.moe.test_exchange import check_rank
from tests.support.cases import ROUTING_CASES

pytestmark = pytest.mark.spawn


def run_rank(rank: int, num_ranks: int, store_path: str) -> None:
    """All cases of this number of ranks in one group, so that processes start once."""
    torch.set_num_threads(1)
    group = init_group(rank=rank, world_size=num_ranks, store_path=store_path, device="cpu", timeout_s=60)
    board = ProgressBoard(num_ranks)
    for case in ROUTING_CASES:
        if case.num_ranks == num_ranks:
            ranges = linear_placement(1, case.num_experts, num_ranks).slot_ranges
            exchange = AllToAllExchange(group, ranges, rank, board.rank(rank))
            before = board.snapshot()
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                check_rank(case, exchange, rank, dtype)
            assert (board.snapshot() - before).sum() > 0
    destroy_group()


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_all_to_all_equals_reference(num_ranks: int, tmp_path: Path) -> None:
    mp.spawn(run_rank, (num_ranks, str(tmp_path / "store")), nprocs=num_ranks)
