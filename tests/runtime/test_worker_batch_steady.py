"""Rows of sequences that only decode come back in the same arrays, with the numbers of rows that are made anew."""

from __future__ import annotations

import random

import numpy as np
import pytest

from moewe.runtime.plan import Admission, Chunk, RankPlan, SamplingState, pack
from moewe.runtime.ranks.batch import StepRows, WorkerBatch

BLOCK, SLOTS, PROMPT, END = 4, 6, 5, 7
GROUPS = (("full", 0), ("window", 6))


def admission(slot: int, sequence_id: int, rng: random.Random) -> Admission:
    return Admission(
        slot=slot,
        sequence_id=sequence_id,
        tokens=pack(np.arange(PROMPT)),
        max_length=PROMPT + rng.randint(2, 40),
        sampling=SamplingState(
            temperature=0.0, top_p=1.0, top_k=0, seed=0, num_logprobs=-1, eos_token_ids=(END,) if slot % 2 else ()
        ),
    )


def as_lists(rows: StepRows) -> list[object]:
    fields = ("input_ids", "positions", "row_slots", "decode_slots", "decode_lengths", "sample_rows", "sample_slots")
    groups = [(g.slot_mapping.tolist(), g.decode_tables.tolist(), len(g.segments)) for g in rows.groups]
    return [getattr(rows, name).tolist() for name in fields] + groups


def step(batch: WorkerBatch, plan: RankPlan, token: int, *, anew: bool) -> tuple[StepRows, list[object]]:
    batch.apply(plan)
    if anew:
        batch._decodes = None
    rows = batch.rows(plan.chunks, plan.held)
    seen = as_lists(rows)
    tokens = np.array([END if (slot + token) % 23 == 0 else token for slot in rows.sample_slots.tolist()], np.int64)
    kept = batch.commit(rows, tokens)
    return rows, [seen, kept.counts.tolist(), kept.flags.tolist()]


@pytest.mark.parametrize("seed", range(6))
def test_rows_that_come_back_equal_rows_made_anew(seed: int) -> None:
    rng = random.Random(seed)
    kept, anew = (WorkerBatch(num_slots=SLOTS, max_model_len=80, block_size=BLOCK, groups=GROUPS) for _ in range(2))
    lengths: dict[int, int] = {}  # by slot: tokens in KV after the steps planned so far
    next_block = same = 0
    last: StepRows | None = None
    for number in range(120):
        released = [slot for slot in lengths if kept.finished[slot] or rng.random() < 0.01]
        for slot in released:
            del lengths[slot]
        free = [slot for slot in range(SLOTS) if slot not in lengths]
        come = rng.sample(free, 1) if free and rng.random() < 0.15 else []
        grants = []
        for slot in [*lengths, *come]:
            before, after = lengths.get(slot, 0), lengths.get(slot, PROMPT - 1) + 1
            lengths[slot] = after
            for index in range(-(-before // BLOCK), -(-after // BLOCK)):
                grants += [(group, slot, index, next_block + group) for group in range(2)]
                next_block += 2
        plan = RankPlan(
            released=pack(np.array(released)) if released else b"",
            admitted=tuple(admission(slot, 1000 * number + slot, rng) for slot in come),
            grants=pack(np.array(grants)) if grants else b"",
            chunks=tuple(Chunk(slot=slot, start=0, num_tokens=PROMPT, samples=True) for slot in come),
            num_decodes=len(lengths),
        )
        state = rng.getstate()
        rows, found = step(kept, plan, number, anew=False)
        rng.setstate(state)
        _, wanted = step(anew, plan, number, anew=True)
        assert found == wanted
        for name in ("num_tokens", "num_computed_tokens", "last_token", "finished", "decoding"):
            assert getattr(kept, name).tolist() == getattr(anew, name).tolist(), name
        same += rows is last
        last = rows
        kept.check_invariants()
    assert same > 20
