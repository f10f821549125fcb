"""The running batch with windows: stale entries stay out of everything that a step does or cleans up."""

import msgspec
import numpy as np
import pytest

from moewe.runtime.plan import FINISH_ERROR, RankPlan, pack
from moewe.runtime.ranks.batch import WorkerBatch
from tests.runtime.test_worker_batch import admit, chunk, step

BLOCK = 4


def make_batch(*groups):
    return WorkerBatch(num_slots=3, max_model_len=64, block_size=BLOCK, groups=groups)


def grant(*rows):
    return pack(np.array(rows))


def begun():
    """Slot 1 with 10 tokens in KV: blocks 5, 6, 7 of the full group, 0, 1, 2 of a window of 4."""
    batch = make_batch(("full", 0), ("window", 4))
    grants = [(0, 1, i, 5 + i) for i in range(3)] + [(1, 1, i, i) for i in range(3)]
    plan = RankPlan(admitted=(admit(1, range(10)),), grants=grant(*grants), chunks=(chunk(1, 0, 10, True),))
    return batch, *step(batch, plan)


def test_every_group_has_its_own_places_and_tables():
    batch, rows, _ = begun()
    assert [own.slot_mapping.tolist()[:5] for own in rows.groups] == [[20, 21, 22, 23, 24], [0, 1, 2, 3, 4]]
    assert [own.segments[0].block_table.tolist() for own in rows.groups] == [[5, 6, 7], [0, 1, 2]]
    assert batch.blocks_of(1, 0).tolist() == [5, 6, 7]
    assert batch.blocks_of(1, 1).tolist() == [0, 1, 2], "all that the chunk has written, until the next plan"


def test_blocks_behind_the_window_belong_to_others_from_the_next_plan_on():
    batch, *_ = begun()
    other = RankPlan(
        admitted=(admit(0, [9], sequence_id=7),),
        grants=grant((0, 0, 0, 8), (1, 0, 0, 0)),  # row 10 sees tokens from 7 on: block 0 of the window was freed
        chunks=(chunk(0, 0, 1, True),),
        num_decodes=1,
    )
    rows, _ = step(batch, other)
    assert batch.blocks_of(1, 0).tolist() == [5, 6, 7]
    assert batch.blocks_of(1, 1).tolist() == [1, 2]
    assert [own.slot_mapping.tolist() for own in rows.groups] == [[30, 32], [10, 0]]
    assert rows.groups[1].decode_tables[0, 1:].tolist() == [1, 2]


def test_an_ill_sequence_names_only_what_it_held_while_it_ran():
    batch, *_ = begun()
    plan = RankPlan(num_decodes=1)
    _, flags = step(batch, plan, healthy=np.arange(3) != 1)
    assert flags == [FINISH_ERROR]
    assert batch.blocks_of(1, 1).tolist() == [1, 2]


def test_a_sequence_that_ended_unseen_may_lose_blocks_to_others():
    batch, *_ = begun()
    step(batch, RankPlan(num_decodes=1), healthy=np.arange(3) != 1)
    taken = RankPlan(
        admitted=(admit(0, [9], sequence_id=7),),
        grants=grant((0, 0, 0, 8), (1, 0, 0, 1)),
        chunks=(chunk(0, 0, 1, True),),
    )
    rows, _ = step(batch, taken)  # the scheduler believes that row 12 is next, which sees nothing of block 1
    assert rows.row_slots.tolist() == [0]
    clash = RankPlan(
        admitted=(admit(2, [9], sequence_id=8),),
        grants=grant((0, 2, 0, 5), (1, 2, 0, 6)),
        chunks=(chunk(2, 0, 1, True),),
    )
    with pytest.raises(AssertionError, match="belongs to two sequences"):
        step(batch, clash)  # a full group gives nothing back before the slot is released


def test_a_snapshot_brings_only_what_is_held():
    batch = make_batch(("chunk", 8), ("window", 4))
    resumed = msgspec.structs.replace(admit(2, range(11)), num_computed_tokens=10)
    grants = grant((0, 2, 2, 4), (1, 2, 1, 3), (1, 2, 2, 9))
    rows, _ = step(batch, RankPlan(admitted=(resumed,), grants=grants, chunks=(chunk(2, 10, 1, True),)), snapshot=True)
    assert [own.slot_mapping.tolist() for own in rows.groups] == [[18], [38]]
    assert [batch.blocks_of(2, group).tolist() for group in range(2)] == [[4], [3, 9]]


def test_a_row_without_a_block_in_one_group_is_an_error():
    batch = make_batch(("full", 0), ("window", 4))
    plan = RankPlan(admitted=(admit(0, [1]),), grants=grant((0, 0, 0, 0)), chunks=(chunk(0, 0, 1, True),))
    with pytest.raises(AssertionError, match="no KV block"):
        step(batch, plan)


def test_what_kv_is_in_use_is_known_by_group():
    batch, *_ = begun()
    assert [batch.kv_in_use(group) for group in (0, 1)] == [(3, 10), (3, 10)]
    step(batch, RankPlan(num_decodes=1))  # row 10 sees tokens from 7 on: a block of the window is somebody else's
    batch.check_invariants()
    assert [batch.kv_in_use(group) for group in (0, 1)] == [(3, 11), (2, 7)]
    step(batch, RankPlan(grants=grant((0, 1, 3, 8), (1, 1, 3, 3)), num_decodes=1))  # granted ahead
    assert [batch.kv_in_use(group) for group in (0, 1)] == [(4, 12), (2, 4)]
    batch.apply(RankPlan(released=pack(np.array([1]))))
    batch.check_invariants()
    assert [batch.kv_in_use(group) for group in (0, 1)] == [(0, 0), (0, 0)]
