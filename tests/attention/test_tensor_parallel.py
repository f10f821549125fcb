"""What joins the ranks of an attention replica: rows, sums in the order of the ranks, and what the first one says."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moewe.attention.tensor_parallel import HeadShare, TensorParallelGroup
from moewe.attention.tensor_parallel_metered import MeteredGroup
from moewe.attention.tensor_parallel_shm import ShmTensorParallelGroup, area_bytes, can_share, meet_at
from moewe.attention.tensor_parallel_threads import ThreadTensorParallelHub
from moewe.telemetry import ProgressBoard
from tests.support.rank_processes import run_rank_processes

WIDTH = 6
needs_order = pytest.mark.skipif(not can_share(), reason="this processor may let others see stores in another order")


def values(rank: int, num_rows: int, dtype: torch.dtype) -> torch.Tensor:
    """What `rank` brings along; large and small numbers, so that the order of a sum shows."""
    generator = torch.Generator().manual_seed(100 * num_rows + rank)
    return (torch.randn(num_rows, WIDTH, generator=generator) * 10.0**rank).to(dtype)


def run_ranks(hub: ThreadTensorParallelHub, work: Callable[[TensorParallelGroup], Any]) -> list[Any]:
    results: dict[int, Any] = {}

    def run(rank: int) -> None:
        try:
            results[rank] = work(hub.rank(rank))
        except RuntimeError as error:
            results[rank] = error
            hub.abort(f"rank {rank} ended")

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(hub.size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [results[rank] for rank in range(hub.size)]


def check_all(group: TensorParallelGroup, size: int, num_rows: int, dtype: torch.dtype) -> None:
    """Run each collective once and compare with what a loop over all ranks gives."""
    share = group.share
    all_values = [values(rank, num_rows, dtype) for rank in range(size)]
    total = torch.zeros(num_rows, WIDTH)
    for part in all_values:
        total = total + part.float()
    start, stop = share.row_range(num_rows)
    whole = values(99, num_rows, dtype)
    assert torch.equal(group.gather(whole[start:stop].clone(), num_rows), whole)
    assert torch.equal(group.reduce(all_values[share.rank]), total.to(dtype)[start:stop])
    means = [part[:, :2].float() for part in all_values]
    assert torch.equal(group.mean(means[share.rank]), sum(means[1:], means[0]) / size)
    told = torch.arange(5) if share.is_first else torch.zeros(5, dtype=torch.int64)
    assert group.first(told).tolist() == [0, 1, 2, 3, 4]
    row = WIDTH * dtype.itemsize
    others = (size - 1) * ((stop - start) * row + num_rows * 2 * 4 + (40 if share.is_first else 0))
    assert group.bytes_sent() == others + (num_rows - (stop - start)) * row
    assert group.bytes_sent() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_threads_join_rows_and_sums(size: int, dtype: torch.dtype) -> None:
    def work(group: TensorParallelGroup) -> None:
        for num_rows in (1, 2, 5, 12):
            check_all(group, size, num_rows, dtype)

    assert run_ranks(ThreadTensorParallelHub(size, timeout_s=30), work) == [None] * size


def test_a_metered_group_does_the_same_and_books_it_under_its_scope() -> None:
    def work(group: TensorParallelGroup) -> None:
        metered = MeteredGroup(group, "between")
        check_all(metered, 2, 5, torch.float32)
        assert metered.take()[1][:2] == [0, 0]
        rows = metered.share.own_rows(values(0, 5, torch.float32))
        metered.gather(rows, 5)
        num_bytes, seconds = metered.take()
        assert num_bytes == [0, 0, rows.nbytes] and seconds[2] > 0 and metered.take() == ([0, 0, 0], [0.0, 0.0, 0.0])

    assert run_ranks(ThreadTensorParallelHub(2, timeout_s=30), work) == [None] * 2


@needs_order
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 3])
def test_shared_memory_joins_as_threads_do(size: int, dtype: torch.dtype, tmp_path: Path) -> None:
    num_bytes = area_bytes(num_rows=12, width=WIDTH, itemsize=dtype.itemsize, num_slots=3)
    board = ProgressBoard(size)

    def work(threads: TensorParallelGroup) -> None:
        share = threads.share
        fd = meet_at(tmp_path / "attention", share, num_bytes, 30)
        group = ShmTensorParallelGroup(fd, share, num_bytes, board.rank(share.rank))
        for num_rows in (1, 2, 5, 12):
            check_all(group, size, num_rows, dtype)
        if share.is_first:
            with pytest.raises(RuntimeError, match="it was made for 4096"):
                group.mean(torch.ones(4097, 1))

    assert run_ranks(ThreadTensorParallelHub(size), work) == [None] * size
    assert (board.snapshot()[:, 1] >= 2 * 4 * 4).all(), "a collective gives two signs of life"


@needs_order
def test_memory_that_nobody_offers_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"did not offer memory for attention within 0\.05 s"):
        meet_at(tmp_path / "attention", HeadShare(1, 2), 100, 0.05)


def test_a_fast_rank_does_not_overtake_a_slow_one() -> None:
    """A thousand collectives without a pause: what was offered in one is never seen in another."""

    def work(group: TensorParallelGroup) -> list[int]:
        rank = group.share.rank
        return [int(group.reduce(torch.full((2, 1), float(turn + rank))).sum()) for turn in range(1000)]

    expected = [2 * turn + 1 for turn in range(1000)]
    assert run_ranks(ThreadTensorParallelHub(2, timeout_s=30), work) == [expected, expected]


def test_who_waits_for_a_rank_that_ended_is_told() -> None:
    def work(group: TensorParallelGroup) -> None:
        if group.share.rank == 1:
            raise RuntimeError("out of luck")
        group.mean(torch.ones(1, 1))

    first, second = run_ranks(ThreadTensorParallelHub(2), work)
    assert "rank 1 ended" in str(first) and "out of luck" in str(second)


def test_waiting_ends_after_a_time() -> None:
    with pytest.raises(RuntimeError, match=r"attention between threads broken: a rank did not come within 0\.05 s"):
        ThreadTensorParallelHub(2, timeout_s=0.05).rank(0).mean(torch.ones(1, 1))


def test_own_rows_are_all_rows_once() -> None:
    for size in (1, 2, 3, 8):
        for num_rows in (0, 1, 7, 8, 9):
            parts = [HeadShare(rank, size).own_rows(torch.arange(num_rows)) for rank in range(size)]
            assert torch.cat(parts).tolist() == list(range(num_rows))
            assert max(map(len, parts)) - min(map(len, parts)) <= 1
    with pytest.raises(AssertionError):
        HeadShare(2, 2)


CHILD = """
import sys
from pathlib import Path
import torch
from moewe.attention.tensor_parallel import HeadShare
from moewe.attention.tensor_parallel_distributed import DistributedTensorParallelGroup
from moewe.telemetry import ProgressBoard
from moewe.topologies.groups import destroy_group, init_group, make_subgroups
from tests.attention.test_tensor_parallel import check_all
rank = int(sys.argv[1])
world = init_group(rank=rank, world_size=4, store_path=Path(sys.argv[2]), device="cpu", timeout_s=60)
assert init_group(rank=rank, world_size=4, store_path=Path(sys.argv[2]), device="cpu", timeout_s=60) is world
own = make_subgroups([(0, 1), (2, 3)], rank=rank, timeout_s=60)[(0, 1) if rank < 2 else (2, 3)]
board = ProgressBoard(1)
group = DistributedTensorParallelGroup(own, HeadShare(rank % 2, 2), board.rank(0))
for dtype in (torch.float32, torch.bfloat16):
    for num_rows in (1, 2, 5):
        check_all(group, 2, num_rows, dtype)
destroy_group()
print(rank, own.size(), int(board.snapshot()[0, 1]))
"""


@pytest.mark.slow
@pytest.mark.spawn
def test_processes_join_as_threads_do(tmp_path: Path) -> None:
    ticks = 2 * 4 * 2 * 3  # before and after each of four collectives, two formats, three numbers of rows
    assert [said.strip() for said in run_rank_processes(CHILD, 4, tmp_path)] == [
        f"{rank} 2 {ticks}" for rank in range(4)
    ]
