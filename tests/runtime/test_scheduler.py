"""Small scenarios with their exact plans: chunk sizes, block ids, slots, releases; and endings at depth two."""

from __future__ import annotations

import random

import numpy as np
import pytest

from moewe.runtime.plan import FINISH_ERROR, FINISH_STOP, RankPlan, RankResult, StepPlan, StepResult, pack, unpack
from moewe.runtime.scheduler import GroupLimits, Request, Scheduler, SchedulerConfig
from moewe.runtime.scheduling.batch_state import BatchState
from tests.support.null_worker import EOS, NullEngine, expected_tokens, make_request, next_token


def config_of(**changes: object) -> SchedulerConfig:
    fields = {"num_ranks": 1, "num_blocks": 100, "block_size": 4, "max_model_len": 400, "max_num_seqs": 4,
              "max_num_batched_tokens": 16, "eos_token_ids": (EOS,)}  # fmt: skip
    fields |= changes
    return SchedulerConfig(groups=(GroupLimits(num_blocks=fields.pop("num_blocks")),), **fields)


def chunks_of(rank: RankPlan) -> list[tuple[int, int, int, bool]]:
    return [(chunk.slot, chunk.start, chunk.num_tokens, chunk.samples) for chunk in rank.chunks]


def grants_of(rank: RankPlan) -> list[list[int]]:
    return unpack(rank.grants).reshape(-1, 4).tolist()


def released_of(rank: RankPlan) -> list[int]:
    return unpack(rank.released).tolist()


def answer(*, sequence_id: int, flag: int) -> StepResult:
    """Return a result of step 0 in which slot 0 of the only rank got token 5."""
    ids, flags = pack(np.array([sequence_id]), "<i8"), pack(np.array([flag]), "u1")
    rank = RankResult(step=0, slots=pack(np.array([0])), sequence_ids=ids, tokens=pack(np.array([5])), flags=flags)
    return StepResult(step=0, ranks=(rank,))


def plan_now(engine: NullEngine) -> StepPlan:
    engine.step()
    return engine.plans[-1]


def test_one_request_from_prompt_to_length():
    engine = NullEngine(config_of())
    request = make_request("a", 18, 4, logprobs=2, seed=7)
    engine.add(request)

    first = plan_now(engine)
    assert (first.header.step, first.header.kind, first.header.bucket) == (0, "prefill", 16)
    assert (first.header.exchange, first.header.epoch, first.header.snapshot) == ("local", 0, False)
    (admission,) = first.ranks[0].admitted
    assert (admission.slot, admission.sequence_id, admission.max_length) == (0, 0, 22)
    assert unpack(admission.tokens).tolist() == request.prompt_token_ids.tolist()
    assert (admission.sampling.seed, admission.sampling.num_logprobs, admission.sampling.eos_token_ids) == (7, 2, ())
    assert chunks_of(first.ranks[0]) == [(0, 0, 16, False)]
    assert grants_of(first.ranks[0]) == [[0, 0, 0, 0], [0, 0, 1, 1], [0, 0, 2, 2], [0, 0, 3, 3]]

    second = plan_now(engine)
    assert chunks_of(second.ranks[0]) == [(0, 16, 2, True)]
    assert grants_of(second.ranks[0]) == [[0, 0, 4, 4]]
    assert second.ranks[0].num_decodes == 0

    third, fourth, fifth = plan_now(engine), plan_now(engine), plan_now(engine)
    assert third == StepPlan(header=third.header, ranks=(RankPlan(num_decodes=1),))
    assert (third.header.kind, third.header.bucket) == ("decode", 1)
    assert fourth.ranks == third.ranks
    assert grants_of(fifth.ranks[0]) == [[0, 0, 5, 5]]  # tokens 18, 19 went into block 4; token 20 needs block 5
    assert engine.scheduler.used_blocks_per_rank == (6,)

    engine.run()
    assert engine.num_steps == 5, "a fourth decode would sample nothing"
    assert engine.reasons == {"a": "length"}
    assert request.generated == [next_token(7, position) for position in range(18, 22)]
    assert request.first_scheduled == 1.0


def test_max_tokens_one_needs_no_decode():
    engine = NullEngine(config_of())
    engine.add(make_request("a", 3, 1))
    engine.run()
    assert [plan.header.kind for plan in engine.plans] == ["prefill"]
    assert engine.reasons == {"a": "length"}


def test_planned_length_frees_slot_and_blocks_in_the_next_plan_before_its_result():
    engine = NullEngine(config_of(max_num_seqs=1))
    a, b = make_request("a", 3, 1), make_request("b", 3, 2, arrival=1.0)
    engine.add(a, b)
    plan_now(engine)
    second = plan_now(engine)  # the result of step 0 has not been applied when this is planned
    assert released_of(second.ranks[0]) == [0]
    assert [(new.slot, new.sequence_id) for new in second.ranks[0].admitted] == [(0, 1)]
    assert grants_of(second.ranks[0]) == [[0, 0, 0, 0]], "the same block again"
    engine.run()
    engine.check_tokens([a, b])


def test_end_token_is_seen_one_step_late_and_costs_one_dropped_row():
    seed = next(s for s in range(1, 1000) if [next_token(s, p) == EOS for p in (4, 5, 6)] == [False, True, False])
    engine = NullEngine(config_of())
    request = make_request("a", 4, 50, seed=seed, ignore_eos=False)
    engine.add(request)
    engine.run()
    assert engine.reasons == {"a": "stop"}
    assert request.generated == expected_tokens(request)
    assert len(request.generated) == 2
    assert [plan.ranks[0].num_decodes for plan in engine.plans] == [0, 1, 1], (
        "step 2 was planned before step 1 was known"
    )
    late = make_request("b", 4, 1)
    engine.add(late)
    assert released_of(plan_now(engine).ranks[0]) == [0]


@pytest.mark.parametrize("end", ["abort", "finish"])
def test_a_request_ended_with_a_token_in_flight_leaves_nothing_and_the_slot_serves_the_next(end: str):
    engine = NullEngine(config_of(max_num_seqs=1))
    a, b = make_request("a", 6, 50), make_request("b", 6, 3, arrival=1.0)
    engine.add(a, b)
    for _ in range(4):
        engine.step()
    assert len(engine.in_flight) == 1
    assert getattr(engine.scheduler, end)("a")
    engine.scheduler.check_invariants()
    assert engine.scheduler.used_blocks_per_rank == (0,)
    before = list(engine.tokens["a"])
    plan = plan_now(engine)
    assert released_of(plan.ranks[0]) == [0]
    assert plan.ranks[0].admitted[0].sequence_id == 1
    engine.run()
    assert engine.tokens["a"] == before, "a late token was handed out"
    engine.check_tokens([b])
    assert not getattr(engine.scheduler, end)("a")


def test_abort_works_in_every_state():
    engine = NullEngine(config_of(max_num_seqs=2, num_blocks=6))
    names = ["running", "leaving", "waiting"]
    engine.add(make_request("running", 5, 9), make_request("leaving", 5, 1, arrival=1.0))
    engine.add(make_request("waiting", 23, 1, arrival=2.0))
    engine.step()
    engine.scheduler.schedule()
    for name in names:
        assert engine.scheduler.abort(name)
        engine.scheduler.check_invariants()
    assert (engine.scheduler.num_running, engine.scheduler.num_waiting) == (0, 0)
    assert engine.scheduler.used_blocks_per_rank == (0,)
    assert not engine.scheduler.abort("nobody")


def test_long_prompt_neither_stops_decodes_nor_starves_the_short_one_behind_it():
    config = config_of(num_blocks=2000, max_model_len=8000, max_num_batched_tokens=64)
    engine = NullEngine(config)
    chatty, long = make_request("chatty", 4, 1000), make_request("long", 6000, 2, arrival=1.0)
    short = make_request("short", 40, 2, arrival=2.0)
    engine.add(chatty)
    for _ in range(3):
        engine.step()
    engine.add(long, short)
    plan = plan_now(engine)
    assert plan.header.kind == "mixed"
    assert plan.ranks[0].num_decodes == 1
    assert chunks_of(plan.ranks[0]) == [(1, 0, 48, False), (2, 0, 15, False)]  # 32 in order, 31 evenly
    start = engine.num_steps - 1
    while "short" not in engine.reasons:
        assert plan_now(engine).ranks[0].num_decodes >= 1
    assert engine.num_steps - start <= 5
    while long.num_tokens == 6000:
        rows = plan_now(engine).ranks[0].num_rows
        assert rows <= 64
    assert engine.num_steps - start <= 6000 // 31 + 3, "the long one always gets at least half"
    assert engine.num_steps - 3 <= len(engine.tokens["chatty"]) <= engine.num_steps, "one token in every step"


def test_max_chunk_tokens_bounds_every_chunk():
    engine = NullEngine(config_of(max_chunk_tokens=1))
    engine.add(make_request("a", 3, 2), make_request("b", 5, 2, arrival=1.0))
    engine.run()
    assert {chunk.num_tokens for plan in engine.plans for chunk in plan.ranks[0].chunks} == {1}


def test_every_rank_is_in_every_plan_and_idle_means_no_plan():
    engine = NullEngine(config_of(num_ranks=4, exchange="threads"))
    assert engine.scheduler.schedule() is None
    assert not engine.scheduler.has_work
    engine.add(make_request("a", 5, 8))
    engine.run()
    assert all(len(plan.ranks) == 4 for plan in engine.plans)
    assert all(plan.ranks[1:] == (RankPlan(), RankPlan(), RankPlan()) for plan in engine.plans)
    assert engine.scheduler.schedule() is None
    engine.add(make_request("b", 1, 1))
    engine.run()
    assert engine.reasons == {"a": "length", "b": "length"}


def test_unequal_ranks_agree_on_kind_and_bucket():
    engine = NullEngine(config_of(num_ranks=2, num_blocks=400, max_model_len=1600, max_num_batched_tokens=512))
    engine.add(make_request("a", 1, 90))
    engine.step()
    engine.add(make_request("b", 509, 90, arrival=1.0))
    plan = plan_now(engine)
    assert [rank.num_rows for rank in plan.ranks] == [1, 509]
    assert (plan.header.kind, plan.header.bucket) == ("mixed", 509)


def test_shuffled_arrival_gives_equal_plans():
    requests = [(f"r{i}", 1 + 7 * i % 23, 3 + i % 5, i // 4) for i in range(20)]  # four arrive at each moment

    def plans(order: list[int]) -> list[StepPlan]:
        engine = NullEngine(config_of(num_ranks=3, num_blocks=12, max_model_len=40))
        engine.add(*(make_request(n, p, m, arrival=float(t)) for n, p, m, t in (requests[i] for i in order)))
        engine.run()
        return engine.plans

    expected = plans(list(range(20)))
    for seed in range(3):
        assert plans(random.Random(seed).sample(range(20), 20)) == expected


def test_not_finite_logits_end_one_request_only():
    a, b = make_request("a", 4, 9, seed=3), make_request("b", 4, 9, seed=4, arrival=1.0)
    engine = NullEngine(config_of(), errors={3: 6})
    engine.add(a, b)
    updates = []
    while engine.scheduler.has_work:
        updates += engine.step()
    (ended,) = [update for update in updates if update.finish_reason == "error"]
    assert (ended.request, ended.token_ids) == (a, [])
    assert "not finite" in str(ended.error)
    assert len(a.generated) == 2
    engine.check_tokens([b])


def test_not_finite_in_the_middle_of_a_prompt_ends_the_request():
    scheduler = Scheduler(config_of())
    scheduler.add(make_request("a", 40, 9))
    scheduler.schedule()
    result = answer(sequence_id=0, flag=FINISH_ERROR)
    assert [update.finish_reason for update in scheduler.apply(result)] == ["error"]
    scheduler.check_invariants()
    assert not scheduler.has_work


def test_results_are_taken_in_order_only_and_unknown_sequences_ignored():
    scheduler = Scheduler(config_of())
    with pytest.raises(RuntimeError, match="result of step 0"):
        scheduler.apply(StepResult(step=0, ranks=(RankResult(step=0),)))
    scheduler.add(make_request("a", 4, 9))
    scheduler.schedule()
    with pytest.raises(RuntimeError, match="result of step 1, but step 0 is next"):
        scheduler.apply(StepResult(step=1, ranks=(RankResult(step=1),)))
    assert scheduler.apply(answer(sequence_id=77, flag=FINISH_STOP)) == []
    scheduler.check_invariants()
    assert scheduler.num_running == 1


def test_steady_decode_looks_at_no_request(monkeypatch: pytest.MonkeyPatch):
    scheduler = Scheduler(config_of(num_ranks=4, max_num_seqs=8, max_num_batched_tokens=64))
    for i in range(32):
        scheduler.add(make_request(f"r{i}", 2, 300))
    assert scheduler.schedule() is not None

    def refuse(*_: object) -> Request:
        raise AssertionError("a steady step walked over requests")

    monkeypatch.setattr(BatchState, "request_at", refuse)
    monkeypatch.setattr(BatchState, "running", refuse)
    for _ in range(9):
        plan = scheduler.schedule()
        assert plan is not None
        assert [rank.num_decodes for rank in plan.ranks] == [8, 8, 8, 8]
