"""Scheduler and the workers' own batch together: random requests, aborts and snapshots through the real arrays.

No model: the token of a position is a function of (seed, position), as for the null workers.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

from moewe.runtime.plan import RankPlan, RankResult, StepHeader, pack
from moewe.runtime.ranks.batch import WorkerBatch
from moewe.runtime.scheduler import Request, SchedulerConfig
from tests.runtime.test_scheduler_random import SHAPES, config_of, random_request
from tests.support.null_worker import NullEngine, next_token


class BatchRank:
    def __init__(self, config: SchedulerConfig) -> None:
        self.batch = WorkerBatch(
            num_slots=config.max_num_seqs,
            max_model_len=config.max_model_len,
            block_size=config.block_size,
            groups=[(group.kind, group.window) for group in config.groups],
        )

    def run(self, header: StepHeader, plan: RankPlan) -> RankResult:
        batch = self.batch
        batch.apply(plan, snapshot=header.snapshot)
        rows = batch.rows(plan.chunks)
        assert rows.num_rows <= plan.num_rows <= header.bucket
        slots = rows.sample_slots
        at = zip(batch.seed[slots].tolist(), batch.num_tokens[slots].tolist(), strict=True)
        tokens = np.array([next_token(seed, position) for seed, position in at], np.int64)
        flags = batch.commit(rows, tokens, np.ones(batch.num_slots, np.bool_))
        batch.check_invariants()
        return RankResult(
            step=header.step,
            slots=pack(slots),
            sequence_ids=pack(batch.sequence_ids[slots], "<i8"),
            tokens=pack(tokens),
            flags=pack(flags, "u1"),
        )


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_plans_drive_the_real_batch(shape: str, depth: int):
    config = config_of(shape)
    rng = random.Random(shape)
    engine = NullEngine(config, depth=depth)
    engine.ranks = [BatchRank(config) for _ in engine.ranks]  # type: ignore[misc]
    requests: list[Request] = []
    gone: list[str] = []
    while len(requests) < 80 or engine.scheduler.has_work:
        if len(requests) < 80:
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
