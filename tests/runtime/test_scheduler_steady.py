"""Plans of plain decode steps, made on the short way, are those of the long way, and nearly all steps are made so."""

from __future__ import annotations

import random

import pytest

from moewe.runtime.plan import StepPlan
from moewe.runtime.scheduler import Scheduler
from moewe.runtime.scheduling.steady import SteadyBatch
from tests.runtime.test_scheduler_random import SHAPES, config_of, random_request
from tests.support.null_worker import NullEngine, make_request


def plans_of(shape: str, depth: int, monkeypatch: pytest.MonkeyPatch, *, short: bool) -> list[StepPlan]:
    """Return all plans of a run of random requests, aborts among them."""
    config = config_of(shape)
    rng = random.Random(f"{shape}{depth}")
    with monkeypatch.context() as patch:
        if not short:
            patch.setattr(Scheduler, "_plan_steady", lambda self: None)
        engine = NullEngine(config, depth=depth)
        for number in range(25):
            engine.add(random_request(rng, f"r{number}", config, float(number)))
            for _ in range(rng.randint(0, 6)):
                if engine.scheduler.has_work:
                    engine.step()
            if rng.random() < 0.2:
                engine.scheduler.abort(f"r{number}")
        engine.run(5000)
    return engine.plans


@pytest.mark.parametrize("depth", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_both_ways_give_the_same_plans(shape: str, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert plans_of(shape, depth, monkeypatch, short=True) == plans_of(shape, depth, monkeypatch, short=False)


def test_a_batch_that_only_decodes_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[SteadyBatch] = []
    monkeypatch.setattr(SteadyBatch, "__init__", _counting(SteadyBatch.__init__, looked))
    long_way: list[None] = []
    plan = Scheduler._plan
    monkeypatch.setattr(Scheduler, "_plan", lambda self, **kw: (long_way.append(None), plan(self, **kw))[1])
    engine = NullEngine(config_of("one rank"), depth=2)
    for number in range(3):
        engine.add(make_request(f"r{number}", 4, 30, ignore_eos=True))
    for _ in range(25):
        engine.step()
    assert len(long_way) <= 2  # the step with the prompts, and the one behind it
    assert len(looked) <= 2


def _counting(call, seen):
    def made(self, batch):
        seen.append(self)
        call(self, batch)

    return made
