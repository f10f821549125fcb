"""What the scheduler does to many sequences at once is what it would do to one after another."""

from __future__ import annotations

import random

import numpy as np
import pytest

from moewe.runtime.scheduler import Request
from moewe.runtime.scheduling import step as steps
from moewe.runtime.scheduling.admission import RankLoads
from moewe.runtime.scheduling.batch_state import DECODE, FREE, PREFILL, BatchState, Seats
from tests.runtime.test_scheduler_random import SHAPES, config_of, random_request
from tests.support.null_worker import NullEngine, make_request


def arrays(batch: BatchState) -> list[list]:
    pools = [part.tolist() for pool in batch.pools for part in (pool._stack, pool._used, pool.num_free)]
    fields = ("phase", "sequence_id", "computed", "known", "limit", "granted", "held", "first", "free_blocks")
    return [*pools, *(getattr(batch, name).tolist() for name in fields)]


def filled(shape: str, seed: int) -> tuple[BatchState, list[Request]]:
    """Return a batch after some steps, and the requests that run in it."""
    config, rng = config_of(shape), random.Random(seed)
    engine = NullEngine(config)
    for number in range(20):
        engine.add(random_request(rng, f"r{number}", config, float(number)))
        engine.step()
    batch = engine.scheduler._batch
    return batch, [request for request in batch.requests if request is not None]


@pytest.mark.parametrize("shape", SHAPES)
def test_slots_are_freed_together_as_one_after_another(shape: str) -> None:
    for seed in range(4):
        (together, leaving), (apart, others) = filled(shape, seed), filled(shape, seed)
        assert arrays(together) == arrays(apart) and leaving
        order = random.Random(seed).sample(range(len(leaving)), len(leaving))
        together.vacate([leaving[i] for i in order])
        for i in order:
            apart.vacate([others[i]])
        assert arrays(together) == arrays(apart)
        assert [request.generated for request in leaving] == [request.generated for request in others]
        together.check_invariants()


@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_in_flight_come_behind_those_that_were_left_in_a_slot(shape: str) -> None:
    (batch, leaving), (_, others) = filled(shape, 1), filled(shape, 1)
    expected = [request.generated for request in others]
    batch.vacate(leaving)
    for request in leaving:
        request.append([5])
        request.append([6])
        assert request.num_tokens == len(request.prompt_token_ids) + request.num_generated
    assert [request.generated for request in leaving] == [[*tokens, 5, 6] for tokens in expected]
    assert any(expected)
    leaving[0].append([7])
    assert leaving[0].generated == [*expected[0], 5, 6, 7]


@pytest.mark.parametrize("shape", SHAPES)
def test_sequences_come_to_the_lowest_free_slots_in_their_order(shape: str) -> None:
    batch, running = filled(shape, 2)
    rng, config = random.Random(shape), batch.config
    batch.vacate(rng.sample(running, -(-len(running) // 2)))
    free = {rank: np.flatnonzero(batch.phase[rank] == FREE).tolist() for rank in range(config.num_ranks)}
    ranks = [rank for rank, slots in free.items() for _ in slots[1:]]
    rng.shuffle(ranks)
    requests = [make_request(f"new{i}", 1 + i % 3, 3) for i in range(len(ranks))]
    known = np.array([request.num_tokens for request in requests])
    batch.occupy(Seats(requests, ranks, known, np.full(len(ranks), 7)), first_id=1000)
    expected = [free[rank].pop(0) for rank in ranks]
    assert [request.slot for request in requests] == expected and requests
    assert [request.sequence_id for request in requests] == list(range(1000, 1000 + len(ranks)))
    assert [batch.request_at(request.rank, request.slot) for request in requests] == requests
    assert [batch.known[request.rank, request.slot] for request in requests] == [r.num_tokens for r in requests]
    with pytest.raises(AssertionError, match="too few free slots"):
        ones = [1] * (config.max_num_seqs + 1)
        batch.occupy(Seats([make_request("one", 1, 1) for _ in ones], [0 for _ in ones], ones, ones), first_id=2000)


@pytest.mark.parametrize("shape", SHAPES)
def test_prompts_that_run_whole_are_cut_as_those_that_share(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    draft, whole = steps.draft_chunks, []

    def both(batch: BatchState, decodes: steps.Decodes) -> list:
        chunks = draft(batch, decodes)
        for rank in np.flatnonzero((batch.phase == PREFILL).any(1)).tolist():
            rows = batch.config.max_num_batched_tokens - int(decodes.counts[rank])
            blocks = int(batch.free_blocks[:, rank].min() - decodes.num_growing[rank])
            assert chunks[rank] == steps._shared_chunks(batch, rank, num_rows=rows, spare_blocks=blocks)
            whole.append(all(chunk.samples for chunk in chunks[rank]))
        return chunks

    monkeypatch.setattr(steps, "draft_chunks", both)
    config, rng = config_of(shape), random.Random(shape)
    engine = NullEngine(config)
    for number in range(40):
        engine.add(random_request(rng, f"r{number}", config, float(number)))
        engine.step()
    engine.run()
    assert any(whole) and (shape == "blocks of one" or not all(whole))


def choose_by_looking(loads: RankLoads, prompt: list[int], worst: list[int]) -> int:
    """Return the rank that `RankLoads.place` must take."""
    open_to_it = []
    for rank, free in enumerate(loads.free_slots):
        groups = range(len(loads.num_blocks))
        never_short = [loads.worst_blocks[rank][g] + worst[g] <= loads.num_blocks[g] for g in groups]
        headroom = [loads.spare_blocks[rank][g] - prompt[g] > loads.num_sequences[rank] for g in groups]
        if free and all(a or b for a, b in zip(never_short, headroom)):
            open_to_it.append((loads.token_work[rank], rank))
    return min(open_to_it)[1] if open_to_it else -1


@pytest.mark.parametrize("seed", range(20))
def test_the_rank_with_least_work_and_room_takes_the_next(seed: int) -> None:
    rng = random.Random(seed)
    ranks, groups = rng.randint(1, 9), rng.randint(1, 2)
    loads = RankLoads(
        free_slots=[rng.randint(0, 3) for _ in range(ranks)],
        spare_blocks=[[rng.randint(0, 20) for _ in range(groups)] for _ in range(ranks)],
        num_sequences=[rng.randint(0, 5) for _ in range(ranks)],
        worst_blocks=[[rng.randint(0, 20) for _ in range(groups)] for _ in range(ranks)],
        token_work=[rng.randint(0, 4) for _ in range(ranks)],
        num_blocks=[20] * groups,
    )
    for _ in range(30):
        prompt = [rng.randint(0, 6) for _ in range(groups)]
        worst = [blocks + rng.randint(0, 6) for blocks in prompt]
        expected = choose_by_looking(loads, prompt, worst)
        assert loads.place(prompt_blocks=prompt, worst_blocks=worst, token_work=rng.randint(0, 5)) == expected


@pytest.mark.parametrize("seed", range(20))
def test_sequences_that_fit_anywhere_are_placed_together_as_one_after_another(seed: int) -> None:
    rng = random.Random(seed)
    ranks, groups, number = rng.randint(1, 9), rng.randint(1, 2), rng.randint(1, 12)
    needs = [[rng.randint(0, 6) for _ in range(groups)] for _ in range(number)]
    totals = [sum(column) for column in zip(*needs)]
    held = [[rng.randint(0, 20) for _ in range(groups)] for _ in range(ranks)]
    free = [rng.randint(0, 3) for _ in range(ranks)]
    free[rng.randrange(ranks)] += number
    most = [max(h[g] for h, slots in zip(held, free) if slots) + totals[g] for g in range(groups)]
    work = [rng.randint(0, 4) for _ in range(ranks)]

    def loads(num_blocks: list[int]) -> RankLoads:
        return RankLoads(
            free_slots=list(free),
            spare_blocks=[[0] * groups for _ in range(ranks)],
            num_sequences=[1] * ranks,
            worst_blocks=[list(own) for own in held],
            token_work=list(work),
            num_blocks=num_blocks,
        )

    assert loads(most).fit_all(totals)
    assert not loads([most[0] - 1, *most[1:]]).fit_all(totals)
    works = [rng.randint(0, 5) for _ in range(number)]
    apart = loads(most)
    expected = [apart.place(prompt_blocks=own, worst_blocks=own, token_work=more) for own, more in zip(needs, works)]
    assert loads(most).place_all(works) == expected


@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_of_many_lengths_are_those_of_each(shape: str) -> None:
    config = config_of(shape)
    lengths = np.arange(1, config.max_model_len + 1)
    assert config.needs_of(lengths).T.tolist() == [list(config.group_needs(length)) for length in lengths.tolist()]


@pytest.mark.parametrize("shape", SHAPES)
def test_both_ways_of_placing_give_the_same_plans(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def plans() -> list:
        config, rng = config_of(shape), random.Random(shape)
        engine = NullEngine(config)
        for number in range(40):
            engine.add(random_request(rng, f"r{number}", config, float(number)))
            if rng.random() < 0.5:
                engine.step()
        engine.run()
        return engine.plans

    together = plans()
    monkeypatch.setattr(steps, "MOST_TOGETHER", 0)
    assert plans() == together


def test_updates_are_of_their_step_and_not_of_who_comes_later() -> None:
    engine = NullEngine(config_of("one rank"), depth=1)
    engine.add(make_request("a", 3, 9))
    engine.step()
    plan = engine.scheduler.schedule()
    engine.submit(plan)
    applied = []
    apply = engine.scheduler.apply
    engine.scheduler.apply = lambda result: applied.append(apply(result)) or applied[-1]
    engine.collect()
    (updates,) = applied
    assert len(updates) == 1 and updates[0].token_ids == engine.tokens["a"][-1:]
    engine.scheduler.abort("a")
    assert updates[0].request.request_id == "a", "what was looked at once stays"

    engine.add(make_request("b", 3, 9))
    engine.step()
    plan = engine.scheduler.schedule()
    result = [rank.run(plan.header, part) for rank, part in zip(engine.ranks, plan.ranks)]
    from moewe.runtime.plan import StepResult

    late = apply(StepResult(step=plan.header.step, ranks=tuple(result)))
    engine.scheduler.abort("b")
    with pytest.raises(AssertionError, match="until slots had changed hands"):
        list(late)


def test_steps_book_tokens_without_a_look_at_any_request() -> None:
    engine = NullEngine(config_of("many ranks", max_num_seqs=3, max_num_batched_tokens=64))
    requests = [make_request(f"r{i}", 2, 40) for i in range(20)]
    for request in requests:
        engine.scheduler.add(request)
        engine.tokens[request.request_id] = []
    for _ in range(4):
        engine.step()
    batch = engine.scheduler._batch
    assert (batch.phase == DECODE).sum() == 20

    class Untouchable(list):
        def __getitem__(self, at: object) -> object:
            assert isinstance(at, slice), "a step looked at a request"
            return super().__getitem__(at)

    batch.requests = Untouchable(batch.requests)
    for _ in range(5):
        plan = engine.scheduler.schedule()
        engine.in_flight.append(plan)
        plan = engine.in_flight.popleft()
        results = [rank.run(plan.header, part) for rank, part in zip(engine.ranks, plan.ranks)]
        from moewe.runtime.plan import StepResult

        assert len(engine.scheduler.apply(StepResult(step=plan.header.step, ranks=tuple(results)))) == 20
