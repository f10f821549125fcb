"""Scheduler, the workers' own batch and the batch of attention: random requests, aborts and snapshots, without a model.

The token of a position is a function of (seed, position), as for the null workers. A "KV slot" holds who wrote what, so
every block that attention would gather, padding included, is held against what the sequence has written itself.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from moewe.attention.build import build_attention_batch
from moewe.kvcache.groups import first_visible
from moewe.runtime.plan import RankPlan, RankResult, StepHeader, pack
from moewe.runtime.ranks.batch import StepRows, WorkerBatch
from moewe.runtime.scheduler import Request, SchedulerConfig
from tests.runtime.test_scheduler_random import SHAPES, config_of, random_request
from tests.support.null_worker import NullEngine, next_token

pytestmark = pytest.mark.slow


class BatchRank:
    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.batch = WorkerBatch(
            num_slots=config.max_num_seqs,
            max_model_len=config.max_model_len,
            block_size=config.block_size,
            groups=[(group.kind, group.window) for group in config.groups],
        )
        # For each group: sequence and position that were written to each slot of a block, [num_blocks, block_size].
        self.owner, self.position = (
            [np.full((group.num_blocks, config.block_size), -1) for group in config.groups] for _ in range(2)
        )

    def run(self, header: StepHeader, plan: RankPlan) -> RankResult:
        batch = self.batch
        batch.apply(plan, snapshot=header.snapshot)
        rows = batch.rows(plan.chunks, plan.held)
        assert rows.num_rows <= plan.num_rows <= header.bucket
        for group in range(len(batch.groups)):
            self.write(group, rows)
            self.read(group, rows)
        slots = rows.sample_slots
        at = zip(batch.sampling.seed[slots].tolist(), batch.num_tokens[slots].tolist(), strict=True)
        tokens = np.array([next_token(seed, position) for seed, position in at], np.int64)
        flags = batch.commit(rows, tokens, np.ones(batch.num_slots, np.bool_)).flags
        batch.check_invariants()
        return RankResult(
            step=header.step,
            slots=pack(slots),
            sequence_ids=pack(batch.sequence_ids[slots], "<i8"),
            tokens=pack(tokens),
            flags=pack(flags, "u1"),
        )

    def write(self, group: int, rows: StepRows) -> None:
        places = rows.groups[group].slot_mapping
        assert np.unique(places).size == places.size, "two rows write one place"
        for slot, block in {(s, p // self.config.block_size) for s, p in zip(rows.row_slots.tolist(), places.tolist())}:
            assert block in self.batch.blocks_of(slot, group), "a row writes into a block that its sequence lacks"
        self.owner[group].flat[places] = self.batch.sequence_ids[rows.row_slots]
        self.position[group].flat[places] = rows.positions

    def read(self, group: int, rows: StepRows) -> None:
        (kind, window), own, size = self.batch.groups[group], rows.groups[group], self.config.block_size
        batch = build_attention_batch(
            slot_mapping=own.slot_mapping,
            segments=own.segments,
            decode_lengths=rows.decode_lengths,
            decode_tables=own.decode_tables,
            block_size=size,
            device=torch.device("cpu"),
            kind=kind,
            window=window,
        )
        runs = [
            (segment.row_start, segment.num_rows, segment.num_computed_tokens, segment.block_table.tolist())
            for segment in batch.prefills
        ]
        for bucket in batch.decodes:
            tables = zip(bucket.rows.tolist(), bucket.lengths.tolist(), bucket.block_table.tolist(), strict=True)
            runs += [(row, 1, length - 1, table) for row, length, table in tables]
        for row, num_rows, start, table in runs:
            slot = int(rows.row_slots[row])
            assert set(table) <= set(self.batch.blocks_of(slot, group).tolist()), "gathers blocks of somebody else"
            first = first_visible(kind, window, start)
            seen = np.arange(first, start + num_rows)
            blocks = np.array(table)[seen // size - first // size]
            assert (self.owner[group][blocks, seen % size] == self.batch.sequence_ids[slot]).all()
            assert (self.position[group][blocks, seen % size] == seen).all(), "KV is not where its position says"
        assert sum(num_rows for _, num_rows, _, _ in runs) == rows.num_rows


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_plans_drive_the_real_batch(shape: str, depth: int):
    config = config_of(shape)
    rng = random.Random(shape)
    engine = NullEngine(config, depth=depth)
    engine.ranks = [BatchRank(config) for _ in engine.ranks]  # type: ignore[misc]
    requests: list[Request] = []
    gone: list[str] = []
    number = 80 if shape in ("many ranks", "windows alone") else 40  # so that some lose their blocks
    while len(requests) < number or engine.scheduler.has_work:
        if len(requests) < number:
            requests.append(random_request(rng, f"r{len(requests)}", config, float(len(requests))))
            engine.add(requests[-1])
        if depth == 1 and rng.random() < 0.1:
            engine.submit(engine.scheduler.snapshot())
            engine.collect()
        engine.step()
        victim = rng.choice(requests).request_id
        if rng.random() < 0.05 and engine.scheduler.abort(victim):
            gone.append(victim)
    engine.run(0)
    engine.check_tokens(requests, except_for=gone)
    assert engine.scheduler.num_preemptions > 0
