"""A snapshot plan names the whole batch, runs a step of it, and changes nothing for the requests."""

from __future__ import annotations

import random

import pytest

from moewe.runtime.plan import RankPlan, unpack
from moewe.runtime.scheduler import Request
from tests.runtime.test_scheduler import chunks_of, config_of, grants_of
from tests.runtime.test_scheduler_random import config_of as config_of_shape
from tests.runtime.test_scheduler_random import random_request
from tests.support.null_worker import NullEngine, make_request


def test_snapshot_names_everything_and_waits_for_results():
    engine = NullEngine(config_of(), depth=1)
    decoding, prefilling = make_request("a", 5, 9), make_request("b", 40, 2, arrival=1.0)
    engine.add(decoding)
    for _ in range(3):
        engine.step()
    engine.add(prefilling)
    engine.step()
    plan = engine.scheduler.snapshot()
    engine.submit(plan)
    rank = plan.ranks[0]
    assert plan.header.snapshot and plan.header.step == 4
    assert [(new.slot, new.sequence_id, new.num_computed_tokens) for new in rank.admitted] == [(0, 0, 8), (1, 1, 15)]
    assert unpack(rank.admitted[0].tokens).tolist() == decoding.token_ids().tolist()
    assert chunks_of(rank) == [(0, 8, 1, True), (1, 15, 15, False)]
    assert (rank.num_decodes, rank.released) == (0, b"")
    assert [row[1:] for row in grants_of(rank)] == [
        [0, 0, 0], [0, 1, 1], [0, 2, 6], *([1, i, b] for i, b in enumerate([2, 3, 4, 5, 7, 8, 9, 10])),
    ]  # fmt: skip
    with pytest.raises(RuntimeError, match="1 steps are in flight"):
        engine.scheduler.snapshot()
    engine.run()
    engine.check_tokens([decoding, prefilling])


def test_snapshot_of_nothing_is_an_idle_step():
    engine = NullEngine(config_of(num_ranks=2))
    engine.add(make_request("a", 5, 9))
    engine.step()
    engine.scheduler.abort("a")
    engine.run()
    plan = engine.scheduler.snapshot()
    assert plan.ranks == (RankPlan(), RankPlan())
    assert (plan.header.kind, plan.header.bucket, plan.header.snapshot) == ("idle", 0, True)
    engine.submit(plan)
    engine.run()


@pytest.mark.parametrize("shape", ["tiny pool", "many ranks"])
def test_snapshots_at_random_steps_change_nothing(shape: str):
    config = config_of_shape(shape)
    rng = random.Random(shape)
    requests = [random_request(rng, f"r{i}", config, float(i)) for i in range(60)]
    plain, other = NullEngine(config, depth=1), NullEngine(config, depth=1)
    for engine in (plain, other):
        engine.add(*(make_copy(request) for request in requests))
    plain.run()
    while other.scheduler.has_work:
        if rng.random() < 0.3:
            other.submit(other.scheduler.snapshot())
            other.scheduler.check_invariants()
            other.collect()
        else:
            other.step()
    other.run(0)
    assert other.tokens == plain.tokens
    assert other.reasons == plain.reasons
    assert any(plan.header.snapshot and plan.header.bucket for plan in other.plans)


def make_copy(request: Request) -> Request:
    return Request(request.request_id, request.prompt_token_ids, request.params, seed=request.seed,
                   priority=request.priority, arrival=request.arrival)  # fmt: skip
