"""The exchange through shared memory against the reference, bit for bit (P-EP-02, P-EP-03, P-EP-05)."""

from __future__ import annotations

import mmap
import os
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moewe.moe.wide_ep import Exchange, ShmExchange, ShmShape, linear_placement
from moewe.moe.wide_ep.exchanges.shm import meet_at
from moewe.topologies.host_memory import create_memory
from tests.support.cases import RoutingCase, drawn_cases, routing_cases
from tests.support.exchanges import check_rank
from tests.support.native import needs_native

pytestmark = needs_native


def shape_of(case: RoutingCase, dtype: torch.dtype, width: int) -> ShmShape:
    return ShmShape(
        slot_ranges=linear_placement(1, case.num_experts, case.num_ranks).slot_ranges,
        capacity=max(len(ids) for ids in case.ids) + 1,
        top_k=case.ids[0].shape[1],
        width=width,
        dtype=dtype,
    )


@contextmanager
def memory(shape: ShmShape) -> Iterator[int]:
    fd = create_memory("exchange", shape.offsets()[-1])
    try:
        yield fd
    finally:
        os.close(fd)


def run(shape: ShmShape, work: Callable[[int, Exchange], None]) -> None:
    """Call `work(rank, exchange)` on a thread a rank, all over one memory."""
    failures: list[BaseException] = []

    def rank(number: int, fd: int) -> None:
        try:
            work(number, ShmExchange(fd, shape, number))
        except BaseException as failure:
            failures.append(failure)

    with memory(shape) as fd:
        threads = [threading.Thread(target=rank, args=(i, fd), daemon=True) for i in range(shape.num_ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert failures or not thread.is_alive()
    if failures:
        raise failures[0]


@routing_cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equals_reference(case: RoutingCase, dtype: torch.dtype) -> None:
    run(shape_of(case, dtype, 24), lambda rank, exchange: check_rank(case, exchange, rank, dtype))


@settings(max_examples=60, deadline=None)
@given(case=drawn_cases(), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_random_ids_equal_reference(case: RoutingCase, dtype: torch.dtype) -> None:
    run(shape_of(case, dtype, 3), lambda rank, exchange: check_rank(case, exchange, rank, dtype, width=3))


def test_ranks_meet_many_times_over() -> None:
    """Hundreds of layers through the same memory: no rank reads what another has not written, or no longer."""
    shape = ShmShape(slot_ranges=((0, 1), (1, 2), (2, 3)), capacity=5, top_k=2, width=8, dtype=torch.float32)

    def work(rank: int, exchange: Exchange) -> None:
        for step in range(300):
            num_tokens = (step + rank) % 5
            x = torch.full((num_tokens, 8), float(step * 10 + rank))
            ids = torch.tensor([[(t + step) % 3, (t + step + 1) % 3] for t in range(num_tokens)], dtype=torch.int32)
            arrived = exchange.dispatch(x, ids.reshape(num_tokens, 2))
            assert ((arrived.rows[:, 0] - step * 10).long() >= 0).all() and (arrived.rows < step * 10 + 3).all()
            out = exchange.combine(arrived.rows * 2, torch.ones(num_tokens, 2), arrived.handle)
            assert torch.equal(out, x * 4)

    run(shape, work)


def test_an_id_that_names_no_slot_is_a_hard_error() -> None:
    shape = ShmShape(slot_ranges=((0, 8),), capacity=4, top_k=2, width=4, dtype=torch.float32)
    with memory(shape) as fd:
        exchange = ShmExchange(fd, shape, 0)
        with pytest.raises(RuntimeError, match="physical id 8 of rank 0 names no expert slot; there are 8"):
            exchange.dispatch(torch.ones(1, 4), torch.tensor([[0, 8]], dtype=torch.int32))
        with pytest.raises(RuntimeError, match=r"5 tokens on rank 0; .* max_num_batched_tokens=4"):
            exchange.dispatch(torch.ones(5, 4), torch.zeros(5, 2, dtype=torch.int32))


@pytest.mark.parametrize("tokens", [5, -1])
def test_more_tokens_of_another_rank_than_there_is_room_for_are_a_hard_error(tokens: int) -> None:
    shape = ShmShape(slot_ranges=((0, 4), (4, 8)), capacity=4, top_k=2, width=4, dtype=torch.float32)
    with memory(shape) as fd:
        os.pwrite(fd, struct.pack("<3I4xq", 1, 0, 0, tokens), 128)  # the line of rank 1
        exchange = ShmExchange(fd, shape, 0)
        with pytest.raises(RuntimeError, match=rf"{tokens} tokens on rank 1; .* max_num_batched_tokens=4"):
            exchange.dispatch(torch.ones(1, 4), torch.tensor([[0, 7]], dtype=torch.int32))


def test_a_rank_looks_long_for_others_only_where_all_have_cores() -> None:
    shape = ShmShape(slot_ranges=((0, 1),), capacity=1, top_k=1, width=1, dtype=torch.float32)
    with memory(shape) as fd:
        shared, alone = (ShmExchange(fd, shape, 0, has_cores=has_cores).group.spins for has_cores in (False, True))
    assert shared < 100 < alone


def test_buffers_are_what_rows_have_come_to() -> None:
    """A page a part at first, of room for 8 MiB; then pages that hold 512 rows of 4 KiB and their answers."""
    shape = ShmShape(slot_ranges=((0, 2),), capacity=1024, top_k=1, width=1024, dtype=torch.float32)
    with memory(shape) as fd:
        exchange = ShmExchange(fd, shape, 0)
        before = exchange.buffer_bytes
        assert before <= 4 * mmap.PAGESIZE + 4 * 1024
        arrived = exchange.dispatch(torch.ones(512, 1024), torch.zeros(512, 1, dtype=torch.int32))
        exchange.combine(arrived.rows, torch.ones(512, 1), arrived.handle)
        rows = 512 * 4096
        assert 2 * rows <= exchange.buffer_bytes - before <= 2 * rows + 4 * mmap.PAGESIZE


def test_outputs_can_be_written_in_place() -> None:
    shape = ShmShape(slot_ranges=((0, 2),), capacity=4, top_k=1, width=4, dtype=torch.float32)
    with memory(shape) as fd:
        exchange = ShmExchange(fd, shape, 0)
        arrived = exchange.dispatch(torch.ones(3, 4), torch.tensor([[1], [0], [1]], dtype=torch.int32))
        out = exchange.output(arrived.num_rows)
        out.copy_(torch.arange(3.0)[:, None].expand(3, 4))
        combined = exchange.combine(out, torch.ones(3, 1), arrived.handle)
        assert combined[:, 0].tolist() == [1.0, 0.0, 2.0]


def test_ranks_find_the_memory_of_rank_0(tmp_path: Path) -> None:
    shape = ShmShape(slot_ranges=((0, 1), (1, 2)), capacity=4, top_k=1, width=4, dtype=torch.float32)
    with pytest.raises(RuntimeError, match=r"the first rank did not offer memory for exchange within 0\.05 s"):
        meet_at(tmp_path / "memory", shape, 1, timeout_s=0.05)
    found: list[int] = []
    waiting = threading.Thread(target=lambda: found.append(meet_at(tmp_path / "memory", shape, 1, timeout_s=30)))
    waiting.start()
    offered = meet_at(tmp_path / "memory", shape, 0, timeout_s=30)
    waiting.join(30)
    os.pwrite(offered, b"seen", 0)
    assert os.pread(found[0], 4, 0) == b"seen" and os.fstat(found[0]).st_size == shape.offsets()[-1]
    os.close(offered)
    os.close(found[0])
