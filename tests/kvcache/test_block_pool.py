"""BlockPool: exact ids, refusals that change nothing, and books that balance after any sequence of calls."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from moewe.kvcache.block_pool import BlockPool, OutOfBlocks


def on(rank: int, n: int) -> np.ndarray:
    return np.full(n, rank)


def test_allocate_gives_lowest_first_then_what_came_back_last():
    pool = BlockPool(6)
    first, second = pool.allocate(on(0, 2)), pool.allocate(on(0, 3))
    assert first.dtype == np.int32
    assert first.tolist() == [0, 1]
    assert second.tolist() == [2, 3, 4]
    pool.free(on(0, 2), first)
    pool.check_invariants()
    assert pool.allocate(on(0, 3)).tolist() == [0, 1, 5]
    pool.check_invariants()
    assert (pool.num_free.tolist(), pool.num_used.tolist()) == ([0], [6])


def test_every_rank_has_blocks_of_its_own():
    pool = BlockPool(4, num_ranks=3)
    assert pool.allocate(np.array([0, 0, 2])).tolist() == [0, 1, 0]
    pool.free(np.array([0, 0, 2]), np.array([1, 0, 0], np.int32))
    assert pool.allocate(np.array([0, 1, 1, 2, 2])).tolist() == [1, 0, 1, 0, 1]
    assert [pool.used_ids(rank).tolist() for rank in range(3)] == [[1], [0, 1], [0, 1]]
    assert (pool.num_free.tolist(), pool.is_whole()) == ([3, 2, 2], False)
    with pytest.raises(ValueError, match="not all of them are in use"):
        pool.free(np.array([0]), np.array([0], np.int32))  # rank 1 holds its block 0, rank 0 does not
    pool.check_invariants()


def test_allocate_refuses_more_than_free_and_changes_nothing():
    pool = BlockPool(3, num_ranks=2)
    pool.allocate(on(1, 2))
    with pytest.raises(OutOfBlocks, match="2 blocks asked for on rank 1, 1 of 3 are free"):
        pool.allocate(np.array([0, 1, 1]))
    pool.check_invariants()
    assert pool.allocate(on(1, 0)).tolist() == []
    assert pool.allocate(on(1, 1)).tolist() == [2]
    assert pool.num_free.tolist() == [3, 0]


@pytest.mark.parametrize(
    "ids", [[0, 0], [2], [-1], [9], [0, 1, 2]], ids=["twice", "free", "negative", "outside", "mixed"]
)
def test_free_refuses_what_is_not_given_out_and_changes_nothing(ids: list[int]):
    pool = BlockPool(4)
    pool.allocate(on(0, 2))
    with pytest.raises(ValueError, match="not all of them are in use"):
        pool.free(on(0, len(ids)), np.array(ids, np.int32))
    pool.check_invariants()
    assert pool.used_ids().tolist() == [0, 1]


def test_pool_of_nothing_is_refused():
    with pytest.raises(ValueError, match="num_blocks=0"):
        BlockPool(0)


class PoolMachine(RuleBasedStateMachine):
    """Three ranks at once give what three pools of one rank give; ids are never given out twice."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.alone = BlockPool(13, num_ranks=3), [BlockPool(13) for _ in range(3)]
        self.held: list[list[np.ndarray]] = [[], [], []]

    @rule(counts=st.tuples(*[st.integers(0, 8)] * 3))
    def allocate(self, counts: tuple[int, ...]) -> None:
        ranks = np.repeat(np.arange(3), counts)
        if (np.array(counts) > self.pool.num_free).any():
            with pytest.raises(OutOfBlocks):
                self.pool.allocate(ranks)
            return
        ids = self.pool.allocate(ranks)
        for rank, n in enumerate(counts):
            own = ids[ranks == rank]
            assert own.tolist() == self.alone[rank].allocate(on(0, n)).tolist()
            assert {i for other in self.held[rank] for i in other.tolist()}.isdisjoint(own.tolist())
            if n:
                self.held[rank].append(own)

    @precondition(lambda self: any(self.held))
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        freed = []
        for rank, held in enumerate(self.held):
            if held and data.draw(st.booleans()):
                freed.append((rank, held.pop(data.draw(st.integers(0, len(held) - 1)))))
                self.alone[rank].free(on(0, len(freed[-1][1])), freed[-1][1])
        if freed:
            self.pool.free(np.concatenate([on(rank, len(ids)) for rank, ids in freed]),
                           np.concatenate([ids for _, ids in freed]))  # fmt: skip

    @invariant()
    def balanced(self) -> None:
        self.pool.check_invariants()
        for rank, held in enumerate(self.held):
            ids = sorted(i for part in held for i in part.tolist())
            assert self.pool.used_ids(rank).tolist() == ids
            assert int(self.pool.num_used[rank]) == len(ids)


PoolMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestPoolMachine = PoolMachine.TestCase
