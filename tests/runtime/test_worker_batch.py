"""The running batch of a rank: deltas, rows, verdicts, and random plans against a plain per-token model."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moewe.runtime.plan import (
    FINISH_ERROR,
    FINISH_LENGTH,
    FINISH_NONE,
    FINISH_STOP,
    Admission,
    Chunk,
    RankPlan,
    SamplingState,
    pack,
)
from moewe.runtime.ranks.batch import WorkerBatch

BLOCK = 4


def make_batch(num_slots=4, max_model_len=64):
    return WorkerBatch(num_slots=num_slots, max_model_len=max_model_len, block_size=BLOCK)


def admit(slot, tokens, *, sequence_id=100, max_length=64, **sampling):
    state = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "seed": 0, "num_logprobs": -1, "eos_token_ids": ()}
    return Admission(
        slot=slot,
        sequence_id=sequence_id,
        tokens=pack(np.asarray(tokens)),
        max_length=max_length,
        sampling=SamplingState(**{**state, **sampling}),
    )


def grant(*rows):
    return pack(np.array([(0, *row) for row in rows]))


def chunk(slot, start, num_tokens, samples):
    return Chunk(slot=slot, start=start, num_tokens=num_tokens, samples=samples)


def step(batch, plan, token=1, healthy=None, **kwargs):
    batch.apply(plan, **kwargs)
    rows = batch.rows(plan.chunks, plan.held)
    tokens = np.full(rows.sample_slots.size, token)
    flags = batch.commit(rows, tokens, healthy).flags
    batch.check_invariants()
    return rows, flags.tolist()


def started(**admission):
    batch = make_batch()
    plan = RankPlan(
        admitted=(admit(2, [5, 6, 7, 8, 9], **admission),),
        grants=grant((2, 0, 10), (2, 1, 3)),
        chunks=(chunk(2, 0, 5, True),),
    )
    return batch, *step(batch, plan, token=50)


def test_a_whole_prompt_in_one_chunk():
    _, rows, flags = started()
    assert rows.input_ids.tolist() == [5, 6, 7, 8, 9]
    assert rows.positions.tolist() == [0, 1, 2, 3, 4]
    assert rows.groups[0].slot_mapping.tolist() == [40, 41, 42, 43, 12]
    assert rows.segments[0].block_table.tolist() == [10, 3]
    assert (rows.sample_rows.tolist(), rows.sample_slots.tolist(), flags) == ([4], [2], [FINISH_NONE])
    assert rows.row_slots.tolist() == [2] * 5


def test_a_sampled_chunk_decodes_from_the_next_step_on():
    batch, *_ = started()
    assert batch.sampling_rows(np.array([2])).position.tolist() == [6]
    rows, _ = step(batch, RankPlan(num_decodes=1), token=51)
    assert (rows.input_ids.tolist(), rows.positions.tolist(), rows.groups[0].slot_mapping.tolist()) == ([50], [5], [13])
    assert (rows.decode_lengths.tolist(), rows.groups[0].decode_tables.tolist()) == ([6], [[10, 3]])
    rows, _ = step(batch, RankPlan(num_decodes=1))
    assert rows.input_ids.tolist() == [51]


def test_decodes_come_first_and_a_chunk_may_leave_its_prompt_open():
    batch, *_ = started()
    plan = RankPlan(
        admitted=(admit(0, range(20, 30), sequence_id=7),), grants=grant((0, 0, 1)), chunks=(chunk(0, 0, 3, False),)
    )
    rows, flags = step(batch, plan, token=52)
    assert rows.input_ids.tolist() == [50, 20, 21, 22]
    assert (rows.sample_rows.tolist(), rows.sample_slots.tolist(), len(flags)) == ([0], [2], 1)
    assert (rows.segments[0].row_start, rows.segments[0].num_computed_tokens) == (1, 0)
    rows, _ = step(batch, RankPlan(grants=grant((0, 1, 2), (0, 2, 4)), chunks=(chunk(0, 3, 7, True),)))
    assert rows.input_ids.tolist() == [52, 23, 24, 25, 26, 27, 28, 29]
    assert rows.groups[0].slot_mapping.tolist()[1:] == [7, 8, 9, 10, 11, 16, 17]
    assert rows.sample_rows.tolist() == [0, 7]


@pytest.mark.parametrize(
    ("admission", "token", "flag"),
    [
        ({"eos_token_ids": (49, 50)}, 50, FINISH_STOP),
        ({"max_length": 6}, 50, FINISH_LENGTH),
        ({"max_length": 6, "eos_token_ids": (50,)}, 50, FINISH_STOP),
        ({"eos_token_ids": (51,)}, 50, FINISH_NONE),
    ],
    ids=["stop", "length", "stop wins", "neither"],
)
def test_a_finished_sequence_runs_no_more_rows_though_nobody_said_so(admission, token, flag):
    batch, _, flags = started(**admission)
    assert flags == [flag]
    rows, _ = step(batch, RankPlan(num_decodes=1))
    assert rows.num_rows == (1 if flag == FINISH_NONE else 0)
    assert batch.num_running == (1 if flag == FINISH_NONE else 0)


def test_unhealthy_sequences_end_even_within_their_prompt():
    batch = make_batch()
    healthy = np.array([True, False, True, True])
    plan = RankPlan(
        admitted=(admit(1, range(9)), admit(2, [3], sequence_id=101)),
        grants=grant((1, 0, 0), (2, 0, 5)),
        chunks=(chunk(1, 0, 4, False), chunk(2, 0, 1, True)),
    )
    _, flags = step(batch, plan, healthy=healthy)
    assert flags == [FINISH_NONE]
    rows, flags = step(
        batch, RankPlan(grants=grant((1, 1, 6)), chunks=(chunk(1, 4, 4, False),)), healthy=~(np.arange(4) == 2)
    )
    assert (rows.num_rows, flags) == (1, [FINISH_ERROR])
    assert batch.blocks_of(1).tolist() == [0, 6]


def test_a_slot_is_released_and_taken_again_in_one_plan():
    batch, *_ = started()
    plan = RankPlan(
        released=pack(np.array([2])),
        admitted=(admit(2, [1], sequence_id=101),),
        grants=grant((2, 0, 9)),
        chunks=(chunk(2, 0, 1, True),),
    )
    rows, _ = step(batch, plan)
    assert (rows.input_ids.tolist(), rows.groups[0].slot_mapping.tolist(), rows.decode_slots.size) == ([1], [36], 0)
    assert batch.blocks_of(2).tolist() == [9]


def test_a_snapshot_forgets_everything_first():
    batch, *_ = started()
    plan = RankPlan(
        admitted=(admit(2, [4, 4], sequence_id=9),), grants=grant((2, 0, 0)), chunks=(chunk(2, 0, 2, True),)
    )
    rows, _ = step(batch, plan, snapshot=True)
    assert (rows.input_ids.tolist(), batch.num_running) == ([4, 4], 1)


def test_a_snapshot_resumes_in_kept_kv():
    batch = make_batch()
    resumed = msgspec.structs.replace(admit(3, [4, 5, 6, 7, 8, 9]), num_computed_tokens=5)
    plan = RankPlan(admitted=(resumed,), grants=grant((3, 0, 2), (3, 1, 8)), chunks=(chunk(3, 5, 1, True),))
    rows, _ = step(batch, plan, snapshot=True)
    assert (rows.input_ids.tolist(), rows.positions.tolist(), rows.groups[0].slot_mapping.tolist()) == ([9], [5], [33])
    assert rows.segments[0].num_computed_tokens == 5


def test_no_rows_at_all():
    rows, flags = step(make_batch(), RankPlan())
    assert (rows.num_rows, rows.sample_rows.size, rows.groups[0].decode_tables.shape, flags) == (0, 0, (0, 0), [])


def test_end_tokens_widen_and_negative_seeds_wrap():
    batch = make_batch()
    batch.apply(
        RankPlan(
            admitted=(admit(0, [1], seed=-1, eos_token_ids=(1, 2, 3)), admit(1, [1], sequence_id=5, eos_token_ids=(4,)))
        )
    )
    assert batch.sampling.ends[:2].tolist() == [[1, 2, 3], [4, -1, -1]]
    assert int(batch.sampling.seed[0]) == 2**64 - 1


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_random_plans_equal_a_per_token_model(data):
    """Sequences of random length in random chunks: each row is compared with what a plain list of tokens says."""
    batch, model, free, next_id = make_batch(num_slots=3), {}, list(range(60)), 0
    for number in range(data.draw(st.integers(1, 12), label="steps")):
        released, admitted, grants, chunks, expected = [], [], [], [], []
        for slot in list(model):
            if model[slot]["done"] or data.draw(st.integers(0, 9)) == 0:
                free += model.pop(slot)["blocks"]
                released.append(slot)
        for slot in range(3):
            if slot not in model and data.draw(st.booleans()):
                tokens = list(range(100 * next_id, 100 * next_id + data.draw(st.integers(1, 9))))
                end = data.draw(st.integers(len(tokens) + 1, len(tokens) + 4))
                model[slot] = {
                    "tokens": tokens,
                    "done": False,
                    "computed": 0,
                    "blocks": [],
                    "end": end,
                    "prompt": len(tokens),
                }
                admitted.append(admit(slot, tokens, sequence_id=next_id, max_length=end))
                next_id += 1
        for slot in sorted(model):
            state = model[slot]
            left = state["prompt"] - state["computed"]
            count = data.draw(st.integers(0, left)) if left > 0 else 1
            while len(state["blocks"]) * BLOCK < state["computed"] + count:
                grants.append((slot, len(state["blocks"]), free[0]))
                state["blocks"].append(free.pop(0))
            if left > 0 and count:
                chunks.append(chunk(slot, state["computed"], count, count == left))
            at = range(state["computed"], state["computed"] + count)
            rows = [(state["tokens"][i], i, state["blocks"][i // BLOCK] * BLOCK + i % BLOCK) for i in at]
            expected.append((left > 0, slot, rows))
            state["computed"] += count
            if count >= left:
                state["tokens"].append(number)
                state["done"] = len(state["tokens"]) >= state["end"]
        plan = RankPlan(
            released=pack(np.array(released)), admitted=tuple(admitted), grants=grant(*grants), chunks=tuple(chunks)
        )
        rows, _ = step(batch, plan, token=number)
        wanted = [row for _, _, rows in sorted(expected, key=lambda entry: entry[:2]) for row in rows]
        assert (
            list(zip(rows.input_ids.tolist(), rows.positions.tolist(), rows.groups[0].slot_mapping.tolist())) == wanted
        )
