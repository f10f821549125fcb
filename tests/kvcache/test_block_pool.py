"""BlockPool: exact ids, refusals that change nothing, and books that balance after any sequence of calls."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from moewe.kvcache.block_pool import BlockPool, OutOfBlocks


def test_allocate_gives_lowest_first_then_what_came_back_last():
    pool = BlockPool(6)
    first, second = pool.allocate(2), pool.allocate(3)
    assert first.dtype == np.int32
    assert first.tolist() == [0, 1]
    assert second.tolist() == [2, 3, 4]
    pool.free(first)
    pool.check_invariants()
    assert pool.allocate(3).tolist() == [0, 1, 5]
    pool.check_invariants()
    assert (pool.num_free, pool.num_used) == (0, 6)


def test_allocate_refuses_more_than_free_and_changes_nothing():
    pool = BlockPool(3)
    pool.allocate(2)
    with pytest.raises(OutOfBlocks, match="2 blocks asked for, 1 of 3 are free"):
        pool.allocate(2)
    pool.check_invariants()
    assert pool.allocate(0).tolist() == []
    assert pool.allocate(1).tolist() == [2]


@pytest.mark.parametrize(
    "ids", [[0, 0], [2], [-1], [9], [0, 1, 2]], ids=["twice", "free", "negative", "outside", "mixed"]
)
def test_free_refuses_what_is_not_given_out_and_changes_nothing(ids: list[int]):
    pool = BlockPool(4)
    pool.allocate(2)
    with pytest.raises(ValueError, match="not all of them are in use"):
        pool.free(np.array(ids, np.int32))
    pool.check_invariants()
    assert pool.used_ids().tolist() == [0, 1]


def test_pool_of_nothing_is_refused():
    with pytest.raises(ValueError, match="num_blocks=0"):
        BlockPool(0)


class PoolMachine(RuleBasedStateMachine):
    """Two pools under the same calls stay equal; ids are never given out twice."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.twin = BlockPool(13), BlockPool(13)
        self.held: list[np.ndarray] = []

    @rule(n=st.integers(0, 15))
    def allocate(self, n: int) -> None:
        if n > self.pool.num_free:
            with pytest.raises(OutOfBlocks):
                self.pool.allocate(n)
            return
        ids = self.pool.allocate(n)
        assert ids.tolist() == self.twin.allocate(n).tolist()
        taken = {i for other in self.held for i in other.tolist()}
        assert taken.isdisjoint(ids.tolist())
        self.held.append(ids)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        ids = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.pool.free(ids)
        self.twin.free(ids)

    @invariant()
    def balanced(self) -> None:
        self.pool.check_invariants()
        held = sorted(i for ids in self.held for i in ids.tolist())
        assert self.pool.used_ids().tolist() == held
        assert self.pool.num_used == len(held)


PoolMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestPoolMachine = PoolMachine.TestCase
