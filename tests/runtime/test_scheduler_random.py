"""The scheduler under thousands of random requests, aborts and tiny pools: exact tokens, no leak, sound books."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from moewe.runtime.scheduler import AdmissionError, GroupLimits, QueueFullError, Request, SchedulerConfig
from tests.support.null_worker import EOS, NullEngine, make_request

# Blocks of each cache group, with kind and window; then block size, ranks, sequences and rows of a step.
SHAPES: dict[str, tuple[tuple[tuple[int, str, int], ...], int, int, int, int]] = {
    "one rank": (((40, "full", 0),), 4, 1, 8, 16),
    "tiny pool": (((7, "full", 0),), 4, 2, 6, 8),
    "many ranks": (((12, "full", 0),), 8, 8, 3, 5),
    "blocks of one": (((30, "full", 0),), 1, 2, 4, 64),
    "two full groups": (((9, "full", 0), (8, "latent", 0)), 4, 2, 5, 5),
    "window beside full": (((20, "full", 0), (6, "window", 6)), 4, 2, 5, 12),
    "window scarcer than full": (((40, "full", 0), (4, "window", 7)), 4, 1, 6, 12),
    "chunks beside full": (((14, "full", 0), (7, "chunk", 8)), 4, 2, 4, 16),
    "windows alone": (((9, "window", 5), (8, "window", 9)), 4, 2, 5, 24),
    "window and chunks of odd sizes": (((9, "window", 3), (9, "chunk", 10)), 3, 1, 6, 30),
    "window of one in blocks of one": (((5, "window", 1), (30, "full", 0)), 1, 1, 4, 9),
}


NUM_REQUESTS = 100


def config_of(shape: str, **changes: object) -> SchedulerConfig:
    groups, block_size, num_ranks, max_num_seqs, rows = SHAPES[shape]
    fields = {"block_size": block_size, "num_ranks": num_ranks, "max_num_seqs": max_num_seqs, "max_model_len": 60,
              "max_num_batched_tokens": rows, "eos_token_ids": (EOS,), "exchange": "threads"}  # fmt: skip
    if shape == "two full groups":
        fields["max_chunk_tokens"] = 3
    limits = tuple(GroupLimits(num_blocks=n, kind=kind, window=window) for n, kind, window in groups)
    return SchedulerConfig(groups=limits, **(fields | changes))


def random_request(rng: random.Random, name: str, config: SchedulerConfig, now: float) -> Request:
    room = min(config.max_model_len, config.capacity_tokens + 1)
    prompt = rng.randint(1, room - 1) if rng.random() < 0.2 else rng.randint(1, max(1, room // 4))
    max_tokens = None if rng.random() < 0.1 else rng.randint(1, room - prompt)
    logprobs = 0 if rng.random() < 0.2 else None
    return make_request(name, prompt, max_tokens, ignore_eos=rng.random() < 0.5, logprobs=logprobs,
                        seed=rng.randint(1, 10**6), priority=rng.randint(0, 2), arrival=now)  # fmt: skip


ALWAYS = (2, "priority")
DEPTHS = [ALWAYS, *(pytest.param(depth, "fcfs", marks=pytest.mark.slow) for depth in (1, 3))]


@pytest.mark.parametrize(("depth", "policy"), DEPTHS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_request_gets_exactly_its_tokens(shape: str, depth: int, policy: str):
    config = config_of(shape, policy=policy)
    rng = random.Random(f"{shape}{depth}{policy}")
    engine = NullEngine(config, depth=depth)
    requests: list[Request] = []
    gone: list[str] = []
    while len(requests) < NUM_REQUESTS or engine.scheduler.has_work:
        if len(requests) < NUM_REQUESTS and rng.random() < 0.5:
            for _ in range(rng.randint(1, 4)):
                requests.append(random_request(rng, f"r{len(requests)}", config, float(engine.num_steps)))
                engine.add(requests[-1])
        alive = [r.request_id for r in requests if r.request_id not in engine.reasons and r.request_id not in gone]
        if alive and rng.random() < 0.1:
            gone.append(rng.choice(alive))
            assert engine.scheduler.abort(gone[-1])
            assert not engine.scheduler.abort(gone[-1])
        updates = engine.step()
        for update in updates:  # as if text held a stop string
            if update.finish_reason is None and rng.random() < 0.01:
                gone.append(update.request.request_id)
                assert engine.scheduler.finish(gone[-1])
                engine.scheduler.check_invariants()
        assert engine.num_steps < 20_000
    engine.run(0)
    engine.check_tokens(requests, except_for=gone)
    assert {r.request_id for r in requests} == set(gone) | set(engine.reasons)
    if shape == "tiny pool":
        assert engine.scheduler.num_preemptions > 0


class SchedulerMachine(RuleBasedStateMachine):
    """Any order of add, abort, schedule and apply, up to three steps ahead; then everything must drain."""

    @initialize(shape=st.sampled_from(sorted(SHAPES)), policy=st.sampled_from(["fcfs", "priority"]))
    def start(self, shape: str, policy: str) -> None:
        self.config = config_of(shape, policy=policy, max_queued_requests=9)
        self.engine = NullEngine(self.config, errors={seed: 20 for seed in range(0, 1000, 13)})
        self.requests: list[Request] = []
        self.gone: list[str] = []

    @rule(
        prompt=st.integers(0, 70), max_tokens=st.none() | st.integers(1, 70), seed=st.integers(0, 999),
        priority=st.integers(0, 2), ignore_eos=st.booleans(),
    )  # fmt: skip
    def add(self, prompt: int, max_tokens: int | None, seed: int, priority: int, ignore_eos: bool) -> None:
        name = f"r{len(self.requests)}"
        request = make_request(name, prompt, max_tokens, seed=seed, priority=priority, ignore_eos=ignore_eos,
                               arrival=float(len(self.requests) // 3))  # fmt: skip
        try:
            self.engine.add(request)
        except QueueFullError:
            assert self.engine.scheduler.num_waiting >= 9
        except AdmissionError as error:
            assert "\n" not in str(error)
            room = min(self.config.max_model_len, self.config.capacity_tokens + 1) - prompt
            assert prompt == 0 or room < (1 if max_tokens is None else max_tokens)
        else:
            self.requests.append(request)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from([request.request_id for request in self.requests]))
        alive = name not in self.engine.reasons and name not in self.gone
        assert self.engine.scheduler.abort(name) == alive
        self.engine.scheduler.check_invariants()
        if alive:
            self.gone.append(name)

    @precondition(lambda self: len(self.engine.in_flight) < 3)
    @rule()
    def schedule(self) -> None:
        plan = self.engine.scheduler.schedule()
        self.engine.scheduler.check_invariants()
        if plan is not None:
            self.engine.submit(plan)

    @precondition(lambda self: self.engine.in_flight)
    @rule()
    def apply(self) -> None:
        self.engine.collect()

    @precondition(lambda self: not self.engine.in_flight)
    @rule()
    def snapshot(self) -> None:
        self.engine.submit(self.engine.scheduler.snapshot())
        self.engine.scheduler.check_invariants()

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.engine.run()
            failed = [name for name, reason in self.engine.reasons.items() if reason == "error"]
            self.engine.check_tokens(self.requests, except_for=[*self.gone, *failed])


SchedulerMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=60, deadline=None)
TestSchedulerMachine = SchedulerMachine.TestCase
