"""Exchanges over torch.distributed between real processes, bit for bit against the reference."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp

from moewe.moe.wide_ep.exchanges import StepwiseExchange
from moewe.moe.wide_ep.exchanges.joining import join_over_links, link_members
from moewe.moe.wide_ep.exchanges.links import DistributedLink, LoneLink
from moewe.telemetry import ProgressBoard
from moewe.topologies.exchange_choice import OVER_LINKS
from moewe.topologies.groups import destroy_group, init_group, make_subgroups
from tests.support.cases import ROUTING_CASES
from tests.support.exchanges import check_in_halves, check_rank, shape_of

pytestmark = pytest.mark.spawn


def run_rank(rank: int, num_ranks: int, store_path: str) -> None:
    """All cases of this number of ranks in one group, so that processes start once."""
    torch.set_num_threads(1)
    init_group(rank=rank, world_size=num_ranks, store_path=Path(store_path), device="cpu", timeout_s=60)
    board = ProgressBoard(num_ranks)
    cases = [case for case in ROUTING_CASES if case.num_ranks == num_ranks]
    sizes = (num_ranks - num_ranks // 2, num_ranks // 2)
    members = {ranks for name in OVER_LINKS for ranks in link_members(name, shape_of(cases[0], sizes))}
    groups = make_subgroups(sorted(members), rank=rank, timeout_s=60)
    for case in cases:
        shape = shape_of(case, sizes)
        for name in OVER_LINKS:
            exchange = join_over_links(
                name,
                shape,
                rank,
                lambda ranks: DistributedLink(groups[tuple(ranks)]) if len(ranks) > 1 else LoneLink(),
                progress=board.rank(rank),
            )
            before = board.snapshot()
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                check_rank(case, StepwiseExchange([exchange]), rank, dtype, shape=shape)
            for early in (False, True):  # several collectives are under way at a time
                check_in_halves(
                    case, exchange, rank, shape, cuts=[(len(ids) + 1) // 2 for ids in case.ids], early=early
                )
            assert name == "padded" or (board.snapshot() - before).sum() > 0
    destroy_group()


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_exchanges_between_processes_equal_the_reference(num_ranks: int, tmp_path: Path) -> None:
    mp.spawn(run_rank, (num_ranks, str(tmp_path / "store")), nprocs=num_ranks)
