"""An idle engine checks its books: a leak is logged once and mended, the engine lives; in tests it fails (P-KV-08)."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from moewe.kvcache.block_pool import BlockPool
from moewe.runtime.engine import BooksError
from moewe.runtime.engine_main import STRICT_VARIABLE
from moewe.runtime.params import SamplingParams
from moewe.runtime.prompts import packed
from moewe.runtime.scheduler import GroupLimits, Scheduler, SchedulerConfig
from tests.runtime.test_engine import make_engine, run, submit
from tests.runtime.test_generation import FIXTURE, start
from tests.support.fixtures import checkpoint, random_prompt, reference_greedy
from tests.support.null_worker import NullEngine, make_request
from tests.support.polling import finish

LEAKS = {
    "leaked blocks": lambda batch: batch.pools[0].allocate(np.array([1, 1, 1])),
    "miscounted": lambda batch: batch.free_blocks.__isub__(2),
    "free twice": lambda batch: batch.pools[0]._stack.__setitem__((0, 3), 4),
    "held by nobody": lambda batch: batch.granted.__setitem__((0, 2), 1),
}


def test_a_pool_is_whole_when_every_block_is_free_once():
    pool = BlockPool(8)
    assert pool.is_whole()
    ranks = np.zeros(3, np.int64)
    ids = pool.allocate(ranks)
    assert not pool.is_whole()
    pool.free(ranks, ids[::-1])
    assert pool.is_whole()
    pool._stack[0, 2] = pool._stack[0, 3]
    assert not pool.is_whole()


def test_balanced_books_are_left_alone(caplog):
    engine = make_engine()
    engine.add(submit("a", [1, 2, 3], max_tokens=9))
    run(engine)
    assert engine.settle(strict=True) == []
    assert not caplog.records


@pytest.mark.parametrize("leak", LEAKS)
def test_a_leak_is_logged_once_and_mended(leak, caplog):
    engine = make_engine()
    engine.add(submit("a", [1, 2, 3], max_tokens=9))
    run(engine)
    LEAKS[leak](engine.scheduler._batch)
    with pytest.raises(BooksError, match="do not balance"):
        engine.settle(strict=True)
    with caplog.at_level(logging.ERROR):
        assert engine.settle() == []
        assert engine.settle() == []
    assert len(caplog.records) == 1
    assert not any(engine.scheduler.used_blocks_per_rank)
    for i in range(12):
        engine.add(submit(f"r{i}", range(10 + i, 30 + i), max_tokens=1 + i))
    told = run(engine)
    assert all(told[f"r{i}"][0] == tuple(range(30 + i, 31 + 2 * i)) for i in range(12))
    assert engine.workers.plans[-1].header.snapshot is False
    engine.scheduler.check_invariants()
    assert engine.settle(strict=True) == []


def test_a_request_that_the_scheduler_lost_is_answered():
    engine = make_engine()
    engine.add(submit("a", [1], max_tokens=9))
    engine.scheduler.abort("a")
    assert [(delta.request_id, delta.finish_reason) for delta in engine.settle()] == [("a", "error")]


def test_books_are_not_emptied_under_a_step():
    engine = make_engine()
    engine.add(submit("a", [1], max_tokens=9))
    engine.step()
    with pytest.raises(RuntimeError, match="in flight"):
        engine.scheduler.rebuild()


def test_workers_forget_too_when_books_are_rebuilt():
    engine = NullEngine(make_engine().scheduler.config)
    rng = np.random.default_rng(0)
    for turn in range(4):
        requests = [make_request(f"{turn}-{i}", int(rng.integers(1, 40)), int(rng.integers(1, 30))) for i in range(20)]
        engine.add(*requests)
        for request in requests[::3]:
            engine.step()
            engine.scheduler.abort(request.request_id)
        engine.run()
        engine.check_tokens(requests, except_for=[request.request_id for request in requests[::3]])
        engine.scheduler._batch.pools[0].allocate(np.full(1 + turn, turn % 2))
        engine.scheduler.rebuild()
    assert sum(plan.header.snapshot for plan in engine.plans) == 3


@pytest.mark.parametrize("strict", [False, True])
def test_a_running_engine_mends_itself_or_fails_when_told_to(strict, monkeypatch):
    if not strict:
        monkeypatch.delenv(STRICT_VARIABLE)
    schedulers = []
    original = Scheduler.residue

    def corrupted(self):
        if not schedulers:
            schedulers.append(self)
            self._batch.pools[0].allocate(np.zeros(2, np.int64))
        return original(self)

    monkeypatch.setattr(Scheduler, "residue", corrupted)
    replicas = start("EP1DP1", "threads")
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    replicas.submit("a", packed(random_prompt(5)), params)
    finish(replicas, 1)
    if strict:
        while replicas.failure is None:
            replicas.poll(0.1)
        assert "books of the idle engine" in replicas.failure.reason
    else:
        replicas.submit("b", packed(random_prompt(30)), params)
        assert finish(replicas, 1)[0]["b"] == reference_greedy(checkpoint(FIXTURE), random_prompt(30), 8)
        assert replicas.failure is None
        assert schedulers[0].residue() is None
    replicas.close()


def test_books_balance_after_two_hundred_random_requests():  # P-KV-08
    config = SchedulerConfig(
        num_ranks=2, groups=(GroupLimits(num_blocks=40), GroupLimits(num_blocks=24, kind="window", window=40)),
        block_size=16, max_model_len=400, max_num_seqs=8, max_num_batched_tokens=64,
    )  # fmt: skip
    engine, rng = NullEngine(config), np.random.default_rng(8)
    requests, gone = [], set()
    for i in range(200):
        # Few seeds: prompts of one seed begin alike.
        requests.append(
            make_request(f"r{i}", int(rng.integers(1, 301)), int(rng.integers(1, 99)), seed=int(rng.integers(5)))
        )
        engine.add(requests[-1])
        for _ in range(rng.integers(4)):
            engine.step()
        if rng.random() < 0.3:
            live = [r.request_id for r in requests if r.request_id not in engine.reasons and r.request_id not in gone]
            victim = live[rng.integers(len(live))]
            gone.add(victim)
            assert engine.scheduler.abort(victim)
    engine.run()
    assert len(gone) > 30
    assert engine.scheduler.num_preemptions > 0
    assert engine.scheduler.residue() is None
    engine.check_tokens(requests, except_for=gone)
